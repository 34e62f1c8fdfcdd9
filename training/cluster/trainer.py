"""The run on the cluster: verl builds workers and servers, our loop (training/train.py) trains.

verl's trainer is subclassed for what it sets up: worker group, reference, rollout servers, agent loops, weight
transfer. Its fit() is replaced, because order and content of a step are ours: rows are segments with two contexts,
their advantages, denominators and mini-batches come from the whole step, metrics and checkpoints are those of the local
engine. Its data loader is left out: tasks follow from (seed, step), panels from the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
import transfer_queue as tq
from omegaconf import open_dict
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.utils import tensordict_utils as tu

from diagnostics.artifact import load_trajectories
from diagnostics.records import Skill, Trajectory
from training.cluster.agent_loop import Ask, Job, Lost, Played, settings
from training.cluster.learner import ClusterLearner
from training.cluster.worker import UndertowWorker
from training.config import Config
from training.episodes import panel_episodes
from training.evaluate import as_metrics, summarise
from training.rollout import Start, group_starts
from training.samplers.base import Key, Reply
from training.session import Session
from training.subject import first_step
from training.train import Sources, run_steps

POLL = 0.5  # seconds between two looks at the episodes that are still played


class Waiting(ReplayBuffer):
    """verl's wait for the episodes of a step, which also looks whether those who play them are alive."""

    players: Sequence[Any] = ()

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        ray.get([player.__ray_ready__.remote() for player in self.players], timeout=600)
        return super()._wait_for_next_poll(partition_id, last_debug_time)


@register_trainer("undertow")
class UndertowTrainer(PPOTrainerSync):
    def _build_replay_buffer(self) -> ReplayBuffer:
        sampler = self.config.trainer.v1.sampler
        return Waiting("sync", {}, sampler.max_off_policy_threshold, sampler.max_off_policy_strategy, {}, POLL)

    def _init_dataloader(self) -> None:
        with open_dict(self.config):
            self.config.actor_rollout_ref.actor.optim.total_training_steps = self.config.trainer.total_training_steps

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        self.role_worker_mapping.update(dict.fromkeys(self.role_worker_mapping, ray.remote(UndertowWorker)))

    def _load_checkpoint(self) -> None:
        """Nothing yet: the learner loads ours when it begins."""
        self.global_steps = 0

    def on_init_end(self) -> None:
        """Nothing yet: weights travel to the servers before they are asked."""

    def fit(self, agent_loop_manager: Any) -> None:
        self.agent_loop_manager = agent_loop_manager
        self.replay_buffer.players = agent_loop_manager.agent_loop_workers
        path, run = Path(self.config.undertow.config), Path(self.config.undertow.run)
        config = settings(str(path))
        learner = ClusterLearner(self.actor_rollout_wg, config, run)
        with ClusterSession(config, None, self.tokenizer, path=path, learner=learner, play_jobs=self.play) as session:
            source = session.skill_source
            if source is not None and "skills" in learner.state:
                source.restore(learner.state["skills"])
            before = first_step(config)
            parents = [] if config.init_from is None else [Path(config.init_from).parent.parent]

            def evaluate(step: int) -> dict[str, float]:
                session.step = before + step
                artifact = panel_episodes(session, run, config.eval.seed, elsewhere=parents if step == 0 else ())
                return as_metrics(summarise(load_trajectories(artifact.path)))

            def report(step: int, **values: float) -> None:
                shown = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
                print(f"step {step} of {config.steps}: {shown}", flush=True)

            sources = Sources(session.write_skills, session.write_step_skills, source)
            run_steps(learner, run, self.tokenizer, session.rollout, sources, evaluate, report)

    def play(self, jobs: Sequence[Job | Ask]) -> list[Any]:
        """What comes of every job (Played) and question (Reply), in their order, with the weights as they are now.

        Raises: RuntimeError, in one sentence, when one is lost by something that is no environment.
        """
        self.global_steps += 1
        self.checkpoint_manager.update_weights(self.global_steps)
        uids = [uuid4().hex for _ in jobs]
        fields = {"uid": uids, "index": list(range(len(jobs))), "job": list(jobs), "__rollout_n__": [1] * len(jobs)}
        batch = tu.get_tensordict(fields, {"global_steps": self.global_steps})
        tags = [{"is_prompt": True, "status": "pending", "global_steps": self.global_steps} for _ in jobs]
        tq.kv_batch_put(keys=uids, partition_id="train", tags=tags)
        self.agent_loop_manager.generate_sequences(batch)
        found, _ = self.replay_buffer.sample(self.global_steps, "train", len(jobs))
        self.checkpoint_manager.sleep_replicas()
        parcels = tq.kv_batch_get(keys=found.keys, partition_id="train", select_fields=["extra_fields"])["extra_fields"]
        tq.kv_clear(keys=found.keys, partition_id="train")
        contents = [getattr(fields, "data", fields)["parcel"].content for fields in parcels]
        answers = dict(zip((key.split("_")[0] for key in found.keys), contents, strict=True))
        given = [answers.get(uid, Lost("no answer of an agent loop")) for uid in uids]
        lost = [answer.reason for answer in given if isinstance(answer, Lost)]
        if lost:
            raise RuntimeError(f"{len(lost)} of {len(jobs)} episodes were lost, the first one by {lost[0]}")
        return given


@dataclass(frozen=True)
class Servers:
    """verl's servers, as far as whoever writes skills asks a Sampler. Args: play, as UndertowTrainer.play."""

    tokenizer: Any
    temperature: float
    play: Callable[[Sequence[Ask]], list[Reply]]

    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[Key], max_new_tokens: int) -> list[Reply]:
        asked = zip(prompts, keys, strict=True)
        questions = [Ask(list(prompt), key, max_new_tokens, self.temperature) for prompt, key in asked]
        return self.play(questions) if questions else []


class ClusterSession(Session):
    """A Session whose episodes are played by verl's agent loops.

    Args: path, the run's config.json; play_jobs, as UndertowTrainer.play.
    """

    def __init__(
        self,
        config: Config,
        model: Any,
        tokenizer: Any,
        *,
        path: Path,
        learner: ClusterLearner,
        play_jobs: Callable[[Sequence[Job | Ask]], list[Any]],
    ) -> None:
        super().__init__(config, model, tokenizer)
        self._path, self._learner, self._play_jobs = str(path), learner, play_jobs
        self._write = False  # a skill behind each episode
        self._written: dict[str, Skill] = {}  # of the step at hand, by trajectory

    def policy(self) -> str:
        return self._learner.digest()

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
        texts = skills or {}
        jobs = [
            Job(self._path, start, seed, step, temperature, texts.get((start.task.id, start.attempt)), self._write)
            for start in starts
        ]
        played: list[Played] = self._play_jobs(jobs)
        self._written = {p.trajectory.id: p.skill for p in played if p.skill is not None}
        return [p.trajectory for p in played]

    def rollout(self, step: int) -> list[Trajectory]:
        self._write = self._needs(step).skill == "hindsight"
        try:
            return super().rollout(step)
        finally:
            self._write = False

    def evaluate(
        self,
        seed: int,
        skills: Mapping[str, str] | None = None,
        progress: Callable[[int, int], None] | None = None,
        finished: list[Trajectory] | None = None,
    ) -> list[Trajectory]:
        """The panel, always all of it: when a worker dies no episode is finished that the trainer knows of."""
        starts = group_starts(sorted(self.panel_tasks, key=lambda task: task.id), 1)
        texts = None if skills is None else {(task, 0): text for task, text in skills.items()}
        return self.play(starts, seed, texts, progress)

    def write_skills(self, trajectories: Sequence[Trajectory], step: int) -> dict[str, Skill]:
        """The skills that the agent loops wrote when these episodes were over; of a method that learns from none, new
        ones by the weights as they are now."""
        if self._needs(step).skill != "hindsight":
            return super().write_skills(trajectories, step)
        return {t.id: self._written[t.id] for t in trajectories if t.id in self._written}

    def sampler(self, temperature: float) -> Any:
        return Servers(self.tokenizer, temperature, self._play_jobs)
