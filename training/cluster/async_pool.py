"""Environments for episodes that are played side by side, each at its own pace.

An EnvPool answers a batch of calls at a time. Calls that come in while it is busy make the next batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from training.envs.base import EnvError, Step, Task
from training.rollout import Pool


class AsyncPool:
    """One pool and its free slots. Used from one event loop. Args: pool, made when the first episode starts."""

    def __init__(self, make_pool: Callable[[], Pool]) -> None:
        self._make_pool = make_pool
        self._pool: Pool | None = None
        self._free: list[int] = []
        self._slots = 0
        self._waiting: dict[str, dict[int, tuple[Any, asyncio.Future[Step | EnvError]]]] = {"reset": {}, "step": {}}
        self._busy: asyncio.Task[None] | None = None

    async def reset(self, task: Task) -> tuple[int, Step | EnvError]:
        """A slot and its first answer; give the slot back with `leave`."""
        if not self._free:
            self._free.append(self._slots)
            self._slots += 1
        slot = self._free.pop()
        return slot, await self._call("reset", slot, task)

    async def step(self, slot: int, action: str) -> Step | EnvError:
        return await self._call("step", slot, action)

    def leave(self, slot: int) -> None:
        """The episode in this slot has ended."""
        self._free.append(slot)

    async def _call(self, name: str, slot: int, argument: Task | str) -> Step | EnvError:
        answer: asyncio.Future[Step | EnvError] = asyncio.get_running_loop().create_future()
        self._waiting[name][slot] = (argument, answer)
        if self._busy is None:
            self._busy = asyncio.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        try:
            while any(self._waiting.values()):
                for name, calls in list(self._waiting.items()):
                    self._waiting[name] = {}
                    if calls:
                        await self._batch(name, calls)
        finally:
            self._busy = None

    async def _batch(self, name: str, calls: dict[int, tuple[Any, asyncio.Future[Step | EnvError]]]) -> None:
        try:
            arguments = {slot: argument for slot, (argument, _) in calls.items()}
            answers = await asyncio.to_thread(self._ask, name, arguments)
        except Exception as error:
            for _, answer in calls.values():
                answer.set_exception(error)
            return
        for slot, (_, answer) in calls.items():
            answer.set_result(answers[slot])

    def _ask(self, name: str, arguments: dict[int, Any]) -> dict[int, Step | EnvError]:
        if self._pool is None:
            self._pool = self._make_pool()
        return getattr(self._pool, name)(arguments)
