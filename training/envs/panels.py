"""Which tasks are played: fixed evaluation panels and the order of training, both a function of task ids and a seed.

The order in which games are found on disk, the number of workers and the batch size never enter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from training.envs.base import Task


@dataclass(frozen=True)
class Panel:
    """A fixed list of tasks; two results are comparable when their panels have the same sha256."""

    ids: tuple[str, ...]

    @property
    def sha256(self) -> str:
        return hashlib.sha256("\n".join(self.ids).encode()).hexdigest()

    def select(self, tasks: Iterable[Task]) -> list[Task]:
        """The panel's tasks in its order. Raises ValueError when one is missing."""
        by_id = {task.id: task for task in tasks}
        for name in self.ids:
            if name not in by_id:
                raise ValueError(f"task {name!r} of the panel is not among the {len(by_id)} tasks given")
        return [by_id[name] for name in self.ids]


def panel(tasks: Sequence[Task], size: int, seed: int) -> Panel:
    """The first `size` tasks of a seeded permutation, so that a smaller panel is the beginning of a larger one.

    Args:
        tasks: all tasks of a split, in any order.
        size: number of tasks; 0: the whole split.
        seed: another seed, another permutation.

    Raises:
        ValueError: a task id occurs twice, or the split has fewer than `size` tasks.
    """
    order = _shuffled(tasks, f"panel {seed}")
    if not 0 <= size <= len(order):
        split = tasks[0].split if tasks else "the split"
        raise ValueError(
            f"a panel of {size} tasks was asked for, but {split} has {len(order)}: choose 0 to {len(order)}"
        )
    return Panel(tuple(task.id for task in (order[:size] if size else order)))


def disjoint(train: Iterable[Task], held_out: Panel) -> None:
    """Raises ValueError, naming a task, when a training task is in the panel."""
    shared = sorted({task.id for task in train} & set(held_out.ids))
    if shared:
        raise ValueError(f"task {shared[0]!r} is in the training split and in the panel ({len(shared)} such tasks)")


def train_order(tasks: Sequence[Task], seed: int, step: int, count: int) -> list[Task]:
    """The `count` distinct tasks of one training step, of an endless sequence that can be entered at any step.

    Every epoch is a new permutation cut into steps; what is left over at its end (fewer than `count`) is left out.

    Args:
        tasks: all tasks of the training split, in any order.
        seed: the run's seed.
        step: training step, from 0.
        count: tasks a step.

    Raises:
        ValueError: a task id occurs twice, or the split has fewer than `count` tasks.
    """
    if not 0 < count <= len(tasks):
        raise ValueError(
            f"tasks_per_step is {count}, but the training split has {len(tasks)}: choose 1 to {len(tasks)}"
        )
    epoch, position = divmod(step, len(tasks) // count)
    return _shuffled(tasks, f"train {seed} {epoch}")[position * count : (position + 1) * count]


def _shuffled(tasks: Iterable[Task], key: str) -> list[Task]:
    """A permutation that depends on the ids and the key only: sorted by the hash of both."""
    by_id: dict[str, Task] = {}
    for task in tasks:
        if task.id in by_id:
            raise ValueError(f"task id {task.id!r} occurs twice: ids must be unique inside a split")
        by_id[task.id] = task
    return sorted(by_id.values(), key=lambda task: hashlib.sha256(f"{key} {task.id}".encode()).digest())
