"""A library that grows with the policy: what it writes after failures at training tasks, added to their task types."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from diagnostics.records import Skill, Trajectory
from training.skills.schema import Library, Rule, given_away

TITLE = "Learnt from a failed attempt"
PREFIX = "grown_"  # of the ids of grown skills

_NUMBER = re.compile(r" \d+\b")


@dataclass(frozen=True)
class Growth:
    """When a library grows, and how fast."""

    threshold: float  # success in the step under which the skills of a task type are added to
    per_step: int  # skills added a step, over all task types
    keep: int  # grown skills of a section: the oldest make room, so that the prompt stays bounded


def failures(trajectories: Sequence[Trajectory], growth: Growth) -> list[Trajectory]:
    """The attempts to learn from: of each task type under the threshold, the first failed attempt at each task.

    Source: SkillRL. Args: the trajectories of one step; crashed ones count neither way.
    Returns: one of each type in turn, the weakest type first, so that no type uses up the step.
    """
    by_type: dict[str, list[Trajectory]] = {}
    for trajectory in sorted(trajectories, key=lambda t: (t.task_id, t.attempt)):
        if trajectory.error is None and trajectory.turns:
            by_type.setdefault(trajectory.task_type, []).append(trajectory)
    success = {kind: sum(t.success for t in played) / len(played) for kind, played in by_type.items()}
    queues = []
    for kind in sorted(by_type, key=lambda kind: (success[kind], kind)):
        if success[kind] < growth.threshold:
            failed = {t.task_id: t for t in reversed(by_type[kind]) if not t.success}  # the first attempt stays
            queues.append([failed[task] for task in sorted(failed)])
    return [t for round_ in zip_longest(*queues) for t in round_ if t is not None]


def grow(
    library: Library, failed: Sequence[Trajectory], written: Mapping[str, Skill], growth: Growth, step: int
) -> Library:
    """The library with at most `per_step` new skills, each in the section of its task type.

    The number of a thing of a game goes ("mug 2" -> "mug"): a retrieved skill holds for every task. What still names
    a product or an answer, or says what the section says already, is passed over.
    Source: SkillRL, whose skills an external model writes; here the policy does.
    Args: failed, in the order of `failures`; written, trajectory id -> hindsight skill; step, part of the new ids.
    Returns: a new library, or the same one when nothing was added. A task type without a section gets one.
    """
    added = 0
    for trajectory in failed:
        if added == growth.per_step:
            break
        text = _general(written[trajectory.id].text) if trajectory.id in written else None
        if text is None:
            continue
        grown = _with(library, trajectory.task_type, Rule(f"{PREFIX}{step}_{added}", TITLE, text), growth.keep)
        if grown is not None:
            library, added = grown, added + 1
    return library


def _general(text: str) -> str | None:
    """The text without numbers of things; None where something else of a single task would be left."""
    while leak := given_away(text):
        plain = _NUMBER.sub("", leak)
        if plain == leak:
            return None
        text = text.replace(leak, plain)
    return text


def _with(library: Library, task_type: str, rule: Rule, keep: int) -> Library | None:
    name = library.section(task_type) or task_type
    rules = library.sections.get(name, ())
    said = {known.principle.lower() for known in (*library.general, *rules)}
    if rule.principle.lower() in said:
        return None
    grown = [known for known in (*rules, rule) if known.skill_id.startswith(PREFIX)]
    kept = [known for known in rules if not known.skill_id.startswith(PREFIX)]
    return replace(library, sections={**library.sections, name: (*kept, *grown[-keep:])})
