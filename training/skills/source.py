"""The skills that a run reads from a library: chosen for its tasks, learnt from rewards, grown, saved and restored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from diagnostics.records import Skill, Trajectory
from training.config import SkillsConfig
from training.skills.growth import PREFIX, Growth, failures, grow
from training.skills.library import load_library, save_json
from training.skills.retrieval import Retrieved, Retriever
from training.skills.schema import Rule

REWARD = 10.0  # of a win: UCB's constant is for rewards between 0 and 1


def retriever(config: SkillsConfig, environment: str, seed: int) -> Retriever:
    """The retrieval that a configuration asks for, over its library or the environment's own."""
    return Retriever(load_library(config.library or environment), config.retrieval, seed, config.ucb_c)


class SkillSource:
    """A library and the retrieval of a run. What it learns is state: `state()` goes into a checkpoint."""

    def __init__(self, config: SkillsConfig, environment: str, seed: int) -> None:
        self.retriever = retriever(config, environment, seed)
        self._given: dict[tuple[str, int], Retrieved] = {}  # of the step at hand, by (task id, attempt)

    def skill(self, task_id: str, task_type: str, description: str, attempt: int, step: int) -> Skill:
        """The skill of one attempt, the same however often it is asked for within a step."""
        key = (task_id, attempt)
        if key not in self._given:
            self._given[key] = self.retriever.retrieve(task_type, description, (*key, step))
        return Skill(self._given[key].text, "retrieved", task_id)

    def for_trajectories(self, trajectories: Iterable[Trajectory], step: int) -> dict[str, Skill]:
        """Trajectory id -> skill; trajectories without one are left out."""
        found = {t.id: self.skill(t.task_id, t.task_type, t.description, t.attempt, step) for t in trajectories}
        return {id: skill for id, skill in found.items() if skill.text}

    def finish(
        self,
        played: Sequence[Trajectory],
        step: int,
        growth: Growth | None,
        write: Callable[[Sequence[Trajectory], int], Mapping[str, Skill]] | None,
    ) -> dict[str, float]:
        """End of a step: rewards go to the retrieval, and the library grows where a method asks for it.

        Returns: metrics, the share of tasks whose own section was part of the skill, by task type, and what grew.
        """
        hits: dict[str, list[bool]] = {}
        for trajectory in played:
            given = self._given.get((trajectory.task_id, trajectory.attempt))
            if given is not None:
                self.retriever.observe(given, trajectory.task_type, trajectory.reward / REWARD)
                hits.setdefault(trajectory.task_type, []).append(given.hit)
        self._given.clear()
        metrics = {f"skills/hit/{kind}": sum(found) / len(found) for kind, found in sorted(hits.items())}
        if growth is not None and write is not None:
            failed = failures(played, growth)
            before = self.retriever.library
            if failed:
                self.retriever.library = grow(before, failed, write(failed, step), growth, step)
            metrics["skills/grown"] = float(len(self._grown()))
        return metrics

    def state(self) -> dict[str, Any]:
        """Everything that is learnt, of JSON types."""
        return {"retrieval": self.retriever.state(), "grown": [(name, asdict(rule)) for name, rule in self._grown()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        library = self.retriever.library
        for name, rule in state["grown"]:
            rules = library.sections.get(name, ())
            library = replace(library, sections={**library.sections, name: (*rules, Rule(**rule))})
        self.retriever.library = library
        self.retriever.restore(state["retrieval"])

    def save_library(self, path: Path) -> None:
        """The library as it is now, in the form that `skills.library` reads."""
        save_json(self.retriever.library, path)

    def _grown(self) -> list[tuple[str, Rule]]:
        sections = self.retriever.library.sections.items()
        return [(name, rule) for name, rules in sections for rule in rules if rule.skill_id.startswith(PREFIX)]
