"""Episodes side by side on one pool: calls join batches, answers find their episode, slots are used again."""

import asyncio
import time
from collections.abc import Mapping

import pytest

from training.cluster.async_pool import AsyncPool
from training.envs.base import EnvError, Step, Task


class Echo:
    """Answers with what it was asked; slow enough for calls to wait for each other."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, list[int]]] = []

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step | EnvError]:
        time.sleep(0.01)
        self.batches.append(("reset", sorted(tasks)))
        return {slot: Step(task.id, ()) for slot, task in tasks.items()}

    def step(self, actions: Mapping[int, str]) -> dict[int, Step | EnvError]:
        time.sleep(0.01)
        self.batches.append(("step", sorted(actions)))
        if "break" in actions.values():
            raise RuntimeError("the pool is closed")
        return {slot: Step(f"{slot} {action}", ()) for slot, action in actions.items()}


def task(name: str) -> Task:
    return Task(id=name, env="echo", split="train", task_type="say", description=name)


async def episode(pool: AsyncPool, name: str, turns: int) -> list[str]:
    slot, first = await pool.reset(task(name))
    heard = [first.observation]
    for turn in range(turns):
        heard.append((await pool.step(slot, f"{name}{turn}")).observation.removeprefix(f"{slot} "))
    pool.leave(slot)
    return heard


def test_answers_find_their_episode_and_calls_share_batches() -> None:
    echo = Echo()

    async def play() -> list[list[str]]:
        pool = AsyncPool(lambda: echo)
        first = await asyncio.gather(*(episode(pool, name, turns) for name, turns in (("a", 3), ("b", 1), ("c", 2))))
        return [*first, await episode(pool, "d", 1)]

    assert asyncio.run(play()) == [["a", "a0", "a1", "a2"], ["b", "b0"], ["c", "c0", "c1"], ["d", "d0"]]
    assert max(len(slots) for _, slots in echo.batches) > 1
    assert max(slot for _, slots in echo.batches for slot in slots) == 2  # the fourth episode sits in a used slot


def test_a_pool_that_fails_is_told_to_everyone_who_asked() -> None:
    async def play() -> list[object]:
        pool = AsyncPool(Echo)
        slots = [(await pool.reset(task(name)))[0] for name in "ab"]
        calls = (pool.step(slot, action) for slot, action in zip(slots, ("break", "go"), strict=True))
        return list(await asyncio.gather(*calls, return_exceptions=True))

    answers = asyncio.run(play())
    assert all(isinstance(answer, RuntimeError) for answer in answers)


def test_the_pool_is_made_when_it_is_needed() -> None:
    def never() -> Echo:
        raise AssertionError

    AsyncPool(never)
    with pytest.raises(AssertionError):
        asyncio.run(AsyncPool(never).reset(task("a")))
