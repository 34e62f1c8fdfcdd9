from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from diagnostics.paired import run_pairs
from diagnostics.records import Skill, Trajectory, Turn
from diagnostics.render import place_skill, prompt_ids
from tests.diagnostics.tiny import tiny_model, trajectory
from tests.training.clockwork import GOOD, ClockworkPool, ScriptedSampler, task
from training.rollout import group_starts, rollout
from training.skills.step_level import (
    AT_MOST,
    StepCounts,
    build_step_pairs,
    numbered_record,
    parse_step_skills,
    place_steps,
    step_messages,
    write_step_skills,
)


def episode(success: bool = True, id: str = "t0", **changes: object) -> Trajectory:
    turns = (
        Turn("A shelf 1.", (), "", "go to shelf 1", True),
        Turn("You see a mug 2.", (), "", "fly", False),
        Turn("Nothing happens.", (), "", "take mug 2 from shelf 1", True),
    )
    return replace(trajectory([], id=id), turns=turns, success=success, **changes)


def skill(text: str) -> Skill:
    return Skill(text, "hindsight", "task", "t0", True)


def played(protocol: str, turns: int = 3) -> tuple[ScriptedSampler, Trajectory]:
    sampler = ScriptedSampler(lambda key: GOOD, protocol=protocol)
    starts = group_starts([task("a", f"won {turns}")], 1)
    [made], _ = rollout(sampler, ClockworkPool(), starts, seed=0, max_turns=9, max_context=4000)
    return sampler, made


def test_the_record_has_every_turn_by_its_number() -> None:
    assert numbered_record(episode()).splitlines() == [
        "Task: find a mug.",
        "Outcome: success",
        "1. go to shelf 1 -> You see a mug 2.",
        "2. no valid action -> Nothing happens.",
        "3. take mug 2 from shelf 1",
    ]
    assert numbered_record(episode(), max_turns=1).splitlines()[2:] == ["3. take mug 2 from shelf 1"]
    for limit in (10, 60, 90):
        assert len(numbered_record(episode(), max_chars=limit)) <= limit


def test_what_is_asked_depends_on_the_outcome() -> None:
    won, lost = (step_messages(episode(success))[0].content for success in (True, False))
    assert won.startswith(numbered_record(episode())) and "action right" in won and "instead" not in won
    assert "do there instead" in lost and all('<skill turn="3">' in text for text in (won, lost))


@pytest.mark.parametrize(
    ("reply", "texts", "dropped"),
    [
        ('<skill turn="1">look\n twice</skill> <skill turn="3">open it</skill>', {0: "look twice", 2: "open it"}, 0),
        ("<skill turn=2>a</skill><skill turn='2'>b</skill>", {1: "a"}, 1),
        ('<skill turn="0">a</skill><skill turn="4">b</skill><skill turn="1"> </skill>', {}, 3),
        ("<skill>a</skill>", {}, 0),
        ('<skill turn="1">cut before its en', {}, 0),
        ("", {}, 0),
    ],
)
def test_parse(reply: str, texts: dict[int, str], dropped: int) -> None:
    assert parse_step_skills(reply, 3) == (texts, dropped)


def test_at_most_five() -> None:
    texts, dropped = parse_step_skills("".join(f'<skill turn="{i}">x</skill>' for i in range(1, 9)), 8)
    assert list(texts) == list(range(AT_MOST)) and dropped == 3


def test_writing_counts_what_cannot_be_read() -> None:
    said = {0: '<skill turn="3">b</skill><skill turn="1">a</skill><skill turn="9">c</skill>', 1: "<skill>x</skill>"}
    shown = [episode(id=f"t{i}", attempt=i, success=i == 0) for i in range(2)]
    crashed = episode(id="t2", attempt=2, stop_reason="error")
    sampler = ScriptedSampler(lambda key: said[key[2]])
    skills, counts = write_step_skills(sampler, [*shown, crashed], seed=0, step=3)
    assert skills == {"t0": {0: skill("a"), 2: skill("b")}}
    assert counts == StepCounts(written=1, unparsable=1, skills=2, dropped=1)
    assert [request.key for request in sampler.asked] == [(0, "task", i, "step skills", 3) for i in range(2)]
    assert list(sampler.asked[0].ids) == prompt_ids(sampler.tokenizer, step_messages(shown[0]))
    assert write_step_skills(sampler, [], seed=0) == ({}, StepCounts(0, 0, 0, 0))


@pytest.mark.parametrize("protocol", ["append", "windowed"])
def test_a_pair_holds_the_tokens_of_its_turn_and_nothing_behind_them(protocol: str) -> None:
    sampler, made = played(protocol)
    segments = [(made, segment) for segment in made.segments]
    skills = {made.id: {1: skill("look twice"), 2: skill("wait for it, then look")}}
    steps, counts = build_step_pairs(sampler.tokenizer, segments, skills, 4000)
    assert counts == {"paired": 2, "too_long": 0} and [set(step.pair.turn) for step in steps] == [{1}, {2}]
    assert [step.row for step in steps] == ([0, 0] if protocol == "append" else [1, 2])
    for step in steps:
        segment, pair, text = made.segments[step.row], step.pair, skills[made.id][step.pair.turn[0]].text
        whole = segment.ids[segment.response_mask]
        assert (whole[step.tokens] == pair.response_ids).all()
        assert (segment.turn[segment.response_mask][step.tokens] == pair.turn).all()
        assert len(pair.response_ids) == (segment.turn == pair.turn[0]).sum()
        assert pair.student_positions[-1] == len(pair.student_ids) - 1
        assert (pair.student_ids == segment.ids[: len(pair.student_ids)]).all()
        prompt = prompt_ids(sampler.tokenizer, place_skill(segment.messages, text))
        behind = pair.student_ids[segment.prompt_length :]
        assert pair.teacher_ids.tolist() == [*prompt, *behind.tolist()]


def test_a_context_over_the_limit_is_counted_by_what_is_read_of_it() -> None:
    sampler, made = played("append")
    segments = [(made, made.segments[0])]
    skills = {made.id: {0: skill("a"), 2: skill("a")}}
    [first, last], _ = build_step_pairs(sampler.tokenizer, segments, skills, 4000)
    assert len(first.pair.teacher_ids) < len(last.pair.teacher_ids)
    kept, counts = build_step_pairs(sampler.tokenizer, segments, skills, len(first.pair.teacher_ids))
    assert counts == {"paired": 1, "too_long": 1} and set(kept[0].pair.turn) == {0}
    assert build_step_pairs(sampler.tokenizer, segments, {"other": skills[made.id]}, 4000)[0] == []
    assert build_step_pairs(sampler.tokenizer, segments, {made.id: {9: skill("a")}}, 4000)[0] == []


def test_each_turn_is_read_as_if_its_skill_stood_in_front_of_the_whole_episode() -> None:
    """Oracle: the causal model reads the whole segment under each skill, and only that turn's tokens are taken."""
    sampler, made = played("append", turns=4)
    model, texts = tiny_model(layers=2), {1: "look twice", 3: "wait"}
    segments = [(made, made.segments[0])]
    skills = {made.id: {turn: skill(text) for turn, text in texts.items()}}
    steps, _ = build_step_pairs(sampler.tokenizer, segments, skills, 4000)
    read = run_pairs(model, [step.pair for step in steps]).teacher_logprobs
    n = int(made.segments[0].response_mask.sum())
    [(values, distilled)] = place_steps(steps, read, [n])
    turns = made.segments[0].turn[made.segments[0].response_mask]
    assert distilled.tolist() == np.isin(turns, list(texts)).tolist() and (values[~distilled] == 0).all()
    for turn, text in texts.items():
        ids = [*prompt_ids(sampler.tokenizer, place_skill(made.segments[0].messages, text))]
        ids += made.segments[0].ids[made.segments[0].prompt_length :].tolist()
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        places = np.flatnonzero(made.segments[0].turn == turn) + len(ids) - len(made.segments[0].ids)
        expected = torch.stack([logprobs[p - 1, ids[p]] for p in places.tolist()])
        torch.testing.assert_close(values[torch.from_numpy(turns == turn)], expected, atol=1e-5, rtol=1e-5)


def test_rows_without_a_skill_stay_empty() -> None:
    rows = place_steps([], torch.zeros(0), [2, 3])
    assert [(len(values), bool(distilled.any())) for values, distilled in rows] == [(2, False), (3, False)]
