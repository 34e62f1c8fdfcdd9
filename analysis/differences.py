"""Paired differences between arms, on the tasks, training seeds and evaluation seeds that both have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pandas as pd

from analysis import stats
from analysis.frames import played

_SEED = 0  # of every bootstrap


def difference_table(episodes: pd.DataFrame, pairs: Sequence[tuple[str, str]], column: str = "success") -> pd.DataFrame:
    """Paired difference of arm minus base.

    `low` and `high` resample training seeds and tasks; `p` is the exact sign test over tasks (means over seeds), which
    is exact McNemar where each task was played once and won or lost.
    Args: episodes, with the columns arm and training_seed; pairs of (base, arm); column, what is compared: success, or
    the score, of which an episode that has none is left out.
    Returns: columns base, arm, the fields of stats.PairedDifference, seeds_better (training seeds in which the arm is
    ahead), n_training_seeds, interval; no row for a pair that shares nothing.
    """
    done = played(episodes).dropna(subset=column)
    rows = []
    for base, arm in pairs:
        wide = [_grid(done[done["arm"] == name], column) for name in (base, arm)]
        both = wide[0].index.intersection(wide[1].index)
        if base == arm or both.empty:
            continue
        a, b = (grid.loc[both] for grid in wide)
        before, after = (grid.groupby(level="task").mean() for grid in (a, b))
        result = stats.paired_difference(before, after, _rng())
        grid = (b - a).groupby(level=["training_seed", "task"]).mean().unstack("task")
        interval = stats.crossed_bootstrap(grid.to_numpy(), _rng())
        row = {**asdict(result), "difference": interval.estimate, "low": interval.low, "high": interval.high}
        better = int((grid.mean(axis=1) > 0).sum())
        row |= {"seeds_better": better, "n_training_seeds": len(grid), "interval": interval.method}
        rows.append({"base": base, "arm": arm, **row})
    return pd.DataFrame(rows)


def _grid(episodes: pd.DataFrame, column: str) -> pd.Series:
    """Mean of the column by training seed, evaluation seed and task."""
    return episodes.astype({column: float}).groupby(["training_seed", "seed", "task"])[column].mean()


def _rng() -> np.random.Generator:
    return np.random.default_rng(_SEED)
