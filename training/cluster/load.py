"""How long a step takes: tokens that are played and read, floating-point operations, seconds. An order of magnitude.

A forward pass costs 2 operations a parameter and token, an update 8 (forward, recomputed forward, backward). EFFICIENCY
is the share of a GPU's peak that is reached: public logs of 3B runs on eight GPUs (ALFWorld, WebShop) come to 0.09-0.16
by the same count. Playing waits for the slowest episode: its turns, times the tokens of a reply, times SECONDS a token.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.cluster.gpus import find_gpu
from training.cluster.layout import ClusterConfig, Layout
from training.cluster.plan import Extra
from training.cluster.shapes import Shape
from training.config import Config

EFFICIENCY = 0.12  # of the dense bfloat16 peak
CPU_OFFLOAD = 0.35  # of that efficiency, when weights and optimiser live in host memory
SECONDS = 0.015  # least seconds of one token in a reply: launches, scheduling, the request's way
BANDWIDTH = 0.6  # of a GPU's memory bandwidth, in decoding
ENVIRONMENT = 0.6  # seconds between a reply and the next request of the same episode
HINDSIGHT = 96  # tokens of a written skill
RECORD = 1024  # tokens of the record it is written from


@dataclass(frozen=True)
class Habit:
    """How episodes of an environment look, in tokens and in the share of the turn limit that is played."""

    turns: float
    prompt: int
    reply: int


# prompts and replies of ALFWorld and WebShop: first 30 steps of public 3B GRPO logs; the others are guesses
HABITS = {
    "alfworld": Habit(0.85, 500, 137),
    "household": Habit(0.85, 500, 137),
    "webshop": Habit(0.7, 1312, 185),
    "searchqa": Habit(0.75, 1200, 180),
}


@dataclass(frozen=True)
class Work:
    """One part of a step."""

    name: str
    tokens: float
    seconds: float


def step_work(config: Config, extra: Extra, shape: Shape, cluster: ClusterConfig, layout: Layout) -> list[Work]:
    """The parts of one training step, in order; a method's own parts are those of its heaviest step.

    Source: ours. Returns: tokens of all GPUs together, seconds of the step. Raises: ValueError for an unknown GPU.
    """
    gpu, needs = find_gpu(cluster.gpu), extra.needs
    episodes = config.tasks_per_step * config.group_size
    habit = HABITS[config.env.kind]
    turns = max(1.0, habit.turns * config.env.max_turns)
    reply = min(habit.reply, config.sampler.max_new_tokens)
    if config.sampler.protocol == "windowed":
        rows = episodes * turns
        row = min(habit.prompt + reply, config.sampler.max_context)
    else:  # one growing conversation
        rows = float(episodes)
        row = int(min(habit.prompt + turns * (reply + 60), config.sampler.max_context))
    tokens, replies = rows * row, episodes * turns * reply
    flops = cluster.world * gpu.tflops * 1e12 * EFFICIENCY * (CPU_OFFLOAD if layout.offload == "cpu" else 1)

    def reading(count: float, operations: int = 2) -> float:
        return operations * shape.parameters * count / flops

    live = episodes * layout.tensor_parallel / cluster.world
    streamed = (2 * shape.parameters + live * row * shape.kv_bytes) / layout.tensor_parallel
    token = max(SECONDS, streamed / (gpu.bandwidth * 1e9 * BANDWIDTH))
    work = [Work("play", replies, config.env.max_turns * (reply * token + ENVIRONMENT) + reading(tokens))]
    if needs.skill == "hindsight":
        written = episodes * (RECORD + HINDSIGHT)
        work.append(Work("write skills", written, HINDSIGHT * token + reading(written)))
    updates = -(-rows // config.optim.mini_batch_rows)
    if updates > 1 or needs.teacher_logprobs:
        work.append(Work("read: own log-probs", tokens, reading(tokens)))
    if needs.regularised and config.objective.kl_coefficient:
        work.append(Work("read: reference", tokens, reading(tokens)))
    if needs.teacher != "none":
        skill = HINDSIGHT if needs.skill == "hindsight" else config.skills.budget // 2
        taught = rows * (row + skill)
        work.append(Work("read: teacher with the skill", taught, reading(taught)))
    work.append(Work(f"update ({updates:.0f} optimiser steps)", tokens, reading(tokens, 8)))
    return work
