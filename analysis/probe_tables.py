"""Tables of the probes: what can be read by layer and from the output, with intervals by groups of tasks."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis import stats

_SEED = 0  # every set of labels draws from its own generator, so no row depends on its neighbours
_PLACE = ["features", "layer"]


def probe_table(probes: pd.DataFrame, counts: pd.DataFrame) -> pd.DataFrame:
    """Held-out accuracy and selectivity of each reader with their intervals.

    Groups of tasks that folds kept whole are resampled whole, all readers of a set of labels together. The probes are
    not fitted anew: the interval says how far other tasks would move the accuracy of these probes.
    Args: tables probe and probe_trajectories of a measurements artifact. Returns: the rows of `probe` in their order
    with low, high, selectivity (accuracy - control accuracy), selectivity_low, selectivity_high, interval; NaN where
    a probe is not estimable.
    """
    columns = ("low", "high", "selectivity", "selectivity_low", "selectivity_high")
    table = probes.assign(**dict.fromkeys(columns, np.nan), interval="").reset_index(drop=True)
    for labels, rows in counts.groupby("labels", sort=False):
        by_group = rows.groupby(["group", *_PLACE])[["n", "correct", "control_correct"]].sum().unstack(_PLACE)
        total = by_group["n"].iloc[:, 0].to_numpy()  # every reader reads the same samples
        right, control = by_group["correct"], by_group["control_correct"]
        _, low, high = stats.bootstrap_ratios(right.to_numpy(), total, np.random.default_rng(_SEED))
        gained, least, most = stats.bootstrap_ratios((right - control).to_numpy(), total, np.random.default_rng(_SEED))
        found = pd.DataFrame(dict(zip(columns, (low, high, gained, least, most), strict=True)), index=right.columns)
        mine = table.index[table["labels"] == labels]
        place = pd.MultiIndex.from_frame(table.loc[mine, _PLACE])
        table.loc[mine, list(columns)] = found.reindex(place).to_numpy()
        table.loc[mine, "interval"] = f"percentile bootstrap over {len(total)} groups of tasks"
    return table
