"""A task without an environment: one prompt, one token, reward 10 for an id in the lower half of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diagnostics.records import Skill, Trajectory, Turn
from diagnostics.render import prompt_ids, task_messages
from tests.diagnostics.tiny import chat_tokenizer, segment, tiny_model
from training.config import Config, ModelConfig, ObjectiveConfig, OptimConfig
from training.train import train

VOCAB, GROUPS, SIZE = 300, 4, 8
TOKENIZER = chat_tokenizer()

CONFIG = replace(
    Config(),
    objective=ObjectiveConfig(),
    optim=OptimConfig(lr=3e-3, mini_batch_rows=64),
    model=ModelConfig(),
    steps=4,
    save_every=2,
)


def model(seed: int = 0) -> Any:
    return tiny_model(vocab=VOCAB, layers=2, seed=seed)


def play(model: Any, step: int, length: int = 1, seed: int = 0) -> list[Trajectory]:
    """GROUPS x SIZE episodes of `length` sampled tokens; the first token decides the reward."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    trajectories = []
    for group in range(GROUPS):
        messages = task_messages(f"press {'abcd'[group]}", "A box." * (group + 1), None)
        prompt = prompt_ids(TOKENIZER, messages)
        ids = torch.tensor([prompt] * SIZE)
        logprobs = []
        for _ in range(length):
            with torch.no_grad():
                scores = model(ids).logits[:, -1].log_softmax(-1)
            token = torch.multinomial(scores.exp(), 1, generator=generator)
            logprobs.append(scores.gather(1, token))
            ids = torch.cat([ids, token], 1)
        for attempt in range(SIZE):
            response = ids[attempt, len(prompt) :].tolist()
            played = segment(messages, prompt, response, np.full(length, 2))
            played.rollout_logprobs[len(prompt) :] = torch.cat(logprobs, 1)[attempt].numpy()
            won = response[0] < VOCAB // 2
            trajectories.append(
                Trajectory(
                    id=f"{step}.{group}.{attempt}",
                    task_id=f"task {group}",
                    task_type="press",
                    env="bandit",
                    split="train",
                    description=f"press {group}",
                    group=group,
                    attempt=attempt,
                    seed=seed,
                    step=step,
                    turns=(Turn("A box.", (), "x", "x", True),),
                    segments=(played,),
                    reward=10.0 * won,
                    success=won,
                    stop_reason="done",
                    first_observation_sha256="",
                )
            )
    return trajectories


def write_skills(trajectories: Sequence[Trajectory], step: int) -> Mapping[str, Skill]:
    return {t.id: Skill(f"take the {t.reward:.0f} box", "hindsight", t.task_id, t.id) for t in trajectories}


def run(config: Config, folder: Path, policy: Any = None, rollout: Callable | None = None, **given: Any) -> Any:
    """Train on the bandit; returns the model."""
    policy = model() if policy is None else policy
    rollout = rollout or (lambda step: play(policy, step))
    given.setdefault("write_skills_fn", write_skills)
    train(config, folder, model=policy, tokenizer=TOKENIZER, rollout_fn=rollout, **given)
    return policy


def weights(policy: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in policy.state_dict().items()}


def same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first) and first.keys() == second.keys()
