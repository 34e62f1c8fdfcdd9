"""The experts by kind of environment: how each plays a task, led astray now and then, and what its play teaches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from diagnostics.records import Trajectory, Turn
from diagnostics.render import admits, parse_reply
from training.envs.base import OutsideError, Step, Task
from training.envs.fact_world import HOPS
from training.envs.questions import read_question
from training.envs.search_qa import SearchQAEnv
from training.envs.webshop.env import WebShopEnv
from training.models import corpus, search_corpus, search_reader, shopper
from training.models.corpus import SLIP
from training.models.expert import Goal
from training.models.search_corpus import spaced
from training.models.search_expert import expert_move, misstep
from training.models.search_reader import Reader
from training.models.shopper import Request, Shopper

Answer = Callable[[Step, bool], str]  # (what is seen, whether to err) -> reply


@dataclass(frozen=True)
class Expert:
    """How tasks of a kind are played by rule. `play` is given an environment, a task and the draws of the slips."""

    play: Callable[[Any, Task, np.random.Generator], Trajectory]
    skill: Callable[[Trajectory], str]


def played(env: Any, task: Task, answer: Answer, rng: np.random.Generator, slip: float) -> Trajectory:
    """One episode of a player. Args: slip, chance a turn that the player is made to err.

    An episode whose environment could not be asked (OutsideError) is an error, as in a rollout.
    """
    turns: list[Turn] = []
    error: str | None = None
    step = env.reset(task)
    while not step.done:
        reply = answer(step, rng.random() < slip)
        action = parse_reply(reply)[1] or ""
        valid = bool(action) and admits(step.admissible, action)
        turns.append(Turn(step.observation, step.admissible, reply, action, valid))
        try:
            step = env.step(action or reply)
        except OutsideError as failure:
            error, step = f"step: {failure}", replace(step, score=None, outcome=None)
            break
    stop = "error" if error else "won" if step.won else "turn_limit" if len(turns) >= env.max_turns else "done"
    return Trajectory(
        id=task.id, task_id=task.id, task_type=task.task_type, env=task.env, split=task.split,
        description=task.description, group=0, attempt=0, seed=0, step=0, turns=tuple(turns), segments=(),
        reward=step.reward, success=step.won, stop_reason=stop, first_observation_sha256="", error=error,
        score=step.score, outcome=step.outcome,
    )  # fmt: skip


def shop(env: WebShopEnv, task: Task, rng: np.random.Generator, slip: float = SLIP) -> Trajectory:
    """A visit of the shopper."""
    customer, last = Shopper(Request.parse(task.description), env.max_turns), ""

    def answer(step: Step, err: bool) -> str:
        nonlocal last
        if err:
            thought, last = customer.misstep(step.observation, step.admissible, last, rng)
        else:
            thought, last = customer.act(step.observation, step.admissible)
        return f"<think> {thought}</think><action>{last}</action>"

    return played(env, task, answer, rng, slip)


def search(env: SearchQAEnv, task: Task, rng: np.random.Generator, slip: float = SLIP) -> Trajectory:
    """A question of the invented world by the expert that reads it, any other by the reader that knows the answers."""
    question, seen = task.description, list[str]()
    reader = None if _invented(task.task_type) else Reader(question, read_question(task)["answers"])

    def answer(step: Step, err: bool) -> str:
        seen.append(step.observation)
        if err:
            return spaced(misstep(question, seen, rng))
        return spaced(reader.act(seen) if reader else expert_move(question, seen))

    return played(env, task, answer, rng, slip)


def search_skill(trajectory: Trajectory) -> str:
    """What a finished question teaches."""
    if _invented(trajectory.task_type):
        return search_corpus.skill_text(trajectory.description, trajectory.turns)
    return search_reader.skill_text(trajectory.turns, trajectory.success)


def household(env: Any, task: Task, rng: np.random.Generator) -> Trajectory:
    """A game of the searching expert."""
    return corpus.play(env, task, rng)[0]


def household_skill(trajectory: Trajectory) -> str:
    """What a finished game teaches."""
    return corpus.skill_text(Goal.parse(trajectory.description), trajectory.turns, trajectory.success)


def _invented(dataset: str) -> bool:
    return dataset in HOPS


EXPERTS: dict[str, Expert] = {
    "household": Expert(household, household_skill),
    "alfworld": Expert(household, household_skill),
    "searchqa": Expert(search, search_skill),
    "webshop": Expert(shop, shopper.skill_text),
}
