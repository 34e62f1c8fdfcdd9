"""Insights: what separates a success from a failure at the same training task, in the policy's own words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from diagnostics import render
from diagnostics.records import Message, Skill, Trajectory
from training.samplers.base import Sampler
from training.skills.hindsight import ANSWER, CUE, WriterCounts, parse_skill, serialise

INSTRUCTION = (
    "These are a failed and a successful attempt at the same task. State in one or two sentences a general rule that "
    "the successful one followed and the failed one broke. Name no particular object or place."
)
SHOWN = 3  # insights in one prompt
RECORD = 3000  # characters of each of the two records

_WORD = re.compile(r"[a-z]+")


@dataclass(frozen=True)
class Insight:
    """A skill and the training task it was learnt at."""

    skill: Skill
    task_type: str
    description: str


def contrasts(trajectories: Sequence[Trajectory]) -> list[tuple[Trajectory, Trajectory]]:
    """(failure, success) of every task that was both failed and won: the first of each, ordered by task id.

    Source: ExpeL, its success / failure pairs. Crashed episodes are neither.
    """
    ends: dict[tuple[str, bool], Trajectory] = {}
    for trajectory in sorted(trajectories, key=lambda t: (t.task_id, t.attempt)):
        if trajectory.stop_reason != "error" and trajectory.turns:
            ends.setdefault((trajectory.task_id, trajectory.success), trajectory)
    return [(ends[task, False], ends[task, True]) for task, won in ends if won and (task, False) in ends]


def insight_messages(failure: Trajectory, success: Trajectory, terse: bool = True) -> tuple[Message, ...]:
    """The writer's prompt, one user message: both records, and what to write (`terse` as in hindsight_messages)."""
    records = "\n\n".join(serialise(t, max_chars=RECORD) for t in (failure, success))
    return (Message("user", f"{records}\n{CUE}" if terse else f"{records}\n\n{INSTRUCTION} {ANSWER}"),)


def write_insights(
    sampler: Sampler, trajectories: Sequence[Trajectory], *, seed: int, step: int = 0, terse: bool = True
) -> tuple[list[Insight], WriterCounts]:
    """The policy writes one insight for each contrast among these trajectories; what cannot be parsed is counted.

    Source: ExpeL (wording ours). Args: the draws depend on (seed, task, step).
    Returns: insights ordered by task id, and counts.
    """
    pairs = contrasts(trajectories)
    replies = sampler.generate(
        [render.prompt_ids(sampler.tokenizer, insight_messages(*pair, terse)) for pair in pairs],
        [(seed, failure.task_id, "insight", step) for failure, _ in pairs],
        max_new_tokens=96,
    )
    texts = [parse_skill(reply.text) for reply in replies]
    insights = [
        Insight(Skill(text, "hindsight", lost.task_id, lost.id, False), lost.task_type, lost.description)
        for (lost, _), text in zip(pairs, texts, strict=True)
        if text
    ]
    return insights, WriterCounts(len(insights), texts.count(""), texts.count(None))


def retrieve_insights(insights: Sequence[Insight], task_type: str, description: str, count: int = SHOWN) -> str:
    """The `count` insights of the same task type whose tasks read most alike, one a line; "" without any.

    Likeness of two descriptions: words in common / words in either; ties in the order given. Source: ExpeL retrieves
    by similarity too, of sentence embeddings.
    """
    same = [insight for insight in insights if insight.task_type == task_type]
    near = sorted(same, key=lambda insight: -_likeness(insight.description, description))
    return "\n".join(dict.fromkeys(insight.skill.text for insight in near[:count]))


def _likeness(a: str, b: str) -> float:
    one, other = (set(_WORD.findall(text.lower())) for text in (a, b))
    return len(one & other) / max(len(one | other), 1)
