"""Skill perturbation: weights and quality against plain forwards, and every unit that has no difference says why."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diagnostics import perturbation
from diagnostics.agreement import NO_ACTION, NO_TEACHER, NO_VERDICT, bins_of, lower_edges
from diagnostics.measure import Subject
from diagnostics.paired import build_pairs, run_pairs
from diagnostics.perturbation import MEASURE, excerpt, quality_of
from diagnostics.records import Provenance, TokenClass, Trajectory
from diagnostics.render import (
    place_skill,
    prompt_ids,
    segment_from_turns,
    token_classes,
    windowed_messages,
)
from diagnostics.run import diagnose
from tests.diagnostics.tiny import chat_tokenizer, one_turn_segment, segment, tiny_model, trajectory

REPLIES = ("<think>see</think><action>look</action>", "<think>so</think><action>go to desk 1</action>")
PROVENANCE = Provenance(seed=3)
CONTEXTS = ["own_skill", "shuffled", "none"]
WEIGHTS = {
    "sigmoid": lambda gap, turn, row: torch.sigmoid(5 * gap),
    "constant": lambda gap, turn, row: torch.ones_like(gap),
    # reads all turns of the episode, as sod does
    "episode": lambda gap, turn, row: (gap - gap[turn == turn.min()].mean()).abs(),
}


@functools.cache
def tokenizer() -> Any:
    return chat_tokenizer(tags=True)


def make(id: str, task: str, success: bool, replies: tuple[str, ...] = REPLIES, windowed: bool = False) -> Trajectory:
    turns = [(f"A desk {id}." + " A lamp." * k, reply) for k, reply in enumerate(replies)]
    play = dataclasses.replace(trajectory(turns, id=id), task_id=task, success=success)
    segments = segment_from_turns(tokenizer(), play, 10_000)
    if windowed:
        segments = []
        for k, turn in enumerate(play.turns):
            messages = windowed_messages(play.description, k, play.turns[k - 1 : k], turn.observation, None)
            response = [*tokenizer()(turn.response)["input_ids"], tokenizer().eos_token_id]
            made = segment(messages, prompt_ids(tokenizer(), messages), response, token_classes(tokenizer(), response))
            segments.append(dataclasses.replace(made, turn=np.where(made.response_mask, k, -1).astype(np.int16)))
    return dataclasses.replace(play, segments=tuple(segments))


def group(windowed: bool = False) -> list[Trajectory]:
    """Two attempts at a task that both succeed, two of which one does."""
    return [make(f"{task}{n}", task, task == "x" or n == 0, windowed=windowed) for task in "xy" for n in range(2)]


def skills(plays: list[Trajectory]) -> dict[str, str]:
    return {play.id: f"Look in drawer {play.id} first, then take it." for play in plays}


def run(out: Path, plays: list[Trajectory], texts: dict[str, str] | None = None, **options: Any) -> list[dict]:
    options = {"contexts": CONTEXTS, "measures": ["perturbation"], "weights": WEIGHTS, **options}
    given = skills(plays) if texts is None else texts
    done = diagnose(tiny_model(layers=2), tokenizer(), plays, given, provenance=PROVENANCE, out=out, **options)
    return done.table(options["measures"][0]).to_pylist()


def pick(rows: list[dict], **wanted: str) -> dict:
    (row,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return row


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("tokens", [1, 10_000])
def test_both_differences_are_those_of_plain_forwards(tmp_path: Path, windowed: bool, tokens: int) -> None:
    """Whatever the batches: a weight that reads the whole episode sees it, also where each turn is a row."""
    plays = group(windowed)
    rows = run(tmp_path / "m", plays, micro_batch_tokens=tokens)
    own = skills(plays)["x0"]
    for method, weight in WEIGHTS.items():
        row = pick(rows, trajectory="x0", context="none", method=method)
        assert (row["mate"], row["undefined"], row["task"]) == ("x1", "", "x")
        for branch, text in (("own", own), ("perturbed", "")):
            pairs, _ = build_pairs(tokenizer(), [(plays[0], s) for s in plays[0].segments], {"x0": text}, "c", 9999)
            passed = run_pairs(tiny_model(layers=2), pairs)
            gap = passed.teacher_logprobs - passed.student_logprobs
            turn = torch.from_numpy(np.concatenate([pair.turn for pair in pairs]))
            expected = weight(gap, turn, torch.zeros_like(turn)).numpy()
            action = np.concatenate([pair.token_class for pair in pairs]) == TokenClass.ACTION
            assert row[f"weight_{branch}"] == pytest.approx(expected.mean(), abs=1e-5)
            assert row[f"action_weight_{branch}"] == pytest.approx(expected[action].mean(), abs=1e-5)
            assert row[f"quality_{branch}"] == pytest.approx(plain_quality(plays[1], text), abs=1e-5)
        assert row["n_tokens"] == plays[0].n_tokens
        assert row["n_action_tokens"] == len("look") + len("go to desk 1")
    assert pick(rows, trajectory="x0", context="none", method="constant")["weight_own"] == 1.0
    assert pick(rows, trajectory="x0", context="none", method="sigmoid")["weight_perturbed"] == pytest.approx(0.5)


def plain_quality(mate: Trajectory, text: str) -> float:
    """Mean log-prob of the mate's action tokens, one forward a segment."""
    found = []
    for s in mate.segments:
        ids = [*prompt_ids(tokenizer(), place_skill(s.messages, text)), *s.ids[s.prompt_length :].tolist()]
        shift = len(ids) - len(s.ids)
        with torch.no_grad():
            logprobs = tiny_model(layers=2)(torch.tensor([ids])).logits[0].log_softmax(-1)
        found += [float(logprobs[t + shift - 1, s.ids[t]]) for t in np.flatnonzero(s.token_class == TokenClass.ACTION)]
    return float(np.mean(found))


def test_the_quality_is_read_off_another_episode_of_the_task_that_succeeded(tmp_path: Path) -> None:
    rows = run(tmp_path / "m", [*group(), make("z0", "z", True)])
    reasons = {row["trajectory"]: row["undefined"] for row in rows if row["context"] == "none"}
    assert reasons == {
        "x0": "", "x1": "", "y0": perturbation.NO_SUCCESS, "y1": "", "z0": perturbation.NO_MATE
    }  # fmt: skip
    assert pick(rows, trajectory="y1", context="none", method="sigmoid")["mate"] == "y0"
    lonely = pick(rows, trajectory="z0", context="none", method="sigmoid")
    assert lonely["quality_own"] is None and lonely["weight_own"] != lonely["weight_perturbed"]


def test_texts_that_are_missing_or_are_the_skill_itself_are_named(tmp_path: Path) -> None:
    plays = group()
    rows = run(tmp_path / "m", plays, {"x0": "Drawer", "y1": "Look in drawer 1 first, then take it."})
    shuffled, removed = (
        {r["trajectory"]: r["undefined"] for r in rows if r["context"] == name} for name in ("shuffled", "none")
    )
    assert shuffled["x0"] == perturbation.SAME_TEXT and removed["x0"] == ""  # one word has one order
    assert shuffled["x1"] == removed["x1"] == perturbation.NO_SKILL
    assert shuffled["y1"] == removed["y1"] == ""


def test_what_is_too_long_has_no_action_or_is_beyond_the_sample_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = ("I think.", "So I say.")
    plays = [make("s0", "s", False), make("s1", "s", True, silent), *group()]
    rows = run(tmp_path / "a", plays)
    assert pick(rows, trajectory="s0", context="none", method="sigmoid")["undefined"] == perturbation.NO_ACTION
    model = tiny_model(layers=2)
    model.config.max_position_embeddings = 300
    subject = Subject(model, tokenizer(), plays, {}, 0, 1.0, {}, segments={t.id: t.segments for t in plays})
    assert quality_of(subject, plays[2], "x " * 300).undefined == perturbation.TOO_LONG
    assert quality_of(subject, plays[2], "").value == pytest.approx(plain_quality(plays[2], ""), abs=1e-5)
    rows = run(tmp_path / "b", group(), {"y1": "Look. " * 50, **skills(group()[:2])}, max_teacher_tokens=300)
    assert pick(rows, trajectory="y1", context="none", method="sigmoid")["undefined"] == perturbation.NOT_PAIRED
    each = 3 * sum(len(segment.ids) for segment in group()[0].segments)  # all are as long, and each is read three times
    monkeypatch.setattr(perturbation, "BUDGET", 2 * each)
    reasons = [r["undefined"] for r in run(tmp_path / "c", group())]
    assert reasons.count(perturbation.NOT_READ) == 1 * 2 * len(WEIGHTS)  # of three that could be read


def test_a_weight_that_is_not_finite_is_named_for_that_method_alone(tmp_path: Path) -> None:
    weights = {**WEIGHTS, "log": lambda gap, turn, row: (0 * gap).log()}
    rows = run(tmp_path / "m", group(), weights=weights)
    assert pick(rows, trajectory="x0", context="none", method="log")["undefined"] == perturbation.NOT_FINITE
    assert pick(rows, trajectory="x0", context="none", method="sigmoid")["undefined"] == ""


def test_neither_the_order_of_the_episodes_nor_the_batches_matter(tmp_path: Path) -> None:
    plays = group()
    once = run(tmp_path / "a", plays)
    again = run(tmp_path / "b", plays[::-1], micro_batch_tokens=1)
    assert run(tmp_path / "c", plays) == once
    for row in once:
        other = pick(again, trajectory=row["trajectory"], context=row["context"], method=row["method"])
        assert other.keys() == row.keys()
        for name, value in row.items():
            assert other[name] == (pytest.approx(value, abs=1e-5) if isinstance(value, float) else value), name


def test_another_tokenizer_reads_the_mate_in_its_own_ids(tmp_path: Path) -> None:
    foreign = chat_tokenizer([("d", "e"), ("de", "s")])
    plays = []
    for play in group():
        segments = segment_from_turns(foreign, play, 10_000)
        plays.append(dataclasses.replace(play, segments=tuple(segments)))
    rows, expected = run(tmp_path / "a", plays, retokenise=True), run(tmp_path / "b", group())
    assert rows == expected


def test_an_excerpt_is_whole_turns_and_at_least_one() -> None:
    (growing,) = make("x", "x", True, REPLIES * 2).segments
    ends = [int(np.flatnonzero(growing.turn == turn)[-1]) + 1 for turn in range(4)]
    assert [len(s.ids) for s in excerpt([growing], ends[2])] == [ends[2]]
    assert [len(s.ids) for s in excerpt([growing], ends[2] - 1)] == [ends[1]]
    assert [len(s.ids) for s in excerpt([growing], 1)] == [ends[0]]
    assert [len(s.ids) for s in excerpt([growing], 99_999)] == [ends[3]]
    first = one_turn_segment(tokenizer())
    size = len(first.ids)
    assert [len(excerpt([first] * 3, tokens)) for tokens in (1, size, 2 * size - 1, 2 * size, 9 * size)] == [
        1,
        1,
        1,
        2,
        3,
    ]
    assert excerpt([], 9) == []


# Agreement with an expert


def agree(out: Path, plays: list[Trajectory], accepted: dict, **options: Any) -> list[dict]:
    return run(out, plays, measures=["agreement"], contexts=["own_skill"], accepted=accepted, **options)


def test_action_tokens_are_counted_by_weight_and_verdict(tmp_path: Path) -> None:
    plays = group()
    accepted = {"x0": (True, False), "x1": (None, True), "y0": (None, None)}
    rows = agree(tmp_path / "m", plays, accepted)
    assert {r["trajectory"]: r["undefined"] for r in rows} == {"x0": "", "x1": "", "y0": NO_ACTION, "y1": NO_VERDICT}
    look, go = len("look"), len("go to desk 1")
    for method in WEIGHTS:
        for id, counts in (("x0", (look, go)), ("x1", (go, 0))):
            mine = [r for r in rows if (r["trajectory"], r["method"]) == (id, method)]
            assert (sum(r["accepted"] for r in mine), sum(r["rejected"] for r in mine)) == counts
    (constant,) = [r for r in rows if (r["trajectory"], r["method"]) == ("x0", "constant")]
    assert constant["weight"] == pytest.approx(1.0, abs=1e-3)
    pairs, _ = build_pairs(tokenizer(), [(plays[0], s) for s in plays[0].segments], skills(plays), "own_skill", 9999)
    passed = run_pairs(tiny_model(layers=2), pairs)
    weights = torch.sigmoid(5 * (passed.teacher_logprobs - passed.student_logprobs)).numpy()
    mine = (pairs[0].token_class == TokenClass.ACTION) & (pairs[0].turn == 1)
    found = [r for r in rows if (r["trajectory"], r["method"]) == ("x0", "sigmoid")]
    held = np.repeat([r["weight"] for r in found], [r["rejected"] for r in found])
    assert held == pytest.approx(np.sort(weights[mine]), abs=1.1e-3) and (held <= np.sort(weights[mine]) + 1e-5).all()


def test_episodes_without_a_teacher_and_weights_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    plays = group()
    weights = {"log": lambda gap, turn, row: torch.where(turn == 0, torch.nan, gap)}
    rows = agree(tmp_path / "m", plays, {"x0": (True, True), "y0": (True, True)}, texts=None, weights=weights)
    assert {r["not_finite"] for r in rows if r["trajectory"] == "x0"} == {len("look")}
    rows = agree(tmp_path / "n", plays, {"x0": (True, True)}, texts={"y0": "Look."})
    assert pick(rows, trajectory="x0")["undefined"] == NO_TEACHER


def test_bins_keep_the_order_and_what_is_equal() -> None:
    weights = np.sort(np.random.default_rng(0).standard_cauchy(5000))
    bins = bins_of(weights)
    assert (np.diff(bins) >= 0).all() and bins.min() >= 0 and bins.max() < 8192
    assert (lower_edges(bins) <= weights + 1e-12).all() and (
        lower_edges(bins[bins < 8191] + 1) > weights[bins < 8191]
    ).all()
    assert len(set(bins_of(np.full(9, 1.0)).tolist())) == 1
    assert bins_of(np.array([1e30, -1e30])).tolist() == [8191, 0]


def test_nothing_is_read_where_no_method_has_weights() -> None:
    subject = Subject(None, None, group(), {}, 0, 1.0, {}, texts={"own_skill": {}, "none": {}})
    assert MEASURE.start is not None
    assert MEASURE.start(subject).result(PROVENANCE)["perturbation"].num_rows == 0
