"""Episodes of an expert instead of a policy's own: good play for any model to read again, at no cost.

A pretrained model that cannot play can still read: these episodes, and the skill that each of them teaches, are what
its hidden states are measured on. Who the expert of an environment is: training/models/experts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from diagnostics.records import Skill, Trajectory
from diagnostics.render import segment_from_turns
from training.envs.base import Env, Task
from training.envs.rooms import keyed_generator
from training.models.experts import EXPERTS


def expert_episodes(
    env: Env,
    tasks: Sequence[Task],
    tokenizer: Any,
    *,
    seed: int,
    attempts: int,
    max_context: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Trajectory]:
    """Every task `attempts` times, played by the expert and written in the tokenizer's ids as one conversation.

    One turn in ten is led astray by a wrong command, so that attempts at one task differ and the expert has something
    to recover from. The ids were not sampled: their sampler log-probs are NaN.
    Source: ours.
    Args: env, of the tasks' kind; seed of the slips and of choices between equals; max_context, tokens after which an
    episode is cut.
    Returns: trajectories ordered by (task id, attempt).
    """
    played: list[Trajectory] = []
    for group, task in enumerate(sorted(tasks, key=lambda task: task.id)):
        for attempt in range(attempts):
            episode = EXPERTS[task.env].play(env, task, keyed_generator("expert", seed, task.id, attempt))
            episode = replace(
                episode,
                id=f"{task.id}#{attempt}/expert{seed}",
                group=group,
                attempt=attempt,
                seed=seed,
                first_observation_sha256=sha256(episode.turns[0].observation.encode()).hexdigest(),
            )
            played.append(replace(episode, segments=tuple(segment_from_turns(tokenizer, episode, max_context))))
            if progress:
                progress(len(played), len(tasks) * attempts)
    return played


def expert_skills(played: Sequence[Trajectory]) -> Mapping[str, Skill]:
    """Trajectory id -> what the episode teaches about its task, by rule; a crashed episode teaches nothing."""
    return {
        t.id: Skill(EXPERTS[t.env].skill(t), "hindsight", t.task_id, t.id, t.success)
        for t in played
        if t.stop_reason != "error"
    }
