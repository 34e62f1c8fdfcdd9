"""Environments that end when their task says so, a pool that plays them in process, a sampler that reads a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from diagnostics.render import encode
from tests.diagnostics.tiny import chat_tokenizer, tiny_model
from training.envs.base import EnvError, Step, Task
from training.samplers.base import Key, Reply, Request

COMMANDS = ("go to shelf 1", "look")
GOOD = "<think>so</think><action>look</action>"


def task(name: str, ending: str) -> Task:
    """`ending`: "won 3" and "lost 3" end at the third step, "crash 3" fails there ("crash 0": at reset)."""
    return Task(name, "clockwork", "train", ending.split()[0], f"do {name}.", ending)


ENDINGS = ("won 1", "won 3", "lost 2", "won 5", "lost 4", "won 2", "won 4")
TASKS = [task(f"task {i}", ending) for i, ending in enumerate(ENDINGS)]


@dataclass
class ClockworkPool:
    """Answers at once; refuses to step an episode that has ended."""

    backwards: bool = False  # answer in the reverse order of the question
    playing: dict[int, Task] = field(default_factory=dict)
    age: dict[int, int] = field(default_factory=dict)
    sent: dict[str, list[str]] = field(default_factory=dict)

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step | EnvError]:
        self.playing = dict(tasks)
        self.age = dict.fromkeys(tasks, 0)
        return self._answers(tasks)

    def step(self, actions: Mapping[int, str]) -> dict[int, Step | EnvError]:
        for slot, action in actions.items():
            self.age[slot] += 1
            self.sent.setdefault(self.playing[slot].id, []).append(action)
        return self._answers(actions)

    def _answers(self, slots: Mapping[int, Any]) -> dict[int, Step | EnvError]:
        order = sorted(slots, reverse=self.backwards)
        return {slot: self._answer(self.playing[slot], self.age[slot]) for slot in order}

    def _answer(self, task: Task, age: int) -> Step | EnvError:
        kind, last = task.source.split()[0], int(task.source.split()[1])
        assert age <= last, f"{task.id} was stepped after its end"
        if kind == "crash" and age == last:
            return EnvError(task.id, "step" if age else "reset", "took longer than 1 s")
        won = kind == "won" and age == last
        return Step(f"{task.id}: it is {age} o'clock.", COMMANDS, 10.0 * won, age == last, won)


@dataclass
class ScriptedSampler:
    """Says what `script(key)` says: a text, or ids that need not be what the text would be encoded to."""

    script: Callable[[Key], str | list[int]]
    tokenizer: Any = field(default_factory=chat_tokenizer)
    protocol: str = "append"
    temperature: float = 1.0
    max_new_tokens: int = 64
    batch_size: int = 64
    asked: list[Request] = field(default_factory=list)

    def session(self, rows: int) -> ScriptedSampler:
        return self

    def reply(self, requests: Mapping[int, Request]) -> dict[int, Reply]:
        self.asked += requests.values()
        return {row: self._say(self.script(request.key)) for row, request in requests.items()}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[Key],
        max_new_tokens: int | None = None,
        temperature: float | None = None,
    ) -> list[Reply]:
        return list(self.reply({i: Request(key, prompts[i]) for i, key in enumerate(keys)}).values())

    def _say(self, said: str | list[int]) -> Reply:
        eos = self.tokenizer.eos_token_id
        ids = [*encode(self.tokenizer, said), eos] if isinstance(said, str) else said
        ended = ids[-1] == eos
        text = self.tokenizer.decode(ids[:-1] if ended else ids)
        return Reply(np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), text, ended, 0)


def babbler(kind: str = "qwen2", layers: int = 2) -> Any:
    """A random model that ends its replies after a few tokens, at different lengths."""
    model = tiny_model(kind, layers=layers)
    weight = model.get_output_embeddings().weight.data
    weight[chat_tokenizer().eos_token_id] *= 3
    return model
