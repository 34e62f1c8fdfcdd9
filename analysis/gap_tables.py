"""The gap between teacher and student with intervals by trajectory: where in an episode it lives, and its histogram."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from analysis import stats
from analysis.tables import groups

TURNS = 20  # turns that stand alone, as in SDAR Fig. 2; beyond it the bins of ten tell more
BIN = 10  # turns of a bin, as in SDAR Fig. 3b
PER_TOKEN = {"gap": "gap_sum", "abs_gap": "abs_gap_sum", "negative_share": "n_negative"}
_SUMS = ["n_tokens", "n_turns", "gap_sum", "abs_gap_sum", "n_negative"]
_SEED = 0  # every row draws from its own generator, so no row depends on its neighbours


def gap_table(gaps: pd.DataFrame) -> pd.DataFrame:
    """Means of the gap by turn, by ten turns, by relative position inside the turn, by token class, and over all.

    Quantities: gap and abs_gap, nats a token; negative_share, of the tokens; kl, nats a turn: minus the gap summed over
    the turn, a single-sample estimate of KL(student || teacher) of the whole turn (chain rule; its mean is that KL only
    for tokens that this student sampled at the temperature it was read with), so that it can be negative.
    Source: SDAR Fig. 2 (KL by turn; that it is a sum over the turn's tokens is ours) and Fig. 3b, c.
    Args: table `gaps` of the measure, with a column reader.
    Columns: reader, context, by ("turn", "turn_bin", "position", "token_class", "all"), at (first turn; middle of the
    tenth as a share of the turn; class; ""), quantity, value, low, high, n_tokens, n_turns, n_trajectories. Turns 1 to
    20 stand alone; bin 41 holds all later ones too.
    """
    rows: list[dict[str, Any]] = []
    for place, group in groups(gaps, ("reader", "context")):
        for at, cell in _cells(group):
            found = _ratios(cell, "n_tokens", PER_TOKEN)
            found += _ratios(cell.assign(kl=-cell["gap_sum"]), "n_turns", {"kl": "kl"}) if cell["n_turns"].any() else []
            rows += [{**place, **at, **row} for row in found]
    return pd.DataFrame(rows)


def histogram_table(histogram: pd.DataFrame) -> pd.DataFrame:
    """Share of tokens in each bin of the gap, open bins at both ends, by token class and for all of them.

    Source: SDAR Fig. 3a. Args: table `gap_histogram` of the measure, with a column reader.
    Columns: reader, context, token_class, left, right (nats; a bin is [left, right)), share, low, high, n_tokens,
    n_trajectories. Classes without a token are left out.
    """
    frames = []
    whole = histogram.assign(token_class="all")
    for place, group in groups(pd.concat([whole, histogram]), ("reader", "context", "token_class")):
        counts = group.pivot_table("count", "trajectory", ["left", "right"], aggfunc="sum")
        totals = counts.sum(axis=1)
        if not totals.any():
            continue
        share, low, high = stats.bootstrap_ratios(counts.to_numpy(), totals.to_numpy(), np.random.default_rng(_SEED))
        bins = counts.columns.to_frame(index=False)
        size = {"n_tokens": int(totals.sum()), "n_trajectories": int((totals > 0).sum())}
        frames.append(pd.DataFrame({**place, **bins, "share": share, "low": low, "high": high, **size}))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _cells(gaps: pd.DataFrame) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Every place, and the sums of each trajectory there."""
    turns = gaps[gaps["by"] == "turn"]
    number = turns["at"].astype(int)
    bins = turns.assign(by="turn_bin", at=((number - 1) // BIN * BIN + 1).astype(str))
    parts = pd.concat([turns[number <= TURNS], bins, gaps[gaps["by"] != "turn"]])
    parts = parts.assign(order=pd.to_numeric(parts["at"], errors="coerce")).sort_values(["by", "order"])
    for place, part in groups(parts, ("by", "at")):
        yield place, part.groupby("trajectory", sort=False)[_SUMS].sum()


def _ratios(cell: pd.DataFrame, total: str, quantities: Mapping[str, str]) -> list[dict[str, Any]]:
    """A row for each quantity: its column over the total, trajectories resampled."""
    totals = cell[total].to_numpy()
    counts = cell[list(quantities.values())].to_numpy(dtype=float)
    found = stats.bootstrap_ratios(counts, totals, np.random.default_rng(_SEED))
    size = {name: int(cell[name].sum()) for name in ("n_tokens", "n_turns")}
    size["n_trajectories"] = int((totals > 0).sum())
    return [
        {"quantity": name, "value": value, "low": low, "high": high, **size}
        for name, value, low, high in zip(quantities, *found, strict=True)
    ]
