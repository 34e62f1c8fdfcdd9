"""Tables of patching, lens and audit: worked numbers, what is left out, and intervals by trajectory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.causal_tables import (
    NO_TOKENS,
    OTHER_SPACE,
    SMALL_GAP,
    audit_table,
    lens_table,
    patching_table,
)
from analysis.measured import measured_tables
from diagnostics.artifact import save_artifact

PLACE = {"reader": "r", "context": "own_skill", "task": "t"}


def patch(trajectory: str, segment: int, student: float, teacher: float, patched: Any, **more: Any) -> list[dict]:
    """One run of two blocks: the patched log-prob behind each."""
    fixed = {"positions": "action", "scope": "single", "source": "teacher", "draw": 0, "tokens": 4, "differ": 2}
    fixed |= {"turned": 0, "lost": 0} | more
    return [
        {**PLACE, "trajectory": trajectory, "segment": segment, "student_logprob": student, "teacher_logprob": teacher,
         "patched_logprob": value, "layer": str(layer), **fixed}
        for layer, value in enumerate(patched)
    ]  # fmt: skip


def cells(table: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    return table[(table[list(wanted)] == pd.Series(wanted)).all(axis=1)]


def cell(table: pd.DataFrame, **wanted: Any) -> Any:
    (row,) = cells(table, **wanted).itertuples()
    return row


# --- patching --------------------------------------------------------------------------------------------------------


def test_recovered_share_is_of_the_summed_gaps_whatever_their_sign() -> None:
    rows = [
        *patch("a", 0, -4.0, -1.0, [-4.0, -1.0]),  # gap 3: nothing, all of it
        *patch("a", 1, -1.0, -2.0, [-1.5, -2.0]),  # gap -1: half of it, all
        *patch("b", 2, -3.0, -2.0, [-3.5, -2.0]),  # gap 1: away by half, all
        *patch("b", 3, -2.0, -2.05, [-9.0, -9.0]),  # nothing to recover
    ]
    table = patching_table(pd.DataFrame(rows))
    first, last = (cell(table, quantity="recovered", layer=layer) for layer in "01")
    assert first.value == pytest.approx((0 + 0.5 - 0.5) / 5) and last.value == pytest.approx(1)
    assert (last.low, last.high) == pytest.approx((1, 1)) and first.low < first.value < first.high
    assert (first.n_segments, first.n_trajectories, first.n_undefined, first.note) == (3, 2, 1, SMALL_GAP)
    change = cell(table, quantity="logprob_change", layer="0")
    assert change.value == pytest.approx((0 - 0.5 - 0.5 - 7) / 4) and change.n_undefined == 0 and change.note == ""


def test_without_a_gap_the_share_is_undefined_by_name() -> None:
    table = patching_table(pd.DataFrame(patch("a", 0, -1.0, -1.01, [-1.0, -5.0], differ=0)))
    for quantity, note in (("recovered", SMALL_GAP), ("turned", NO_TOKENS)):
        row = cell(table, quantity=quantity, layer="1")
        assert math.isnan(row.value) and row.note == note and (row.n_segments, row.n_undefined) == (0, 1)
    assert cell(table, quantity="lost", layer="1").note == ""


def test_greedy_tokens_and_actions() -> None:
    rows = [
        *patch("a", 0, -4.0, -1.0, [-4.0], turned=2, lost=0),  # the teacher's action
        *patch("a", 1, -4.0, -1.0, [-4.0], turned=1, lost=2),
        *patch("b", 2, -4.0, -1.0, [-4.0], differ=0, turned=0, lost=0),  # was the teacher's before
        *patch("b", 3, -4.0, -1.0, [-4.0], differ=4, turned=4, lost=0),
    ]
    table = patching_table(pd.DataFrame(rows))
    assert cell(table, quantity="turned").value == pytest.approx(7 / 8)
    assert cell(table, quantity="lost").value == pytest.approx(2 / 8)
    assert cell(table, quantity="same_action", source="teacher").value == pytest.approx(3 / 4)
    without = cell(table, quantity="same_action", source="student")
    assert without.value == pytest.approx(1 / 4) and without.layer == "" and without.n_segments == 4
    assert cell(table, quantity="turned").n_undefined == 1  # the turn without a token that differs


def test_draws_are_averaged_and_runs_kept_apart() -> None:
    rows = [
        *patch("a", 0, -4.0, -1.0, [-3.0], source="random", draw=0),
        *patch("a", 0, -4.0, -1.0, [-5.0], source="random", draw=1),
        *patch("b", 1, -4.0, -1.0, [-4.0], source="random", draw=0),
        *patch("b", 1, -4.0, -1.0, [-4.0], source="random", draw=1),
        *patch("a", 0, -4.0, -1.0, [-1.0]),
        *patch("a", 0, -4.0, -1.0, [-2.5], positions="thought", scope="from"),
    ]
    table = patching_table(pd.DataFrame(rows))
    random = cell(table, quantity="recovered", source="random")
    assert random.value == pytest.approx(0) and random.n_segments == 2
    assert cell(table, quantity="recovered", source="teacher", scope="single").value == pytest.approx(1)
    assert cell(table, quantity="recovered", scope="from").value == pytest.approx(0.5)
    assert math.isnan(cell(table, quantity="recovered", scope="from").low)  # one trajectory has no interval


def test_intervals_resample_whole_trajectories() -> None:
    """Twenty turns of one trajectory are one observation: repeating turns leaves the interval where it is."""
    generator = np.random.default_rng(0)
    gaps, shares = generator.uniform(1, 3, 12), generator.uniform(0, 1, 12)

    def frame(copies: int) -> pd.DataFrame:
        rows = [
            row
            for i, (gap, share) in enumerate(zip(gaps, shares, strict=True))
            for k in range(copies)
            for row in patch(f"t{i}", copies * i + k, -5.0, -5 + gap, [-5 + gap * share])
        ]
        return pd.DataFrame(rows)

    once, often = (cell(patching_table(frame(n)), quantity="recovered") for n in (1, 20))
    assert (once.value, once.low, once.high) == pytest.approx((often.value, often.low, often.high))
    assert once.value == pytest.approx(gaps @ shares / gaps.sum()) and once.low < once.value < once.high


def test_layers_keep_their_order() -> None:
    table = patching_table(pd.DataFrame(patch("a", 0, -4.0, -1.0, [-4.0] * 12)))
    assert cells(table, quantity="recovered")["layer"].tolist() == [str(layer) for layer in range(12)]


# --- logit lens ------------------------------------------------------------------------------------------------------


def test_lens_by_first_and_all_tokens() -> None:
    rows = []
    for segment, (trajectory, ranks) in enumerate((("a", (1, 4)), ("b", (16, 1)))):
        for token, rank in enumerate(ranks):
            for layer in (0, 1):
                place = {**PLACE, "trajectory": trajectory, "segment": segment, "branch": "student"}
                value = {"layer": str(layer), "token": token, "rank": rank if layer else 100, "logprob": -float(rank)}
                rows.append({**place, **value})
    table = lens_table(pd.DataFrame(rows))
    last = {"layer": "1", "branch": "student"}
    assert cell(table, quantity="rank", tokens="first", **last).value == pytest.approx(4)  # sqrt(1 * 16)
    assert cell(table, quantity="rank", tokens="all", **last).value == pytest.approx(64**0.25)
    assert cell(table, quantity="top1", tokens="all", **last).value == pytest.approx(0.5)
    assert cell(table, quantity="logprob", tokens="all", **last).value == pytest.approx(-22 / 4)
    first = cell(table, quantity="rank", tokens="first", layer="0", branch="student")
    assert (first.value, first.low, first.high) == pytest.approx((100, 100, 100))
    assert first.n_segments == first.n_trajectories == 2


# --- audit -----------------------------------------------------------------------------------------------------------


def audited(channel: str, segment: int, token_class: str = "all", **more: Any) -> dict[str, Any]:
    fixed = {"trajectory": f"t{segment}", "segment": segment, "space": "logits", "tokens": 4, "undefined": ""}
    sums = {"expected_norm": 4.0, "expected_sq": 4.0, "norm": 8.0, "norm_sq": 20.0, "reference_sq": 9.0, "dot": 3.0}
    return {**PLACE, **fixed, **sums, "channel": channel, "token_class": token_class, "parameter_cosine": 0.25, **more}


def test_audit_quantities_worked() -> None:
    rows = [
        audited("sdar", 0),
        audited("sdar", 0, "think", norm=2.0, expected_norm=3.0, parameter_cosine=None),
        audited("sdar", 0, "action", norm=6.0, expected_norm=1.0, parameter_cosine=None),
        audited("sdar", 1, dot=0.0, norm_sq=16.0, expected_sq=2.0, parameter_cosine=0.75),
        audited("sdar", 1, "action", norm=8.0, expected_norm=4.0, parameter_cosine=None),
    ]
    table = audit_table(pd.DataFrame(rows))
    value = {(row.quantity, row.token_class): row.value for row in table.itertuples()}
    assert value["cosine_logits", "all"] == pytest.approx((3 / 6 + 0) / 2)
    assert value["cosine_parameters", "all"] == pytest.approx(0.5)
    assert value["noise", "all"] == pytest.approx((16 + 14) / 6)
    assert value["effective_tokens", "all"] == pytest.approx((64 / 80 + 64 / 64) / 2)
    assert value["norm_share", "think"] == pytest.approx(2 / 16) and value["norm_share", "action"] == pytest.approx(
        14 / 16
    )
    assert value["norm_share", "format"] == 0 and value["expected_share", "think"] == pytest.approx(3 / 8)
    assert not table["n_undefined"].any() and (table["note"] == "").all() and table["value"].notna().all()


def test_what_has_no_cosine_says_why() -> None:
    zero = {"expected_sq": 0.0, "expected_norm": 0.0, "dot": 0.0, "undefined": "expected gradient is zero"}
    rows = [audited("unit_weight", k, parameter_cosine=None, **zero) for k in range(3)]
    rows += [audited("hidden_alignment", k, space="states", dot=None) for k in range(3)]
    rows += [audited("mixed", 0), audited("mixed", 1, parameter_cosine=None, undefined="reverse-KL gradient is zero")]
    table = audit_table(pd.DataFrame(rows))
    for quantity in ("cosine_logits", "cosine_parameters", "noise"):
        row = cell(table, channel="unit_weight", quantity=quantity)
        assert math.isnan(row.value) and row.note == "expected gradient is zero" and row.n_undefined == 3
    assert cell(table, channel="unit_weight", quantity="effective_tokens").value == pytest.approx(0.8)  # it does push
    assert cell(table, channel="hidden_alignment", quantity="cosine_logits").note == OTHER_SPACE
    assert cell(table, channel="hidden_alignment", quantity="cosine_parameters").value == 0.25
    mixed = cell(table, channel="mixed", quantity="cosine_parameters")
    assert (mixed.value, mixed.n_undefined, mixed.note) == (0.25, 1, "reverse-KL gradient is zero")


# --- from artifacts --------------------------------------------------------------------------------------------------


def test_tables_are_made_of_what_is_there(tmp_path: Any) -> None:
    def without_reader(rows: list[dict]) -> list[dict]:
        return [{key: value for key, value in row.items() if key != "reader"} for row in rows]

    lens = [{**PLACE, "trajectory": "a", "segment": 0, "branch": "student", "layer": "0", "token": 0, "rank": 2,
             "logprob": -1.0}]  # fmt: skip
    some = {"patching": without_reader(patch("a", 0, -4.0, -1.0, [-1.0])), "logit_lens": without_reader(lens)}
    save_artifact(tmp_path / "a", "measurements", tables=some)
    save_artifact(tmp_path / "b", "measurements", tables={"audit": without_reader([audited("sdar", 0)])})
    save_artifact(tmp_path / "c", "measurements", tables={"measurements": [{"x": 1}]})
    tables, inputs = measured_tables({name: tmp_path / name for name in ("a", "b", "c", "absent")})
    assert {name: set(table["reader"]) for name, table in tables.items()} == {
        "patching": {"a"},
        "logit_lens": {"a"},
        "audit": {"b"},
    }
    assert [artifact.path.name for artifact in inputs] == ["a", "b", "c"]
