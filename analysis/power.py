"""Planning: how many episodes or tasks show a difference of success, and what a given number of them can show.

All at two-sided 5 %; 80 % power unless said. Unpaired: two arms on different tasks. Paired: both arms play each task
once and the test is exact McNemar, as in stats.paired_difference; how many tasks that takes depends on the
discordance, the share of tasks that only one of the two arms wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import pandas as pd
from scipy import optimize, stats
from statsmodels.stats.proportion import power_proportions_2indep

from analysis.reference import PAPER_VALUES
from analysis.stats import LEVEL, detectable_difference, episodes_per_arm

POWER = 0.8
PANEL = 128  # episodes of the papers' evaluations
GAPS = (  # (source, baseline, arm) of differences that the papers report
    ("PR-OPD", "grpo", "pr_opd"),
    ("PR-OPD", "sdar", "pr_opd"),
    ("SDAR", "grpo", "sdar"),
    ("SDAR", "rlsd", "sdar"),
    ("PCSD", "grpo", "pcsd"),
    ("PCSD", "sdar", "pcsd"),
)
_MOST = 2**20  # tasks, above which nobody plans


def unpaired_power(rate_a: float, rate_b: float, episodes: int) -> float:
    """Chance that `episodes` independent ones an arm tell rate_b from rate_a, as in stats.episodes_per_arm.

    Source: normal approximation with pooled variance under the null, statsmodels `power_proportions_2indep`.
    """
    found = power_proportions_2indep(rate_b - rate_a, rate_a, episodes, alpha=1 - LEVEL, return_results=False)
    return float(found)


def paired_power(difference: float, discordance: float, tasks: int) -> float:
    """Chance that exact McNemar on `tasks` tasks, played once by each arm, finds the difference.

    Sum over D of Binomial(D; tasks, discordance) P(p value of W wins among D <= 0.05), W ~ Binomial(D, share of wins).
    Source: exact conditional test, enumerated. Args: difference = (wins - losses) / tasks and discordance = (wins +
    losses) / tasks, both expected; shares. Returns: in [0, 1].
    Raises: ValueError for a discordance below the difference, which cannot be.
    """
    _check(difference, discordance)
    if discordance == 0:
        return 0.0
    share = min(max((discordance + difference) / (2 * discordance), 0.0), 1.0)  # rounding, where one arm always wins
    spread = 10 * math.sqrt(tasks * discordance * (1 - discordance)) + 10  # beyond ten deviations nothing is left
    low, high = max(0, int(tasks * discordance - spread)), min(tasks, int(tasks * discordance + spread))
    count = np.arange(low, high + 1)
    bound = _critical(high)[low:]  # largest number of losses (or wins) that is still significant
    rejects = stats.binom.cdf(bound, count, share) + stats.binom.sf(count - bound - 1, count, share)
    return float(stats.binom.pmf(count, tasks, discordance) @ rejects)


def paired_tasks(difference: float, discordance: float, power: float = POWER) -> float:
    """Tasks, each played once by both arms, on which exact McNemar finds the difference with this power.

    Source: paired_power, inverted from the estimate of Connor (1987). Returns: inf for no difference.
    """
    _check(difference, discordance)
    if difference == 0:
        return math.inf
    quantiles = stats.norm.ppf((1 + LEVEL) / 2), stats.norm.ppf(power)
    spread = math.sqrt(discordance), math.sqrt(max(discordance - difference**2, 0.0))
    estimate = (quantiles[0] * spread[0] + quantiles[1] * spread[1]) ** 2 / difference**2
    if estimate > _MOST:
        return float(math.ceil(estimate))
    low, high = 1, max(8, math.ceil(estimate))
    while paired_power(difference, discordance, high) < power:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if paired_power(difference, discordance, middle) >= power else (middle, high)
    return float(high)


def paired_detectable(rate: float, tasks: int, apart: float = 1.0) -> float:
    """The smallest gain over `rate` that exact McNemar finds on `tasks` tasks with 80 % power.

    Args: apart, see `discordance`. Returns: a share in (0, 1 - rate]; NaN when no gain is large enough.
    """

    def lack(gain: float) -> float:
        return POWER - paired_power(gain, discordance(rate, rate + gain, apart), tasks)

    if lack(1 - rate) > 0:
        return math.nan
    return float(optimize.brentq(lack, 1e-6, 1 - rate, xtol=1e-5))


def discordance(rate_a: float, rate_b: float, apart: float) -> float:
    """Share of tasks that only one of two arms wins.

    Args: rates, shares; apart, 0 where the better arm wins whatever the other wins, 1 where they win independently of
    each other (a (1 - b) + b (1 - a)), in proportion between, more where they win different tasks.
    """
    least = abs(rate_b - rate_a)
    return least + apart * (rate_a * (1 - rate_b) + rate_b * (1 - rate_a) - least)


def power_tables(
    rate_a: float,
    rate_b: float,
    given: float | None = None,
    seeds: Sequence[int] = (1, 2, 4),
    episodes: Sequence[int] = (PANEL, 4 * PANEL, 16 * PANEL),
) -> dict[str, pd.DataFrame]:
    """What it takes to tell rate_b from rate_a, and what numbers of episodes can show: title -> table.

    Args: rates, shares in (0, 1); given, the discordance (None: the least there can be, that of independent arms, and
    the middle between them); seeds, evaluation seeds with which each task is played; episodes, of one arm.
    Raises: ValueError for rates that are no shares or equal, or a discordance that two such arms cannot have.
    """
    for rate in (rate_a, rate_b):
        if not 0 < rate < 1:
            raise ValueError(f"a success rate is a share above 0 and below 1, got {rate:g}; write 66 % as 0.66")
    if rate_a == rate_b:
        raise ValueError(f"both rates are {rate_a:g}; there is no difference that episodes could show")
    if min((*seeds, *episodes)) < 1:
        raise ValueError(f"expected seeds and episodes of 1 or more, got {list(seeds)} and {list(episodes)}")
    least, most = abs(rate_b - rate_a), min(rate_a + rate_b, 2 - rate_a - rate_b)
    if given is not None and not least <= given <= most:
        raise ValueError(
            f"arms with success {rate_a:g} and {rate_b:g} differ on {least:.3g} to {most:.3g} of the tasks, "
            f"got a discordance of {given:g}"
        )
    between = discordance(rate_a, rate_b, 1.0) - least
    aparts = [0.0, 0.5, 1.0] if given is None else [(given - least) / between]
    needed = math.ceil(episodes_per_arm(rate_a, rate_b, POWER))
    unpaired = pd.DataFrame([{"a": rate_a, "b": rate_b, "episodes_per_arm": needed}])
    paired = [_paired_row(least, discordance(rate_a, rate_b, apart), k) for apart in aparts for k in seeds]
    shown = [_shown(rate_a, rate_b, aparts[-1], n) for n in sorted({*episodes, needed})]
    return {
        "unpaired, 80 % power: independent episodes of each arm": unpaired,
        "paired, 80 % power: tasks that both arms play, each with so many seeds": pd.DataFrame(paired),
        f"what so many episodes of each arm can show, from {100 * rate_a:.3g} %": pd.DataFrame(shown),
    }


def power_curves(rate: float, gains: Sequence[float], episodes: Sequence[int]) -> pd.DataFrame:
    """Power of the unpaired test of each gain over `rate` that leaves success below 1: gain, episodes, power."""
    return pd.DataFrame(
        [
            {"gain": gain, "episodes": n, "power": unpaired_power(rate, rate + gain, n)}
            for gain in gains
            if rate + gain < 1
            for n in episodes
        ]
    )


def limit_curves(rate: float, episodes: Sequence[int]) -> pd.DataFrame:
    """The smallest gain over `rate` that so many episodes of each arm show: design, episodes, detectable (NaN: none).

    Designs: unpaired, and paired where the arms win tasks independently of each other, where the better one wins all
    that the other wins (nested), and half way between the two.
    """
    rows = [{"design": "unpaired", "episodes": n, "detectable": detectable_difference(rate, n)} for n in episodes]
    for design, mix in (("independent", 1.0), ("half way", 0.5), ("nested", 0.0)):
        rows += [{"design": design, "episodes": n, "detectable": paired_detectable(rate, n, mix)} for n in episodes]
    return pd.DataFrame(rows)


def published_gaps() -> pd.DataFrame:
    """Differences in success on ALFWorld that the papers report, and the power that 128 episodes an arm had for them.

    Columns: paper, model, baseline, arm, a, b, gain, episodes, power (unpaired: their panels were no fixed tasks),
    source.
    """
    values = {(v.source.partition(" ")[0], v.model, v.quantity): v for v in PAPER_VALUES}
    rows = []
    for paper, baseline, arm in GAPS:
        for model in dict.fromkeys(v.model for v in PAPER_VALUES):
            names = [f"success/alfworld/{name}" for name in (baseline, arm)]
            pair = [values.get((paper, model, name)) for name in names]
            if pair[0] is None or pair[1] is None:
                continue
            a, b = pair[0].low, pair[1].low
            row = {"paper": paper, "model": model, "baseline": baseline, "arm": arm, "a": a, "b": b, "gain": b - a}
            rows.append({**row, "episodes": PANEL, "power": unpaired_power(a, b, PANEL), "source": pair[1].source})
    return pd.DataFrame(rows)


def _paired_row(difference: float, discordance: float, seeds: int) -> dict[str, float | int]:
    """At best all that differs between the arms is luck of play, and k seeds do the work of k times the tasks; at
    worst a task always ends the same, and they add nothing."""
    most = math.ceil(paired_tasks(difference, discordance))
    return {
        "discordance": discordance,
        "seeds": seeds,
        "tasks_at_best": math.ceil(most / seeds),
        "tasks_at_worst": most,
    }


def _shown(rate_a: float, rate_b: float, apart: float, episodes: int) -> dict[str, float | int]:
    return {
        "episodes": episodes,
        "power_unpaired": unpaired_power(rate_a, rate_b, episodes),
        "power_paired": paired_power(abs(rate_b - rate_a), discordance(rate_a, rate_b, apart), episodes),
        "detectable_unpaired": detectable_difference(rate_a, episodes),
        "detectable_paired": paired_detectable(rate_a, episodes, apart),
    }


@cache
def _all_critical(most: int) -> np.ndarray:
    count = np.arange(most + 1)
    bound = stats.binom.ppf((1 - LEVEL) / 2, count, 0.5)
    # ppf is the first value whose cdf reaches 2.5 %; the test rejects up to the last whose cdf stays within it
    return np.where(2 * stats.binom.cdf(bound, count, 0.5) <= 1 - LEVEL, bound, bound - 1)


def _critical(discordant: int) -> np.ndarray:
    """For each D up to `discordant`: the largest W with an exact two-sided p value of W wins among D <= 5 %, or -1."""
    return _all_critical(2 ** max(10, discordant.bit_length()))[: discordant + 1]


def _check(difference: float, discordance: float) -> None:
    if not abs(difference) <= discordance + 1e-12 or discordance > 1:
        raise ValueError(
            f"a difference of {difference:g} needs a discordance between {abs(difference):g} and 1, got {discordance:g}"
        )
