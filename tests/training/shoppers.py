"""Players of WebShop for tests: an expert that reads, an oracle that knows, one that clicks at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from training.envs.base import Env, EnvError, Step, Task
from training.envs.pool import EnvPool
from training.envs.rooms import keyed_generator
from training.envs.webshop.pages import SEARCH
from training.envs.webshop.shop import read_goal
from training.models.shopper import Request, Shopper

Player = Callable[[Step], str]


def expert(task: Task) -> Player:
    shopper = Shopper(Request.parse(task.description))
    return lambda step: shopper.act(step.observation, step.admissible)[1]


def oracle(task: Task) -> Player:
    """Finds the goal's own product by its title, turning pages, and chooses the goal's own options."""
    shop, goal = read_goal(task)
    product = shop.product(goal.product)
    options = list(goal.options)

    def act(step: Step) -> str:
        if SEARCH in step.admissible:
            return f"search[{product.text}]"
        if f"click[{product.asin.lower()}]" in step.admissible:
            return f"click[{product.asin.lower()}]"
        if "click[buy now]" in step.admissible:
            return f"click[{options.pop()}]" if options else "click[buy now]"
        return "click[next >]"

    return act


def at_random(task: Task) -> Player:
    """Any command with equal chance; its queries are two words of the task."""
    rng: np.random.Generator = keyed_generator("random shopper", task.id)
    words = task.description.split()

    def act(step: Step) -> str:
        command = step.admissible[int(rng.integers(len(step.admissible)))]
        return f"search[{' '.join(rng.choice(words, 2))}]" if command == SEARCH else command

    return act


def play(env: Env, task: Task, player: Callable[[Task], Player]) -> list[Step]:
    """All answers of one episode."""
    act = player(task)
    steps = [env.reset(task)]
    while not steps[-1].done:
        steps.append(env.step(act(steps[-1])))
    return steps


def play_pool(pool: EnvPool, tasks: Sequence[Task], player: Callable[[Task], Player], batch: int) -> list[Step]:
    """The last answer of each task's episode, played in waves of `batch`."""
    last: list[Step] = []
    for start in range(0, len(tasks), batch):
        wave = dict(enumerate(tasks[start : start + batch]))
        players = {slot: player(task) for slot, task in wave.items()}
        answers = pool.reset(wave)
        ended: dict[int, Step] = {}
        while answers:
            live: dict[int, str] = {}
            for slot, answer in answers.items():
                assert not isinstance(answer, EnvError), answer
                if answer.done:
                    ended[slot] = answer
                else:
                    live[slot] = players[slot](answer)
            answers = pool.step(live) if live else {}
        last += [ended[slot] for slot in wave]
    return last
