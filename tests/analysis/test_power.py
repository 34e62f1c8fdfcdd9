"""The planner against enumeration, simulation and the worked numbers of a paper's headline gap."""

from __future__ import annotations

import math

import numpy as np
import pytest

from analysis import power, stats
from analysis.reference import PAPER_VALUES


def test_paired_power_by_enumeration():
    """Every outcome of ten tasks (win, loss, tie), with the p value that the product computes."""
    wins, losses, tasks = 0.3, 0.1, 10
    total = 0.0
    for w in range(tasks + 1):
        for lost in range(tasks - w + 1):
            ways = math.comb(tasks, w) * math.comb(tasks - w, lost)
            chance = ways * wins**w * losses**lost * (1 - wins - losses) ** (tasks - w - lost)
            total += chance * (stats.mcnemar(w, lost) <= 0.05)
    assert power.paired_power(wins - losses, wins + losses, tasks) == pytest.approx(total)
    assert power.paired_power(losses - wins, wins + losses, tasks) == pytest.approx(total)


def test_no_difference_is_found_less_often_than_five_times_in_a_hundred():
    found = [power.paired_power(0.0, 0.4, tasks) for tasks in (10, 50, 128, 1000, 30_000)]
    assert max(found) <= 0.05 and found[-1] == pytest.approx(0.05, abs=0.005)
    assert power.paired_power(0.0, 0.0, 100) == 0.0


@pytest.mark.parametrize("a, b, discordance", [(0.6, 0.7, 0.2), (0.6, 0.7, 0.46), (0.5, 0.42, 0.3)])
def test_paired_tasks_have_the_power_they_promise(a, b, discordance):
    tasks = int(power.paired_tasks(b - a, discordance))
    win, lose = (discordance + b - a) / 2, (discordance - b + a) / 2
    draw = np.random.default_rng(0).multinomial(tasks, [win, lose, 1 - win - lose], size=3000)
    outcomes, counts = np.unique(draw[:, :2], axis=0, return_counts=True)
    rejected = [stats.mcnemar(int(w), int(lost)) <= 0.05 for w, lost in outcomes]
    assert counts @ rejected / 3000 == pytest.approx(0.8, abs=0.03)
    assert power.paired_power(b - a, discordance, tasks) >= 0.8 > power.paired_power(b - a, discordance, tasks - 1)


def test_pairing_helps_as_far_as_the_arms_win_the_same_tasks():
    nested, middle, apart = (power.paired_tasks(0.05, d) for d in (0.05, 0.24, 0.433))
    assert nested < middle < apart == pytest.approx(stats.episodes_per_arm(0.66, 0.71), rel=0.05)
    assert power.paired_tasks(0.0, 0.3) == math.inf and power.paired_tasks(1e-4, 0.5) > 1e8


def test_detectable_gain_is_where_power_is_reached():
    gain = power.paired_detectable(0.66, 128)
    assert power.paired_power(gain, power.discordance(0.66, 0.66 + gain, 1), 128) == pytest.approx(0.8, abs=1e-3)
    assert power.paired_detectable(0.66, 128, 0.5) < gain  # fewer tasks end differently
    assert math.isnan(power.paired_detectable(0.66, 5))
    n = stats.episodes_per_arm(0.66, 0.71)
    assert power.unpaired_power(0.66, 0.71, round(n)) == pytest.approx(0.8, abs=1e-3)
    assert stats.detectable_difference(0.66, round(n)) == pytest.approx(0.05, abs=1e-3)


def test_discordance_of_nested_and_independent_arms():
    draw = np.random.default_rng(0).random((2, 200_000))
    a, b = draw < np.array([[0.66], [0.71]])
    assert power.discordance(0.66, 0.71, 1) == pytest.approx((a != b).mean(), abs=0.005)
    nested = draw[0] < 0.71
    assert power.discordance(0.71, 0.66, 0) == pytest.approx((a != nested).mean(), abs=0.005)


def test_b72_tables_of_the_headline_gap():
    unpaired, paired, shown = power.power_tables(0.664, 0.711).values()
    assert unpaired["episodes_per_arm"].tolist() == [1526]
    assert paired["discordance"].drop_duplicates().tolist() == pytest.approx([0.047, 0.2389, 0.4308], abs=1e-4)
    one, many = (paired[paired["seeds"] == k].reset_index() for k in (1, 4))
    assert (one["tasks_at_best"] == one["tasks_at_worst"]).all()
    assert (many["tasks_at_best"] == np.ceil(one["tasks_at_worst"] / 4)).all()
    panel = shown[shown["episodes"] == 128].iloc[0]
    assert panel["power_unpaired"] < 0.15 and panel["power_paired"] < 0.15  # 128 episodes overlook it
    assert 0.14 < panel["detectable_unpaired"] < 0.16
    assert 1526 in shown["episodes"].tolist() and shown["power_unpaired"].is_monotonic_increasing


def test_given_discordance_and_seeds():
    _, paired, shown = power.power_tables(0.71, 0.664, 0.2, (3,), (200,)).values()
    most = power.paired_tasks(0.71 - 0.664, 0.2)
    row = {"discordance": 0.2, "seeds": 3, "tasks_at_best": math.ceil(most / 3), "tasks_at_worst": most}
    assert paired.to_dict("records") == [row]
    assert shown["power_paired"].iloc[0] == pytest.approx(power.paired_power(0.71 - 0.664, 0.2, 200))
    assert shown["detectable_paired"].iloc[0] < power.paired_detectable(0.71, 200)


@pytest.mark.parametrize(
    "given, says",
    [
        ((66, 71), "write 66 % as 0.66"),
        ((0.5, 0.5), "no difference"),
        ((0.66, 0.71, 0.01), "differ on 0.05 to 0.63 of the tasks"),
        ((0.66, 0.71, 0.9), "differ on 0.05 to 0.63 of the tasks"),
        ((0.66, 0.71, None, (0,)), "seeds and episodes of 1 or more"),
    ],
)
def test_refusals(given, says):
    with pytest.raises(ValueError, match=says):
        power.power_tables(*given)
    with pytest.raises(ValueError, match="needs a discordance"):
        power.paired_power(0.3, 0.2, 10)


def test_curves_and_published_gaps():
    curves = power.power_curves(0.66, (0.05, 0.1, 0.4), (128, 512))
    assert curves["gain"].tolist() == [0.05, 0.05, 0.1, 0.1]  # 66 % cannot gain 40 points
    assert curves["power"].iloc[0] == pytest.approx(power.unpaired_power(0.66, 0.71, 128))
    limits = power.limit_curves(0.66, (8, 512)).pivot(index="design", columns="episodes", values="detectable")
    assert limits.loc["nested", 512] < limits.loc["half way", 512] < limits.loc["independent", 512]
    assert limits.loc["unpaired", 512] == stats.detectable_difference(0.66, 512)
    assert math.isnan(limits.loc["independent", 8])
    gaps = power.published_gaps().set_index(["paper", "model", "baseline", "arm"])
    headline = gaps.loc[("PR-OPD", "Qwen2.5-3B-Instruct", "grpo", "pr_opd")]
    assert (headline["a"], headline["b"]) == (0.664, 0.711)
    assert headline["power"] == pytest.approx(power.unpaired_power(0.664, 0.711, 128))
    assert set(gaps["source"]) <= {value.source for value in PAPER_VALUES}
    assert ("SDAR", "Qwen2.5-7B-Instruct", "grpo", "sdar") in gaps.index
    assert ("PCSD", "Qwen3-1.7B", "sdar", "pcsd") in gaps.index
