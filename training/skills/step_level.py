"""Hindsight for single turns: from one finished trajectory the policy writes what to know at the turns that decided it.

A second teacher reads each such turn with the skill of that turn in its prompt: `build_step_pairs` writes its contexts,
`place_steps` puts what it read back among the tokens of the rows.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diagnostics import render
from diagnostics.paired import PairedSegment, build_pairs
from diagnostics.records import Message, Segment, Skill, Trajectory
from training.samplers.base import Sampler
from training.skills.hindsight import bounded_record

AT_MOST = 5  # skills of one trajectory
INSTRUCTION = {
    True: "This attempt succeeded. Choose the turns that decided it, at most {} of them, and state for each in one "
    "sentence what made its action right.",
    False: "This attempt failed. Choose the turns that decided it, at most {} of them, and state for each in one "
    "sentence what to do there instead.",
}
ANSWER = 'Answer with one line a turn, <skill turn="3">your text</skill>, and nothing else.'

_SKILL = re.compile(r"""<skill\s+turn\s*=\s*["']?(\d+)["']?\s*>(.*?)</skill>""", re.DOTALL)


@dataclass(frozen=True)
class StepCounts:
    """What became of the finished trajectories that were shown to the writer."""

    written: int  # with at least one skill
    unparsable: int  # without any
    skills: int  # over all trajectories
    dropped: int  # for a turn that was not played or has one already, without text, or beyond the fifth


def numbered_record(
    trajectory: Trajectory, max_turns: int = 50, max_observation: int = 160, max_chars: int = 6000
) -> str:
    """The trajectory with its turns by number, from 1: `3. action -> what was seen next`, after task and outcome.

    Every turn has a line, also one without a valid action: a skill may be about any. Source: ours.
    Args: max_turns, the last ones are kept; max_observation, characters of each answer; max_chars, of all, the earliest
    turns go first.
    """
    seen = [*(turn.observation for turn in trajectory.turns[1:]), ""]
    lines = []
    for number, (turn, answer) in enumerate(zip(trajectory.turns, seen, strict=True), start=1):
        action = turn.action if turn.valid else "no valid action"
        answer = " ".join(answer.split())[:max_observation]
        lines.append(f"{number}. {action} -> {answer}" if answer else f"{number}. {action}")
    return bounded_record(trajectory, lines[-max_turns:], max_chars)


def step_messages(trajectory: Trajectory) -> tuple[Message, ...]:
    """The writer's prompt, one user message: the record by turns, and what to write. Source: OPID (wording ours)."""
    asked = INSTRUCTION[trajectory.success].format(AT_MOST)
    return (Message("user", f"{numbered_record(trajectory)}\n\n{asked} {ANSWER}"),)


def parse_step_skills(reply: str, turns: int) -> tuple[dict[int, str], int]:
    """Texts by turn, from 0, and how many were dropped (see StepCounts). Args: turns, of the trajectory."""
    texts: dict[int, str] = {}
    found = _SKILL.findall(reply)
    for number, text in found:
        turn, text = int(number) - 1, " ".join(text.split())
        if text and 0 <= turn < turns and turn not in texts and len(texts) < AT_MOST:
            texts[turn] = text
    return texts, len(found) - len(texts)


def write_step_skills(
    sampler: Sampler, trajectories: Sequence[Trajectory], *, seed: int, step: int = 0, max_new_tokens: int = 256
) -> tuple[dict[str, dict[int, Skill]], StepCounts]:
    """The policy writes skills for single turns of each finished trajectory; crashed episodes have none.

    Source: OPID (at most five a trajectory). A reply that cannot be read leaves the trajectory out of step-level
    distillation only. Departures: the policy writes them itself, where OPID asks an external model.
    Args: the draws depend on (seed, task, attempt, step).
    Returns: trajectory id -> turn (from 0, as in Segment.turn) -> Skill, trajectories without any left out; counts.
    """
    finished = [t for t in trajectories if t.stop_reason != "error" and t.turns]
    replies = sampler.generate(
        [render.prompt_ids(sampler.tokenizer, step_messages(t)) for t in finished],
        [(seed, t.task_id, t.attempt, "step skills", step) for t in finished],
        max_new_tokens=max_new_tokens,
    )
    skills: dict[str, dict[int, Skill]] = {}
    dropped = 0
    for trajectory, reply in zip(finished, replies, strict=True):
        texts, lost = parse_step_skills(reply.text, len(trajectory.turns))
        dropped += lost
        if texts:
            source = ("hindsight", trajectory.task_id, trajectory.id, trajectory.success)
            skills[trajectory.id] = {turn: Skill(text, *source) for turn, text in sorted(texts.items())}
    total = sum(len(turns) for turns in skills.values())
    return skills, StepCounts(len(skills), len(finished) - len(skills), total, dropped)


@dataclass(frozen=True, eq=False)
class StepPair:
    """One turn as the step-level teacher reads it, and where its tokens stand in the row of their segment."""

    pair: PairedSegment  # its response tokens are those of the turn
    row: int  # index of the segment among those given
    tokens: Int[np.ndarray, "N"]  # indices among the segment's response tokens


def build_step_pairs(
    tokenizer: Any,
    trajectory_segments: Sequence[tuple[Trajectory, Segment]],
    step_skills: Mapping[str, Mapping[int, Skill]],
    max_teacher_tokens: int,
) -> tuple[list[StepPair], dict[str, int]]:
    """The teacher contexts of the turns that have a skill: the same conversation up to that turn's end, with it placed.

    Source: OPID (its step skill stands before the closing instruction; ours where every skill stands, in front of the
    task). A context over the limit is not cut: the turn is left out and counted.
    Args: step_skills, trajectory id -> turn -> skill; max_teacher_tokens, of prompt and response together.
    Returns: one StepPair a (segment, turn with a skill), in order; counts of paired and too_long turns.
    Raises: ValueError as build_pairs.
    """
    steps: list[StepPair] = []
    counts = {"paired": 0, "too_long": 0}
    for row, (trajectory, segment) in enumerate(trajectory_segments):
        here = set(segment.turn[segment.response_mask].tolist())
        for turn, skill in step_skills.get(trajectory.id, {}).items():
            if turn not in here:
                continue
            texts = {trajectory.id: skill.text}
            # no limit on the whole segment: what counts is the length up to the turn's end
            [whole], _ = build_pairs(tokenizer, [(trajectory, segment)], texts, "step_skill", sys.maxsize)
            step = _of_turn(whole, row, turn)
            assert step.pair.teacher_ids is not None
            outcome = "too_long" if len(step.pair.teacher_ids) > max_teacher_tokens else "paired"
            counts[outcome] += 1
            if outcome == "paired":
                steps.append(step)
    return steps, counts


def place_steps(
    steps: Sequence[StepPair], logprobs: Float[Tensor, "N"], lengths: Sequence[int]
) -> list[tuple[Float[Tensor, "M"], Bool[Tensor, "M"]]]:
    """What the step-level teacher read, back among the response tokens of each row.

    Args: logprobs [N] nats, of the pairs' tokens one after another (PairedPass.teacher_logprobs of their pass);
    lengths, response tokens of each row.
    Returns: for each row log-probs [M], 0 where no skill is, and the tokens [M] of turns that have one.
    """
    rows = [(logprobs.new_zeros(n), torch.zeros(n, dtype=torch.bool, device=logprobs.device)) for n in lengths]
    for step, values in zip(steps, logprobs.split([len(step.tokens) for step in steps]), strict=True):
        read, distilled = rows[step.row]
        tokens = torch.from_numpy(step.tokens).to(logprobs.device)
        read[tokens], distilled[tokens] = values, True
    return rows


def _of_turn(pair: PairedSegment, row: int, turn: int) -> StepPair:
    """The pair cut behind the last token of a turn, its response tokens those of the turn."""
    tokens = np.flatnonzero(pair.turn == turn)
    assert pair.teacher_ids is not None and pair.teacher_positions is not None
    students, teachers = pair.student_positions[tokens], pair.teacher_positions[tokens]
    cut = replace(
        pair,
        student_ids=pair.student_ids[: students[-1] + 1],
        teacher_ids=pair.teacher_ids[: teachers[-1] + 1],
        student_positions=students,
        teacher_positions=teachers,
        response_ids=pair.response_ids[tokens],
        turn=pair.turn[tokens],
        token_class=pair.token_class[tokens],
    )
    return StepPair(cut, row, tokens)
