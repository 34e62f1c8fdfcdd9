"""Whether token weights follow what a skill is worth, and an expert: rank correlations and AUROC with intervals.

A value that has no meaning says why in `note`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from analysis import stats
from analysis.tables import groups

CONSTANT = 1e-6  # differences within it are rounding: a weight normalised to mean 1 has no other
FLAT_WEIGHT = "the mean weight does not change"
FLAT_QUALITY = "the quality does not change"
FEW = "fewer than 3 units"
ONE_VERDICT = "tokens of one verdict only"
INTERVAL = f"percentile bootstrap over trajectories, {stats.RESAMPLES} resamples"
_BATCH = 1_000  # resamples held in memory at once
_SEED = 0  # every row draws from its own generator, so no row depends on its neighbours


def perturbation_units(perturbation: pd.DataFrame) -> pd.DataFrame:
    """What the own skill changes against a perturbed one, a row for each trajectory, context and method with both
    differences.

    Args: table `perturbation` of the measure, with a column reader.
    Columns: reader, context, method, trajectory, task, mate, weight_change (own minus perturbed, mean over the response
    tokens), action_weight_change (over the action tokens; NaN without any), quality_change (nats a token), n_tokens,
    n_action_tokens (behind the quality).
    """
    kept = perturbation[perturbation["undefined"] == ""]
    names = ("weight", "action_weight", "quality")
    changes = {f"{n}_change": kept[f"{n}_own"].astype(float) - kept[f"{n}_perturbed"].astype(float) for n in names}
    place = ["reader", "context", "method", "trajectory", "task", "mate"]
    found = kept[[*place, "n_tokens", "n_action_tokens"]].assign(**changes)
    return found[[*place, *changes, "n_tokens", "n_action_tokens"]].reset_index(drop=True)


def perturbation_table(perturbation: pd.DataFrame) -> pd.DataFrame:
    """Rank correlation, over trajectories, of the change of a method's mean weight with the change of quality.

    Source: PCSD Fig. 5, whose correlation and quality are not described; ours: Spearman, and the quality of
    diagnostics.perturbation. Args: its table, with a column reader.
    Columns: reader, context, method, spearman, low, high, n_units (trajectories with both differences), n_undefined,
    note (why some, or the correlation, are undefined), interval. Bounds are those of the resamples in which the
    correlation is defined.
    """
    return _correlations(perturbation, "weight_change")


def action_perturbation_table(perturbation: pd.DataFrame) -> pd.DataFrame:
    """The table of `perturbation_table` with mean weights over the action tokens alone.

    A weight that is normalised over each response has the mean 1 there whatever the skill; over its action tokens it
    has not.
    """
    return _correlations(perturbation, "action_weight_change")


def _correlations(perturbation: pd.DataFrame, weight: str) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for place, group in groups(perturbation, ("reader", "context", "method")):
        units = perturbation_units(group).dropna(subset=[weight])
        change, quality = (units[name].to_numpy(dtype=np.float64) for name in (weight, "quality_change"))
        reasons = group.loc[group["undefined"] != "", "undefined"].tolist()
        reasons += ["no action token of its own"] * (len(group) - len(reasons) - len(units))
        size = {"n_units": len(units), "n_undefined": len(reasons)}
        fault = _fault(change, quality)
        value, low, high = np.nan, np.nan, np.nan
        if not fault:
            value, low, high = spearman(change, quality, np.random.default_rng(_SEED))
        note = "; ".join([*([fault] if fault else []), *_counted(reasons)])
        rows.append({**place, "spearman": value, "low": low, "high": high, **size, "note": note, "interval": INTERVAL})
    return pd.DataFrame(rows)


def _fault(change: np.ndarray, quality: np.ndarray) -> str:
    if len(change) < 3:
        return FEW
    if np.ptp(change) <= CONSTANT:
        return FLAT_WEIGHT
    return FLAT_QUALITY if np.ptp(quality) <= CONSTANT else ""


def spearman(x: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> tuple[float, float, float]:
    """Spearman's rank correlation of two quantities of the same units, and its percentile bootstrap interval.

    rho = Pearson correlation of the ranks, ties at their mean rank. Args: x, y [n units], neither constant.
    Returns: estimate, low, high in [-1, 1]; resamples in which one of both is constant are left out.
    """
    found = []
    for _ in range(stats.RESAMPLES // _BATCH):
        drawn = rng.integers(len(x), size=(_BATCH, len(x)))
        found.append(_rank_correlation(x[drawn], y[drawn]))
    low, high = np.nanquantile(np.concatenate(found), [(1 - stats.LEVEL) / 2, (1 + stats.LEVEL) / 2])
    return float(_rank_correlation(x[None], y[None])[0]), float(low), float(high)


def _rank_correlation(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    one, other = (rankdata(values, axis=1) for values in (x, y))
    one, other = (ranks - ranks.mean(axis=1, keepdims=True) for ranks in (one, other))
    scale = np.sqrt(np.square(one).sum(axis=1) * np.square(other).sum(axis=1))
    return np.divide((one * other).sum(axis=1), scale, out=np.full(len(x), np.nan), where=scale > 0)


def auroc_table(agreement: pd.DataFrame) -> pd.DataFrame:
    """How well each method's weight tells action tokens that an expert accepts from those it does not.

    auroc = P(weight of an accepted token > weight of a rejected one) + P(equal) / 2, over all pairs of tokens; 0.5:
    the weight tells nothing, and exactly that for a constant one. Weights within one bin count as equal.
    Source: ours (PCSD Fig. 6 is not described). Args: table `agreement` of the measure, with a column reader.
    Columns: reader, method, auroc, low, high, n_accepted, n_rejected (tokens), n_trajectories, n_undefined
    (trajectories), n_not_finite (tokens left out), note, interval. A reader without a single verdict has one row, with
    method "".
    """
    rows: list[dict[str, Any]] = []
    for place, mine in groups(agreement, ("reader",)):
        reasons = mine.loc[mine["undefined"] != "", "undefined"].tolist()
        defined = mine[mine["undefined"] == ""]
        for method in dict.fromkeys(defined["method"]) or [""]:
            group = defined[defined["method"] == method]
            lost = int(group.groupby("trajectory")["not_finite"].first().sum())
            tokens = {f"n_{kind}": int(group[kind].sum()) for kind in ("accepted", "rejected")}
            size = {"n_trajectories": group["trajectory"].nunique(), "n_undefined": len(reasons), "n_not_finite": lost}
            value, low, high = np.nan, np.nan, np.nan
            fault = [] if min(tokens.values()) else [ONE_VERDICT]
            if not fault:
                counts = _wide(group, "accepted"), _wide(group, "rejected")
                value, low, high = auroc(*counts, np.random.default_rng(_SEED))
            bounds = {"auroc": value, "low": low, "high": high}
            note = "; ".join([*fault, *_counted(reasons)])
            rows.append({**place, "method": method, **bounds, **tokens, **size, "note": note, "interval": INTERVAL})
    return pd.DataFrame(rows)


def auroc(accepted: np.ndarray, rejected: np.ndarray, rng: np.random.Generator) -> tuple[float, float, float]:
    """Area under the ROC curve of counts by ascending value, and its percentile bootstrap interval over the n units.

    Args: accepted, rejected [n units, K values]. Returns: estimate, low, high in [0, 1]; bounds are NaN below two
    units, and resamples without a count on one side are left out.
    """
    n = len(accepted)
    value = float(_area(accepted.sum(axis=0)[None], rejected.sum(axis=0)[None])[0])
    if n < 2:
        return value, np.nan, np.nan
    found = []
    for _ in range(stats.RESAMPLES // _BATCH):
        weights = rng.multinomial(n, np.full(n, 1 / n), size=_BATCH).astype(np.float64)
        found.append(_area(weights @ accepted, weights @ rejected))
    low, high = np.nanquantile(np.concatenate(found), [(1 - stats.LEVEL) / 2, (1 + stats.LEVEL) / 2])
    return value, float(low), float(high)


def _area(accepted: np.ndarray, rejected: np.ndarray) -> np.ndarray:
    below = rejected.cumsum(axis=1) - rejected / 2
    pairs = accepted.sum(axis=1) * rejected.sum(axis=1)
    return np.divide((accepted * below).sum(axis=1), pairs, out=np.full(len(pairs), np.nan), where=pairs > 0)


def _wide(group: pd.DataFrame, kind: str) -> np.ndarray:
    """Counts by trajectory and bin."""
    wide = group.pivot_table(kind, "trajectory", "bin", aggfunc="sum", fill_value=0, sort=True)
    return wide.to_numpy(dtype=np.float64)


def _counted(reasons: Iterable[str]) -> list[str]:
    return [f"{n} × {reason}" for reason, n in Counter(reasons).most_common()]
