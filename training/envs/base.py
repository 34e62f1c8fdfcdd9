"""What an environment is: reset a task, step a command, close. No torch here, worker processes import it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Task:
    """One task of one split; `source` tells the environment where the game lies (a file, or file + line)."""

    id: str  # unique over all splits of an environment
    env: str  # "household" | "alfworld" | ...
    split: str  # "train" | "valid_seen" | "valid_unseen"
    task_type: str
    description: str
    source: str = ""


@dataclass(frozen=True)
class Step:
    """What the environment answers. `won` is the only success; `done` is also true at the step limit."""

    observation: str
    admissible: tuple[str, ...]
    reward: float = 0.0
    done: bool = False
    won: bool = False
    score: float | None = None  # 0 to 1, of the episode if it ended here, where it is graded beside `won`
    outcome: str | None = None  # how the episode would be judged here, for a writer who looks back; never in a prompt


@dataclass(frozen=True)
class EnvError:
    """A call that crashed or ran past its limit. It ends the episode as an error, counted apart from losses."""

    task_id: str
    call: str  # "reset" | "step"
    reason: str


class OutsideError(Exception):
    """Something outside of an environment failed, a server it asks: an error of the episode, no fault of its task."""


@runtime_checkable
class Env(Protocol):
    """An environment instance. It may be reset to any number of tasks, one after another."""

    def reset(self, task: Task) -> Step: ...

    def step(self, action: str) -> Step: ...

    def close(self) -> None: ...
