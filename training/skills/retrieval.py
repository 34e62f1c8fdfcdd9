"""Retrieval: which skills of a library a task gets. The same call with the same state gives the same skills.

    keyword   general rules and those of the task's own section
    ucb       general rules and those of the section with the highest  mean reward + c sqrt(ln N / n)
    full      the whole library, mistakes included
    random    general rules and those of any section
    none      nothing

Source: SDAR, retrieval ablation, over SkillRL's library. The task's own section follows from its task type where the
environment tells one, else from the keywords of its sentence. Ours where the paper is silent: ucb chooses among the
sections and starts with the task's own, then in the library's order; N and n count observed rewards; random draws from
all sections.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from training.envs.rooms import keyed_generator
from training.skills.schema import Library

Strategy = Literal["keyword", "ucb", "full", "random", "none"]
OUTCOMES = ("own", "other", "general")  # what came with the general rules: the task's own section, another one, none
UNKNOWN = ""  # task type of a task that has none


@dataclass(frozen=True)
class Retrieved:
    """`text` is "" without skills. `hit`: the rules of the task's own section are part of it."""

    text: str
    skill_ids: tuple[str, ...]
    hit: bool
    section: str | None = None  # the one chosen; None: no section, or all


class Retriever:
    """Chooses skills for tasks; counts what they got, and learns from rewards where the strategy is "ucb"."""

    def __init__(self, library: Library, strategy: Strategy = "keyword", seed: int = 0, c: float = 1.0):
        self.library, self.strategy, self.seed, self.c = library, strategy, seed, c
        self._rewards: dict[str, dict[str, tuple[int, float]]] = {}  # task type -> section -> (n, sum of rewards)
        self._counts: dict[str, dict[str, int]] = {}  # task type -> outcome -> tasks

    def retrieve(self, task_type: str | None, description: str, key: tuple[Any, ...]) -> Retrieved:
        """The skills of one task.

        A task without a section of its own (no type and no keyword, or a type the library does not know) gets the
        general rules alone from "keyword", and is counted as such (case B35).
        Args: key, what the draw of "random" depends on beside the seed, e.g. (task id, attempt, step).
        """
        own = self._own(task_type, description)
        chosen: tuple[str, ...] = () if own is None else (own,)
        if self.strategy == "none":
            return self._counted(task_type, Retrieved("", (), False))
        if self.strategy == "full":
            chosen = tuple(self.library.sections)
        elif self.strategy == "random" and self.library.sections:
            names = list(self.library.sections)
            chosen = (names[int(keyed_generator("skill", self.seed, *key).integers(len(names)))],)
        elif self.strategy == "ucb" and self.library.sections:
            chosen = (self._best(task_type, own),)
        full = self.strategy == "full"
        text, ids = self.library.text(*chosen, mistakes=full), self.library.ids(*chosen, mistakes=full)
        section = chosen[0] if chosen and not full else None
        return self._counted(task_type, Retrieved(text, ids, own in chosen, section))

    def observe(self, retrieved: Retrieved, task_type: str | None, reward: float) -> None:
        """The reward of an episode that had these skills. Args: reward, in the unit that c is in (c = 1: 0 to 1)."""
        if self.strategy == "ucb" and retrieved.section is not None:
            arms = self._rewards.setdefault(task_type or UNKNOWN, {})
            n, total = arms.get(retrieved.section, (0, 0.0))
            arms[retrieved.section] = (n + 1, total + reward)

    def hit_table(self) -> list[dict[str, Any]]:
        """One row a task type ("" for tasks without one), sorted: task_type, tasks, own, other, general."""
        return [
            {"task_type": kind, "tasks": sum(counts.values()), **{name: counts.get(name, 0) for name in OUTCOMES}}
            for kind, counts in sorted(self._counts.items())
        ]

    def state(self) -> dict[str, Any]:
        """Counts and rewards so far, of JSON types."""
        rewards = {kind: {name: list(arm) for name, arm in arms.items()} for kind, arms in self._rewards.items()}
        return {"rewards": rewards, "counts": {kind: dict(counts) for kind, counts in self._counts.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`. Raises ValueError when it speaks of a section that this library does not have."""
        for arms in state["rewards"].values():
            for name in arms:
                if name not in self.library.sections:
                    raise ValueError(
                        f"the saved retrieval knows the section {name!r}, which this library does not have"
                    )
        self._rewards = {
            kind: {name: (int(n), float(total)) for name, (n, total) in arms.items()}
            for kind, arms in state["rewards"].items()
        }
        self._counts = {kind: dict(counts) for kind, counts in state["counts"].items()}

    def _own(self, task_type: str | None, description: str) -> str | None:
        return self.library.section(task_type) if task_type else self.library.section_of_sentence(description)

    def _best(self, task_type: str | None, own: str | None) -> str:
        arms = self._rewards.get(task_type or UNKNOWN, {})
        total = sum(n for n, _ in arms.values())

        def score(name: str) -> float:
            n, rewards = arms.get(name, (0, 0.0))
            return rewards / n + self.c * math.sqrt(math.log(total) / n) if n else math.inf

        return max(sorted(self.library.sections, key=lambda name: name != own), key=score)  # the first of equals

    def _counted(self, task_type: str | None, retrieved: Retrieved) -> Retrieved:
        outcome = "own" if retrieved.hit else "other" if retrieved.section else "general"
        counts = self._counts.setdefault(task_type or UNKNOWN, {})
        counts[outcome] = counts.get(outcome, 0) + 1
        return retrieved
