"""Hindsight: a finished trajectory is written down in few words, and the policy writes one skill from it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from diagnostics import render
from diagnostics.records import Message, Skill, Trajectory
from training.envs.sights import brief
from training.samplers.base import Sampler

CUE = "Write a skill."
INSTRUCTION = {
    True: "This attempt succeeded. State the reusable procedure in one or two sentences: the order of steps, and the "
    "observation that decided it.",
    False: "This attempt failed. State in one or two sentences the key mistake and what to do instead.",
}
ANSWER = "Answer with <skill>your text</skill> and nothing else."

_SKILL = re.compile(r"<skill>(.*?)</skill>", re.DOTALL)


@dataclass(frozen=True)
class WriterCounts:
    """What became of the finished trajectories that were shown to the writer."""

    written: int
    empty: int  # tags without text
    unparsable: int  # no complete pair of tags


def serialise(
    trajectory: Trajectory,
    max_turns: int = 50,
    max_observation: int = 480,
    max_chars: int = 6000,
    relevant: bool = False,
) -> str:
    """The trajectory as a short record: task, outcome, then `action -> what was seen next`, one line a turn.

    An answer that shows receptacles names each thing with its place. Left out: turns without a valid action (the
    environment ignored them), and a line that stands there already.
    Source: ours (DESIGN, skills).
    Args: max_turns, the last ones are kept; max_observation, characters kept of each answer; max_chars bounds the
        record, the earliest turns go first; relevant leaves out things that the task does not name, for a writer too
        small to search a long record.
    Returns: text of at most max_chars characters.
    """
    task = trajectory.description if relevant else None
    seen = [*(brief(turn.observation, task) for turn in trajectory.turns[1:]), ""]  # the last answer is not recorded
    lines = [
        " -> ".join(part for part in (turn.action, _cut(answer, max_observation)) if part)
        for turn, answer in zip(trajectory.turns, seen, strict=False)
        if turn.valid
    ]
    lines = list(dict.fromkeys(lines))
    return bounded_record(trajectory, lines[-max_turns:] if max_turns else [], max_chars)


def bounded_record(trajectory: Trajectory, lines: Sequence[str], max_chars: int) -> str:
    """Task, outcome with what it consists of, and as many of the last lines as fit: at most max_chars characters."""
    outcome = ("success" if trajectory.success else "failure") + (
        f" ({trajectory.outcome})" if trajectory.outcome else ""
    )
    head = f"Task: {trajectory.description}\nOutcome: {outcome}"[:max_chars]
    room = max_chars - len(head)
    kept: list[str] = []
    for line in reversed(lines):
        room -= len(line) + 1
        if room < 0:
            break
        kept.append(line)
    return "\n".join([head, *reversed(kept)])


def hindsight_messages(trajectory: Trajectory, terse: bool = True) -> tuple[Message, ...]:
    """The writer's prompt, one user message: the record, and what to write.

    Source: PR-OPD, hindsight skills (wording ours). Success asks for a reusable procedure and the deciding
    observation, failure for the key mistake and its correction.
    Args: terse, for a small policy that was taught the format: one short cue instead of the instruction, and a record
    of what the task names alone.
    """
    if terse:
        return (Message("user", f"{serialise(trajectory, relevant=True)}\n{CUE}"),)
    return (Message("user", f"{serialise(trajectory)}\n\n{INSTRUCTION[trajectory.success]} {ANSWER}"),)


def parse_skill(reply: str) -> str | None:
    """Text inside the first <skill>..</skill> with whitespace collapsed; "" when empty, None without both tags."""
    match = _SKILL.search(reply)
    return " ".join(match[1].split()) if match else None


def write_skills(
    sampler: Sampler,
    trajectories: Sequence[Trajectory],
    *,
    seed: int,
    step: int = 0,
    max_new_tokens: int = 96,
    terse: bool = True,
) -> tuple[dict[str, Skill], WriterCounts]:
    """The policy writes one skill for each finished trajectory; crashed episodes have none.

    Source: PR-OPD, hindsight skills; a trajectory whose skill is empty or cannot be parsed is left out of
    distillation only (as in SEED).
    Args: the draws depend on (seed, task, attempt, step).
    Returns: trajectory id -> Skill, and counts.
    """
    finished = [t for t in trajectories if t.stop_reason != "error" and t.turns]
    replies = sampler.generate(
        [render.prompt_ids(sampler.tokenizer, hindsight_messages(t, terse)) for t in finished],
        [(seed, t.task_id, t.attempt, "skill", step) for t in finished],
        max_new_tokens=max_new_tokens,
    )
    texts = [parse_skill(reply.text) for reply in replies]
    skills = {
        t.id: Skill(text, "hindsight", t.task_id, t.id, t.success)
        for t, text in zip(finished, texts, strict=True)
        if text
    }
    return skills, WriterCounts(len(skills), texts.count(""), texts.count(None))


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3].rsplit(" ", 1)[0] + "..."
