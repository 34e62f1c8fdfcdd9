"""Tables of the gap: worked means, turns put together by tens, shares that sum to one, intervals by trajectory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.gap_tables import gap_table, histogram_table

PLACE = {"reader": "r", "context": "own_skill", "task": "k"}


def sums(trajectory: str, by: str, at: str, tokens: int, turns: int, gap: float, size: float, negative: int) -> dict:
    place = {**PLACE, "trajectory": trajectory, "by": by, "at": at, "n_tokens": tokens, "n_turns": turns}
    return {**place, "gap_sum": gap, "abs_gap_sum": size, "n_negative": negative}


def cell(table: pd.DataFrame, **wanted: Any) -> Any:
    (row,) = table[(table[list(wanted)] == pd.Series(wanted)).all(axis=1)].itertuples()
    return row


def test_means_by_turn_and_by_ten_turns() -> None:
    table = gap_table(
        pd.DataFrame(
            [
                sums("a", "turn", "1", 10, 1, -2.0, 4.0, 7),
                sums("a", "turn", "2", 5, 1, 1.0, 1.0, 0),
                sums("a", "turn", "50", 4, 3, -3.0, 3.0, 4),
                sums("b", "turn", "1", 30, 1, -4.0, 6.0, 21),
                sums("b", "turn", "11", 8, 1, 0.8, 2.4, 2),
            ]
        )
    )
    first = {"by": "turn", "at": "1"}
    assert cell(table, quantity="gap", **first).value == pytest.approx(-6 / 40)
    assert cell(table, quantity="abs_gap", **first).value == pytest.approx(10 / 40)
    assert cell(table, quantity="negative_share", **first).value == pytest.approx(28 / 40)
    kl = cell(table, quantity="kl", **first)
    assert kl.value == pytest.approx(6 / 2) and (kl.n_tokens, kl.n_turns, kl.n_trajectories) == (40, 2, 2)
    assert kl.low == pytest.approx(2) and kl.high == pytest.approx(4)  # one of two trajectories drawn twice
    ten = cell(table, quantity="abs_gap", by="turn_bin", at="1")
    assert ten.value == pytest.approx(11 / 45) and (ten.n_tokens, ten.n_turns, ten.n_trajectories) == (45, 3, 2)
    assert cell(table, quantity="kl", by="turn_bin", at="41").value == pytest.approx(3 / 3)
    assert math.isnan(cell(table, quantity="kl", by="turn_bin", at="41").low)  # one trajectory has no interval
    places = table[["by", "at"]].drop_duplicates()
    assert places[places["by"] == "turn"]["at"].tolist() == ["1", "2", "11"]  # 50 is in its bin alone
    assert places[places["by"] == "turn_bin"]["at"].tolist() == ["1", "11", "41"]


def test_positions_stand_in_order_and_parts_of_turns_have_no_kl() -> None:
    rows = [sums("a", "position", at, 4, 0, -1.0, 1.0, 4) for at in ("0.95", "0.05")]
    rows += [sums("b", "position", "0.55", 4, 0, 1.0, 1.0, 0), sums("b", "token_class", "action", 4, 0, 1.0, 1.0, 0)]
    rows += [sums("b", "all", "", 4, 2, 1.0, 1.0, 0)]
    table = gap_table(pd.DataFrame(rows))
    gap = table[table["quantity"] == "gap"]
    assert gap[gap["by"] == "position"]["at"].tolist() == ["0.05", "0.55", "0.95"]
    assert gap[gap["by"] == "position"]["value"].tolist() == [-0.25, 0.25, -0.25]
    assert cell(gap, by="token_class", at="action").value == 0.25
    assert set(table.loc[table["quantity"] == "kl", "by"]) == {"all"}


def test_intervals_resample_whole_trajectories() -> None:
    """Ten times as many tokens in each trajectory are no more observations."""
    generator = np.random.default_rng(0)
    gaps = generator.normal(-1, 2, 12)

    def made(times: int) -> Any:
        rows = [sums(f"t{i}", "all", "", 10 * times, times, gap * times, 0, 0) for i, gap in enumerate(gaps)]
        return cell(gap_table(pd.DataFrame(rows)), quantity="gap")

    once, often = made(1), made(10)
    assert (once.value, once.low, once.high) == pytest.approx((often.value, often.low, often.high))
    assert once.low < once.value < once.high and once.value == pytest.approx(gaps.mean() / 10)


def test_shares_of_the_histogram() -> None:
    edges = [(-math.inf, -1.0), (-1.0, 0.0), (0.0, 1.0), (1.0, math.inf)]
    counts = {("a", "think"): [1, 2, 0, 1], ("a", "action"): [0, 4, 0, 0], ("b", "think"): [0, 0, 4, 0]}
    rows = [
        {**PLACE, "trajectory": trajectory, "token_class": kind, "left": left, "right": right, "count": count}
        for (trajectory, kind), values in [*counts.items(), (("b", "format"), [0] * 4)]
        for (left, right), count in zip(edges, values, strict=True)
    ]
    table = histogram_table(pd.DataFrame(rows))
    assert set(table["token_class"]) == {"all", "think", "action"}
    whole = table[table["token_class"] == "all"]
    assert list(zip(whole["left"], whole["right"], strict=True)) == edges
    assert whole["share"].tolist() == pytest.approx([1 / 12, 6 / 12, 4 / 12, 1 / 12])
    assert set(whole["n_tokens"]) == {12} and set(whole["n_trajectories"]) == {2}
    think = table[table["token_class"] == "think"]
    assert think["share"].tolist() == pytest.approx([1 / 8, 2 / 8, 4 / 8, 1 / 8])
    assert (table["low"].fillna(0) <= table["share"]).all() and (table["share"] <= table["high"].fillna(1)).all()
    assert table.groupby("token_class")["share"].sum().tolist() == pytest.approx([1, 1, 1])


def test_contexts_and_readers_stay_apart() -> None:
    one = sums("a", "all", "", 4, 1, 1.0, 1.0, 0)
    rows = [one, {**one, "context": "none", "gap_sum": 0.0}, {**one, "reader": "other", "gap_sum": 2.0}]
    table = gap_table(pd.DataFrame(rows))
    found = {(row.reader, row.context): row.value for row in table[table["quantity"] == "gap"].itertuples()}
    assert found == {("r", "own_skill"): 0.25, ("r", "none"): 0.0, ("other", "own_skill"): 0.5}
