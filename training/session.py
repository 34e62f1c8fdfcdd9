"""A configuration brought to life: model, tokenizer, games, environments and sampler, and what is played with them.

This is the bridge from Config to the functions that know nothing of it: train(), evaluate(), diagnose().
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from diagnostics.records import Skill, Trajectory
from diagnostics.render import encode
from training.config import Config
from training.envs.base import Env, Task
from training.envs.kinds import KINDS
from training.envs.panels import Panel, panel, train_order
from training.envs.pool import EnvPool
from training.evaluate import evaluate
from training.method import Needs, load_method
from training.models.load import model_source
from training.rollout import Pool, Start, group_starts, rollout
from training.samplers.base import Sampler
from training.samplers.hf import HFSampler
from training.samplers.server import VLLMServer, vllm_command
from training.samplers.vllm import VLLMSampler, check_logprobs
from training.skills.hindsight import write_skills
from training.skills.source import SkillSource
from training.skills.step_level import write_step_skills

PANEL_SEED = 0  # of the panel's choice of tasks: one panel for all runs, whatever their seeds
EARLIER_SEED = 100  # evaluation seed of the attempts that skills are written from; apart from every baseline
STEP_SEEDS = 10**6  # rollout seed of a step: run seed * this + step, so that no two steps share draws


def policy_digest(model: Any) -> str:
    """sha256 over the names and float32 values of all weights."""
    sha = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        sha.update(name.encode())
        sha.update(value.detach().float().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


@dataclass
class Session:
    """Everything one process needs to play with one policy; the environments start when they are first needed.

    Args: step, optimiser steps behind these weights, counted over all runs they came through; source, what load_policy
    took for them, which a vLLM server reads, too: None where the weights change.
    """

    config: Config
    model: Any
    tokenizer: Any
    step: int = 0
    source: str | None = None

    def __post_init__(self) -> None:
        self._exit = ExitStack()
        self._checked: set[float] = set()  # temperatures at which vLLM was held against the model

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._exit.close()

    @cached_property
    def folder(self) -> Path:
        """Where the games lie."""
        return KINDS[self.config.env.kind].folder(self.config.env)

    @property
    def make_env(self) -> Callable[[], Env]:
        """Makes one environment; what it needs to have on disk is made first."""
        return KINDS[self.config.env.kind].make_env(self.config.env, self.tokenizer)

    @cached_property
    def pool(self) -> Pool:
        env = self.config.env
        return self._exit.enter_context(EnvPool(self.make_env, env.workers, env.timeout))

    def tasks(self, split: str) -> list[Task]:
        """All tasks of a split. Raises ValueError when they are another environment's."""
        kind = self.config.env.kind
        tasks = KINDS[kind].tasks(self.folder, split)
        if tasks[0].env != kind:
            raise ValueError(f"{self.folder} holds {tasks[0].env} games, not {kind}; say --env.kind {tasks[0].env}")
        return tasks

    @cached_property
    def train_tasks(self) -> list[Task]:
        return self.tasks(self.config.env.split)

    @cached_property
    def panel_tasks(self) -> list[Task]:
        """The fixed evaluation panel."""
        tasks = self.tasks(self.config.eval.panel)
        return panel(tasks, self.config.eval.size, PANEL_SEED).select(tasks)

    @property
    def panel(self) -> Panel:
        return Panel(tuple(task.id for task in self.panel_tasks))

    def sampler(self, temperature: float) -> Sampler:
        s = self.config.sampler
        given = (self.tokenizer, s.protocol, temperature, s.max_new_tokens, s.batch_size)
        if s.engine == "hf":
            return HFSampler(self.model, *given)
        sampler = VLLMSampler(self._server, *given)
        if temperature not in self._checked:
            check_logprobs(sampler, self.model)
            self._checked.add(temperature)
        return sampler

    @cached_property
    def _server(self) -> VLLMServer:
        if self.source is None:
            raise ValueError(
                "sampler.engine vllm is for weights that stay as they are; training here plays with sampler.engine hf, "
                "and with vLLM under --engine cluster"
            )
        folder, _ = model_source(self.source)
        return self._exit.enter_context(VLLMServer(vllm_command(folder, self.config.model.dtype)))

    @cached_property
    def skill_source(self) -> SkillSource | None:
        """The library of a run whose method reads retrieved skills at any of its steps."""
        config = self.config
        if not any(self._needs(step).skill == "retrieved" for step in range(config.steps)):
            return None
        return SkillSource(config.skills, config.env.kind, config.seed)

    def _needs(self, step: int) -> Needs:
        method = load_method(self.config.method)
        own = method.config() if self.config.method_config is None else self.config.method_config
        return method.needs(own, step)

    def rollout(self, step: int) -> list[Trajectory]:
        """The trajectories of one training step of this run."""
        config = self.config
        tasks = train_order(self.train_tasks, config.seed, step, config.tasks_per_step)
        starts = group_starts(tasks, config.group_size)
        return self.episodes(
            starts,
            temperature=config.sampler.temperature,
            seed=config.seed * STEP_SEEDS + step,
            step=step,
            skills=self._player_skills(starts, step),
        )

    def episodes(
        self,
        starts: Sequence[Start],
        *,
        temperature: float,
        seed: int,
        step: int,
        skills: Mapping[tuple[str, int], str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Trajectory]:
        """Any episodes, in the order of the starts. Args: as in rollout()."""
        given = {"seed": seed, "step": step, "skills": skills, "progress": progress, **self._limits}
        return rollout(self.sampler(temperature), self.pool, starts, **given)[0]

    def _player_skills(self, starts: Sequence[Start], step: int) -> dict[tuple[str, int], str] | None:
        """The skills in the players' own prompts, where the method is one whose student reads them; one over the
        budget is left out."""
        source = self.skill_source
        if source is None or self._needs(step).seen_by != "student":
            return None
        texts = {}
        for start in starts:
            task = start.task
            skill = source.skill(task.id, task.task_type, task.description, start.attempt, step)
            if len(encode(self.tokenizer, skill.text)) <= self.config.skills.budget:
                texts[task.id, start.attempt] = skill.text
        return texts

    def write_skills(self, trajectories: Sequence[Trajectory], step: int) -> dict[str, Skill]:
        """One hindsight skill a trajectory, by the weights as they are now."""
        sampler = self.sampler(self.config.sampler.temperature)
        skills, _ = write_skills(sampler, trajectories, seed=self.config.seed, step=step, terse=self.terse)
        return skills

    def write_step_skills(self, trajectories: Sequence[Trajectory], step: int) -> dict[str, dict[int, Skill]]:
        """Skills for single turns, by the weights as they are now."""
        sampler = self.sampler(self.config.sampler.temperature)
        skills, _ = write_step_skills(sampler, trajectories, seed=self.config.seed, step=step)
        return skills

    @property
    def terse(self) -> bool:
        """Whether the short cue is enough to ask for a skill: a vocabulary with the tag as one token was taught it."""
        return "<skill>" in self.tokenizer.get_vocab()

    def evaluate(
        self,
        seed: int,
        skills: Mapping[str, str] | None = None,
        progress: Callable[[int, int], None] | None = None,
        finished: list[Trajectory] | None = None,
    ) -> list[Trajectory]:
        """Every task of the panel once; `skills` maps a task id to the text in the player's own prompt; `finished` as
        in rollout()."""
        return evaluate(
            self.sampler(self.config.eval.temperature),
            self.pool,
            self.panel_tasks,
            seed=seed,
            step=self.step,
            skills=None if skills is None else {(task, 0): text for task, text in skills.items()},
            progress=progress,
            finished=finished,
            **self._limits,
        )

    def play(
        self,
        starts: Sequence[Start],
        seed: int,
        skills: Mapping[tuple[str, int], str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Trajectory]:
        """Any episodes, played as in an evaluation; `skills` maps (task id, attempt) to the text in the prompt."""
        temperature = self.config.eval.temperature
        return self.episodes(
            starts, temperature=temperature, seed=seed, step=self.step, skills=skills, progress=progress
        )

    def policy(self) -> str:
        """sha256 over the weights as they are now."""
        return policy_digest(self.model)

    @property
    def _limits(self) -> dict[str, Any]:
        env = self.config.env
        return {
            "max_turns": env.max_turns,
            "max_context": self.config.sampler.max_context,
            "history": env.history,
            "show_admissible": env.show_admissible,
        }
