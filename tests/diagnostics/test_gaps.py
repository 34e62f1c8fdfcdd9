"""The gap: planted values in their bins, exact zeros for equal contexts, sums that hold, memory that does not grow."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diagnostics.gaps import EDGES, Gaps, tenth_of_turn
from diagnostics.paired import PairedSegment
from diagnostics.passes import PairedPass
from diagnostics.records import Provenance, TokenClass, Trajectory
from diagnostics.render import place_skill, prompt_ids
from diagnostics.run import diagnose
from tests.diagnostics.test_run import PROVENANCE, SKILLS, make_trajectories, tokenizer
from tests.diagnostics.tiny import random_pair, tiny_model

THINK, ACTION, FORMAT = (int(kind) for kind in (TokenClass.THINK, TokenClass.ACTION, TokenClass.FORMAT))


def pair(turn: list[int], classes: list[int], trajectory: str = "t", context: str = "own_skill") -> PairedSegment:
    count = len(turn)
    made = random_pair(0, length=count + 8, responses=count)
    arrays = {"turn": np.array(turn, np.int16), "token_class": np.array(classes, np.int8)}
    return dataclasses.replace(made, trajectory_id=trajectory, context=context, **arrays)


def passed(gaps: list[list[float]]) -> PairedPass:
    flat = torch.tensor([value for row in gaps for value in row])
    row = torch.repeat_interleave(torch.arange(len(gaps)), torch.tensor([len(row) for row in gaps]))
    base = torch.linspace(-3, -1, len(flat))
    return PairedPass(row, torch.ones(len(flat), dtype=torch.bool), base, teacher_logprobs=base + flat)


def tables(stream: Gaps) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    made = stream.result(Provenance(run="r"))
    return tuple(made[name].to_pylist() for name in ("gaps", "gap_histogram", "measurements"))  # type: ignore[return-value]


def sums(rows: list[dict[str, Any]], by: str) -> dict[str, tuple[Any, ...]]:
    names = ("n_tokens", "n_turns", "gap_sum", "abs_gap_sum", "n_negative")
    return {row["at"]: tuple(row[name] for name in names) for row in rows if row["by"] == by}


def test_planted_gaps_are_found_at_their_turn_position_and_class() -> None:
    stream = Gaps()
    first = pair([0, 0, 0, 3, 3], [THINK, ACTION, FORMAT, THINK, ACTION])
    second = pair([61, 61], [ACTION, ACTION])  # a later segment of the same episode, behind the last bin
    other = pair([0], [THINK], trajectory="u")
    gaps = [[-0.5, 0.25, 0.0, 2.0, -3.0], [0.5, 0.75], [1.0]]
    stream.update([first, second, other], passed(gaps))
    rows, *_ = tables(stream)
    mine = [row for row in rows if row["trajectory"] == "t"]
    near = {"abs": 1e-6}
    assert sums(mine, "turn") == {
        "1": pytest.approx((3, 1, -0.25, 0.75, 1), **near),
        "4": pytest.approx((2, 1, -1.0, 5.0, 1), **near),
        "50": pytest.approx((2, 1, 1.25, 1.25, 0), **near),
    }
    assert sums(mine, "position") == {  # 0, 1/2, 1 of the first turn; 0, 1 of each other
        "0.05": pytest.approx((3, 0, 2.0, 3.0, 1), **near),
        "0.55": pytest.approx((1, 0, 0.25, 0.25, 0), **near),
        "0.95": pytest.approx((3, 0, -2.25, 3.75, 1), **near),
    }
    assert sums(mine, "token_class") == {
        "think": pytest.approx((2, 0, 1.5, 2.5, 1), **near),
        "action": pytest.approx((4, 0, -1.5, 4.5, 1), **near),
        "format": pytest.approx((1, 0, 0, 0, 0), **near),
    }
    assert sums(mine, "all") == {"": pytest.approx((7, 3, 0.0, 7.0, 2), **near)}
    assert sums([row for row in rows if row["trajectory"] == "u"], "all") == {"": pytest.approx((1, 1, 1, 1, 0))}
    assert {(row["task"], row["context"]) for row in rows} == {("task 0", "own_skill")}


def test_the_histogram_holds_every_token_once_and_zero_is_not_negative() -> None:
    stream = Gaps()
    values = [-math.inf, -1.5, -1.0, -0.96, -1e-9, 0.0, 0.04, 0.999, 1.0, 7.0]
    exact = {"student_logprobs": torch.zeros(10), "teacher_logprobs": torch.tensor(values, dtype=torch.float64)}
    stream.update([pair([0] * 10, [THINK] * 4 + [ACTION] * 6)], dataclasses.replace(passed([values]), **exact))
    rows, histogram, lost = tables(stream)
    found = {(row["token_class"], row["left"], row["right"]): row["count"] for row in histogram if row["count"]}
    assert found == {
        ("think", -math.inf, -1.0): 1,
        ("think", -1.0, -0.95): 2,
        ("action", -0.05, 0.0): 1,
        ("action", 0.0, 0.05): 2,
        ("action", 0.95, 1.0): 1,
        ("action", 1.0, math.inf): 2,
    }
    total, _, gap, _, negative = sums(rows, "all")[""]
    assert sum(row["count"] for row in histogram) == total == 9 and np.isfinite(gap)
    assert sum(row["count"] for row in histogram if row["right"] <= 0) == negative == 4
    assert len(histogram) == 3 * (len(EDGES) + 1)
    ((metric, value),) = [(row["metric"], row["value"]) for row in lost]
    assert (metric, value) == ("gap/tokens_not_finite", 1)


def test_tenths_of_a_turn() -> None:
    assert tenth_of_turn(np.array([0] * 11)).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    assert tenth_of_turn(np.array([2, 3, 3, 5, 5, 5])).tolist() == [0, 0, 9, 0, 5, 9]


def test_batches_make_no_difference() -> None:
    pairs = [pair([0, 0, 1], [THINK, ACTION, FORMAT], f"t{i % 2}", c) for i in range(4) for c in ("own_skill", "none")]
    gaps = np.random.default_rng(0).normal(size=(8, 3)).tolist()
    together, apart = Gaps(), Gaps()
    together.update(pairs, passed(gaps))
    for one, values in zip(pairs, gaps, strict=True):
        apart.update([one], passed([values]))
    (rows, *others), (other_rows, *same) = tables(together), tables(apart)
    assert others == same and len(rows) == len(other_rows)
    for row, other in zip(rows, other_rows, strict=True):
        assert row == {name: pytest.approx(v, abs=1e-5) if isinstance(v, float) else v for name, v in other.items()}


def test_what_is_kept_does_not_grow_with_the_number_of_tokens() -> None:
    def kept(repeats: int) -> int:
        stream = Gaps()
        for _ in range(repeats):
            stream.update([pair([0, 0, 1] * 7, [THINK] * 21)], passed([[0.1] * 21]))
        (counts,) = stream.counts.values()
        return counts.sums.nbytes + counts.turns.nbytes + counts.histogram.nbytes

    assert kept(1) == kept(40)


def test_diagnose_finds_no_gap_without_a_skill_and_that_of_two_plain_forwards_with_one(tmp_path: Path) -> None:
    model, contexts = tiny_model(layers=2), ["own_skill", "none"]
    options: dict[str, Any] = {"measures": ["gaps"], "provenance": PROVENANCE, "out": tmp_path / "m"}
    done = diagnose(model, tokenizer(), make_trajectories(), SKILLS, contexts, **options)
    rows = done.table("gaps").to_pylist()
    none = [row for row in rows if row["context"] == "none"]
    assert none and not any(row[name] for row in none for name in ("gap_sum", "abs_gap_sum", "n_negative"))
    plays = {play.id: play for play in make_trajectories()}
    whole = {row["trajectory"]: row for row in rows if row["context"] == "own_skill" and row["by"] == "all"}
    assert whole.keys() == plays.keys()
    for id, row in whole.items():
        assert (row["n_tokens"], row["n_turns"]) == (plays[id].n_tokens, len(plays[id].turns))
        assert row["gap_sum"] == pytest.approx(_plain_gap(model, plays[id]), abs=1e-3) and row["abs_gap_sum"] > 0.1
    for by in ("turn", "position", "token_class"):
        parts = [row for row in rows if row["context"] == "own_skill" and row["by"] == by]
        assert sum(row["gap_sum"] for row in parts) == pytest.approx(sum(row["gap_sum"] for row in whole.values()))
    histogram = done.table("gap_histogram").to_pylist()
    assert sum(row["count"] for row in histogram) == sum(play.n_tokens for play in plays.values()) * 2
    assert {row["left"] for row in histogram if row["context"] == "none" and row["count"]} == {0.0}


def _plain_gap(model: Any, play: Trajectory) -> float:
    (part,) = play.segments
    skilled = prompt_ids(tokenizer(), place_skill(part.messages, SKILLS[play.id]))
    reads = []
    for ids in (part.ids, np.concatenate([skilled, part.ids[part.prompt_length :]])):
        at = torch.from_numpy(np.flatnonzero(part.response_mask) + len(ids) - len(part.ids))
        tokens = torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            logits = model(tokens[None]).logits[0]
        reads.append(logits.log_softmax(-1)[at - 1, tokens[at]].double().sum().item())
    return reads[1] - reads[0]
