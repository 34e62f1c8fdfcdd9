"""Intervals, paired tests and power. The estimators are those of scipy and statsmodels; this file says which and when.

Every resampling function takes a Generator. The unit of resampling is always a whole task or a whole trajectory,
never a token: tokens of one episode are not independent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import optimize, stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint, samplesize_proportions_2indep_onetail

LEVEL = 0.95
RESAMPLES = 10_000
_BATCH = 1_000  # resamples held in memory at once


@dataclass(frozen=True)
class Interval:
    """A point estimate with its 95 % interval; `n` counts the independent units, `method` names the interval."""

    estimate: float
    low: float
    high: float
    n: int
    method: str


@dataclass(frozen=True)
class PairedDifference:
    """Mean difference b - a over the tasks that both arms played, with an interval by task and an exact p value."""

    a: float
    b: float
    difference: float
    low: float
    high: float
    p: float
    wins: int  # tasks where b > a
    losses: int  # tasks where b < a
    n_tasks: int
    left_out: int  # tasks that only one arm has


def wilson(successes: int, n: int) -> Interval:
    """Success rate with its Wilson score interval.

    Source: Wilson (1927), statsmodels `proportion_confint`. Args: successes out of n independent episodes.
    Returns: rates in [0, 1]; NaN for n = 0.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"wilson: expected 0 <= successes <= n, got {successes} of {n}")
    if n == 0:
        return Interval(np.nan, np.nan, np.nan, 0, "wilson")
    low, high = proportion_confint(successes, n, alpha=1 - LEVEL, method="wilson")
    return Interval(successes / n, float(low), float(high), n, "wilson")


def fisher(successes_a: int, n_a: int, successes_b: int, n_b: int) -> float:
    """Two-sided p value of Fisher's exact test for two independent success counts."""
    table = [[successes_a, n_a - successes_a], [successes_b, n_b - successes_b]]
    return float(stats.fisher_exact(table).pvalue)


def mcnemar(wins: int, losses: int) -> float:
    """Two-sided exact McNemar p value of the discordant pairs (1 when there are none).

    Equal to an exact sign test, which is how it extends to tasks played with several seeds.
    """
    return float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def holm(p: ArrayLike) -> np.ndarray:
    """Holm's adjusted p values: the chance that any true null among them falls below alpha is at most alpha.

    With p sorted upwards, adjusted_i = max over j <= i of (K - j + 1) p_j, at most 1.
    Source: Holm (1979), statsmodels `multipletests`. Args: p [K]; NaN stands for a test that could not be made: it
    stays NaN and is not counted. Returns: [K] in the order given; whatever the tests share, they may be dependent.
    """
    values = np.asarray(p, dtype=np.float64)
    adjusted, made = np.full(values.shape, np.nan), ~np.isnan(values)
    if made.any():
        adjusted[made] = multipletests(values[made], method="holm")[1]
    return adjusted


def max_statistic(differences: ArrayLike, rng: np.random.Generator) -> np.ndarray:
    """Adjusted p values of K paired comparisons made on the same units, e.g. one for each layer.

    p_k = share of sign patterns in which the largest |t| of all K reaches |t_k|. A pattern turns whole units around,
    in all comparisons at once, so that what the comparisons share is kept: sharper than Holm where they are alike.
    Source: Westfall and Young (1993), single-step max-T; all 2^n patterns where these are at most RESAMPLES, else
    that many drawn ones and the observed one.
    Args: differences [n units, K], whole tasks or trajectories. Returns: [K] in (0, 1]; 1 where nothing differs.
    Raises: ValueError on fewer than two units or a missing value.
    """
    values = np.asarray(differences, dtype=np.float64)
    if values.ndim != 2 or len(values) < 2 or np.isnan(values).any():
        raise ValueError(
            f"max_statistic: expected differences of at least two units in K comparisons, none missing, got shape "
            f"{values.shape} with {int(np.isnan(values).sum())} missing; leave out units that lack a comparison"
        )
    n = len(values)
    # A sign leaves squares as they are, so |t| grows with |sum| / sqrt(n sum of squares): no variance is needed anew.
    scale = np.sqrt(n * np.square(values).sum(axis=0))
    unit = np.divide(values, scale, out=np.zeros_like(values), where=scale > 0)
    observed = np.abs(unit.sum(axis=0))
    if 2**n <= RESAMPLES:
        signs = 1.0 - 2.0 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)
    else:
        signs = np.concatenate([np.ones((1, n)), rng.choice([-1.0, 1.0], size=(RESAMPLES, n))])
    largest = np.abs(signs @ unit).max(axis=1)
    return (largest[:, None] >= observed - 1e-12).mean(axis=0)  # equal patterns may differ by rounding


def bootstrap_mean(values: ArrayLike, rng: np.random.Generator) -> Interval:
    """Mean over independent units with a percentile bootstrap interval; NaN interval below two units."""
    array = np.asarray(values, dtype=np.float64)
    return _bootstrap((array,), lambda x, axis: x.mean(axis=axis), rng)


def bootstrap_ratio(counts: ArrayLike, totals: ArrayLike, rng: np.random.Generator) -> Interval:
    """Ratio of sums, sum(counts) / sum(totals), resampling units (trajectories) with their counts and totals together.

    Args: counts, totals [n units]; units with total 0 carry no token and are left out.
    Returns: estimate and percentile interval; `n` counts the units kept.
    """
    count, total = np.asarray(counts, dtype=np.float64), np.asarray(totals, dtype=np.float64)
    if count.shape != total.shape:
        raise ValueError(f"bootstrap_ratio: counts {count.shape} and totals {total.shape} differ in shape")
    kept = total > 0
    return _bootstrap((count[kept], total[kept]), lambda c, t, axis: c.sum(axis=axis) / t.sum(axis=axis), rng)


def bootstrap_ratios(
    counts: np.ndarray, totals: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """bootstrap_ratio of K counts that share their totals, resampled together: a curve with a pointwise interval.

    Args: counts [n units, K], totals [n units]. Returns: estimate, low, high, each [K].
    """
    kept = np.asarray(totals) > 0
    count, total = np.asarray(counts, dtype=np.float64)[kept], np.asarray(totals, dtype=np.float64)[kept]
    estimate = count.sum(axis=0) / total.sum()
    if len(total) < 2:
        return estimate, np.full_like(estimate, np.nan), np.full_like(estimate, np.nan)
    # A resample of units is a vector of weights, so that all K ratios of all resamples are one matrix product.
    weights = rng.multinomial(len(total), np.full(len(total), 1 / len(total)), size=RESAMPLES).astype(np.float64)
    ratios = weights @ count / (weights @ total)[:, None]
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return estimate, low, high


def paired_difference(a: pd.Series, b: pd.Series, rng: np.random.Generator) -> PairedDifference:
    """Success of arm b minus arm a on the same tasks.

    Each series holds success indexed by task id; a task played several times counts once, with its mean. The interval
    resamples tasks; p is the exact sign test over tasks that differ, which is exact McNemar at one episode a task.
    Raises: ValueError when the arms share no task.
    """
    mean_a, mean_b = (series.astype(float).groupby(level=0).mean() for series in (a, b))
    shared = mean_a.index.intersection(mean_b.index)
    if shared.empty:
        raise ValueError("paired_difference: the two arms share no task id; evaluate both on the same panel")
    left, right = mean_a.loc[shared].to_numpy(), mean_b.loc[shared].to_numpy()
    difference = right - left
    interval = bootstrap_mean(difference, rng)
    wins, losses = int((difference > 0).sum()), int((difference < 0).sum())
    return PairedDifference(
        a=float(left.mean()),
        b=float(right.mean()),
        difference=interval.estimate,
        low=interval.low,
        high=interval.high,
        p=mcnemar(wins, losses),
        wins=wins,
        losses=losses,
        n_tasks=len(shared),
        left_out=len(mean_a.index.union(mean_b.index)) - len(shared),
    )


def crossed_bootstrap(differences: np.ndarray, rng: np.random.Generator) -> Interval:
    """Mean of paired differences on a grid of training seeds and tasks, resampling both, each as a whole.

    Args: differences [seeds, tasks], NaN where a pair is missing. Returns: the mean over the pairs there are, with a
    percentile interval; `n` counts tasks. One seed: its tasks alone are resampled. A few seeds understate how much
    seeds vary.
    """
    grid = np.asarray(differences, dtype=np.float64)
    there = (~np.isnan(grid)).astype(np.float64)
    seeds, tasks = grid.shape
    method = f"percentile bootstrap over {'seeds and ' if seeds > 1 else ''}tasks, {RESAMPLES} resamples"
    if not there.any():
        return Interval(np.nan, np.nan, np.nan, 0, method)
    values, estimate = np.nan_to_num(grid), float(np.nanmean(grid))
    if tasks < 2:
        return Interval(estimate, np.nan, np.nan, tasks, method)
    by_seed = rng.multinomial(seeds, np.full(seeds, 1 / seeds), size=RESAMPLES).astype(np.float64)
    by_task = rng.multinomial(tasks, np.full(tasks, 1 / tasks), size=RESAMPLES).astype(np.float64)
    count = ((by_seed @ there) * by_task).sum(axis=1)
    means = ((by_seed @ values) * by_task).sum(axis=1)[count > 0] / count[count > 0]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(estimate, float(low), float(high), tasks, method)


def episodes_per_arm(rate_a: float, rate_b: float, power: float = 0.8) -> float:
    """Independent episodes per arm that detect rate_a against rate_b at two-sided 5 % with the given power.

    Source: normal approximation with pooled variance under the null, statsmodels
    `samplesize_proportions_2indep_onetail`. Returns: inf for equal rates; round up for a plan.
    """
    if rate_a == rate_b:
        return float("inf")
    return float(samplesize_proportions_2indep_onetail(rate_b - rate_a, rate_a, power, alpha=1 - LEVEL))


def detectable_difference(rate: float, episodes: int, power: float = 0.8) -> float:
    """The smallest difference from `rate` that `episodes` independent ones an arm detect, as in episodes_per_arm.

    Returns: a share in (0, 1], of the direction in which less is enough; NaN when no difference is large enough.
    """
    found = []
    for room in (1 - rate, -rate):
        ends = np.sign(room) * 1e-6, room
        if room and episodes_per_arm(rate, rate + room, power) <= episodes:
            root = optimize.brentq(lambda d: episodes_per_arm(rate, rate + d, power) - episodes, *ends)
            found.append(abs(float(root)))
    return min(found, default=np.nan)


def expected_distinct(draws: int, population: int) -> float:
    """Expected number of distinct games among `draws` with replacement: N (1 - (1 - 1/N)^draws)."""
    return population * (1 - (1 - 1 / population) ** draws)


def _bootstrap(samples: tuple[np.ndarray, ...], statistic: Callable[..., Any], rng: np.random.Generator) -> Interval:
    n, method = len(samples[0]), f"percentile bootstrap, {RESAMPLES} resamples"
    if n == 0:
        return Interval(np.nan, np.nan, np.nan, 0, method)
    estimate = float(statistic(*samples, axis=0))
    if n < 2:
        return Interval(estimate, np.nan, np.nan, n, method)
    found = stats.bootstrap(
        samples,
        statistic,
        n_resamples=RESAMPLES,
        batch=_BATCH,
        paired=True,
        vectorized=True,
        confidence_level=LEVEL,
        method="percentile",
        rng=rng,
    ).confidence_interval
    return Interval(estimate, float(found.low), float(found.high), n, method)
