"""Players of Search-QA by script: they see what a policy sees, the oracle also the passages that hold the answer."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from training.envs.base import EnvError, Step, Task
from training.envs.questions import read_question
from training.models.search_expert import expert_move

Player = Callable[[Task, Sequence[str]], str]  # (task, observations so far) -> action


def oracle(titles: Mapping[str, str]) -> Player:
    """Searches for the titles of the gold passages, then gives the right answer. Args: titles, by passage id."""

    def act(task: Task, seen: Sequence[str]) -> str:
        record = read_question(task)
        gold = [titles[id] for id in record["gold_ids"]]
        turn = len(seen) - 1
        return f"<search>{gold[turn]}</search>" if turn < len(gold) else f"<answer>{record['answers'][0]}</answer>"

    return act


def expert(task: Task, seen: Sequence[str]) -> str:
    return expert_move(task.description, seen[1:]).action


def chance(task: Task, seen: Sequence[str]) -> str:
    """Searches for words of the question, and answers with any name it has read."""
    rng = random.Random(f"{task.id} {len(seen)}")
    names = re.findall(r"[A-Z]\w+(?: [A-Z]\w+)?|\d{4}", " ".join(seen[1:]))
    if names and rng.random() < 0.5:
        return f"<answer>{rng.choice(names)}</answer>"
    return f"<search>{' '.join(rng.sample(task.description.split(), 3))}</search>"


def play(pool: Any, tasks: Sequence[Task], player: Player, batch: int) -> dict[str, list[Step | EnvError]]:
    """Every task once, `batch` at a time: what was observed, by task id."""
    traces: dict[str, list[Any]] = {}
    for first in range(0, len(tasks), batch):
        wave = dict(enumerate(tasks[first : first + batch]))
        for slot, answer in pool.reset(wave).items():
            traces[wave[slot].id] = [answer]
        live = set(wave)
        while live := {s for s in live if isinstance(t := traces[wave[s].id][-1], Step) and not t.done}:
            actions = {s: player(wave[s], [step.observation for step in traces[wave[s].id]]) for s in sorted(live)}
            for slot, answer in pool.step(actions).items():
                traces[wave[slot].id].append(answer)
    return traces


def share_won(traces: Mapping[str, Sequence[Any]]) -> float:
    return sum(trace[-1].won for trace in traces.values()) / len(traces)
