"""A worker process of the environment pool: it answers lists of calls and ends with its pipe or its parent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from training.envs.base import Env, OutsideError, Step, Task

CONTEXT = get_context("spawn")  # our own context: works whatever start method another library has set
# One thread a worker (several would fight for the cores); one hash seed, so that an engine that iterates over sets
# plays alike in every worker and in a replay.
WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


@dataclass(frozen=True)
class Failure:
    """Why a call raised; `outside`: the task is not to blame."""

    reason: str
    outside: bool = False


def start_worker(make_env: Callable[[], Env]) -> tuple[BaseProcess, Connection]:
    """A new worker and our end of its pipe.

    The worker first sends None (ready) or the reason why it could not create its environment. Then it takes lists of
    (slot, task to reset or action to step) and answers each call with a Step or a Failure.
    """
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_serve, args=(theirs, make_env), daemon=True)
    with _spawning():
        process.start()
    theirs.close()  # the worker's end lives in the worker only, so that each side sees the other one end
    return process, ours


@contextmanager
def _spawning() -> Iterator[None]:
    """Start a process with the workers' environment variables and with Ctrl-C blocked.

    The signal mask is inherited, so only the parent is interrupted, and it ends the workers. Blocking the signal here
    also keeps an interrupt from losing a process that has just started.
    """
    resource_tracker.ensure_running()  # the first start would do it and unblock the signal
    before = {name: os.environ.get(name) for name in WORKER_ENVIRONMENT}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ.update(WORKER_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _serve(connection: Connection, make_env: Callable[[], Env]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    active: dict[int, Env] = {}
    free: list[Env] = []
    try:
        try:
            free.append(make_env())
        except Exception as error:
            connection.send(_describe(error))
            return
        connection.send(None)
        while True:
            for slot, argument in connection.recv():
                connection.send(_answer(active, free, make_env, slot, argument))
    except (EOFError, OSError):
        pass  # the pool was closed
    finally:
        for env in [*active.values(), *free]:
            env.close()


def _answer(
    active: dict[int, Env], free: list[Env], make_env: Callable[[], Env], slot: int, argument: Task | str
) -> Step | Failure:
    """One call. Environments are costly to create: one whose episode is over waits in `free` for the next."""
    try:
        if isinstance(argument, Task):
            if slot not in active:
                active[slot] = free.pop() if free else make_env()
            return active[slot].reset(argument)
        step = active[slot].step(argument)
        if step.done:
            free.append(active.pop(slot))
        return step
    except Exception as error:
        active.pop(slot, None)  # its state is unknown: neither reused nor asked to close itself
        return Failure(_describe(error), isinstance(error, OutsideError))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _end_with_parent() -> None:
    """End this process when the parent is gone, even while the main thread hangs in a call."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
