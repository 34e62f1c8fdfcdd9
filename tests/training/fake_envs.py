"""Small environments for the pool's tests: they run in worker processes, so they live in an importable module."""

from __future__ import annotations

import os
import sys
import time

import psutil

from training.envs.base import Step, Task


def task(name: str, split: str = "train") -> Task:
    return Task(id=name, env="fake", split=split, task_type="count", description=f"count in {name}")


class Counter:
    """Three steps an episode, won when every action was "win". The observation tells the whole history.

    The name of a task, or an action, says what goes wrong: hang, raise, exit.
    """

    created = 0

    def __init__(self) -> None:
        type(self).created += 1

    def reset(self, task: Task) -> Step:
        self.history = [task.id]
        self.misbehave(task.id)
        return self.answer()

    def step(self, action: str) -> Step:
        self.history.append(action)
        self.misbehave(action)
        return self.answer()

    def misbehave(self, what: str) -> None:
        if what.startswith("hang"):
            time.sleep(1000)
        if what.startswith("raise"):
            raise KeyError("the parser lost its way")
        if what.startswith("exit"):
            os._exit(3)

    def answer(self) -> Step:
        done = len(self.history) == 4
        won = done and self.history[1:] == ["win"] * 3
        return Step(" > ".join(self.history), ("win", "wait"), reward=10.0 * won, done=done, won=won)

    def close(self) -> None:
        pass


class Introspective(Counter):
    """Its observation describes the worker process."""

    def answer(self) -> Step:
        process = psutil.Process()
        facts = {
            "pid": os.getpid(),
            "created": type(self).created,
            "threads": process.num_threads(),
            "files": process.num_fds(),
            "memory": process.memory_info().rss,
            "torch": int("torch" in sys.modules),
            "omp": os.environ.get("OMP_NUM_THREADS", ""),
        }
        return Step(" ".join(f"{name}={value}" for name, value in facts.items()), (), done=len(self.history) == 4)


class Forgetful(Counter):
    """Not deterministic: a replay in another process gives another observation."""

    def answer(self) -> Step:
        return Step(f"pid {os.getpid()}", ())


class Unavailable:
    """Cannot be created."""

    def __init__(self) -> None:
        raise FileNotFoundError("no games in the data folder")


def facts(step: Step) -> dict[str, str]:
    """What Introspective observed."""
    return dict(pair.split("=") for pair in step.observation.split())
