"""Environments in worker processes: a time limit per call, quarantine of games that hang or crash, nothing leaked.

A slot is one live episode and belongs to worker `slot % workers`. A call that fails ends its episode as an EnvError
and puts its task into quarantine, unless something outside failed (OutsideError); the other episodes of a killed worker
are replayed in a fresh one, which gives the same state because the engines are deterministic. No answer depends on the
number of workers.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from training.envs.base import Env, EnvError, Step, Task
from training.envs.worker import Failure, start_worker

START_TIMEOUT = 300.0  # seconds for importing the engine and creating the first environment, on a loaded machine
CLOSE_TIMEOUT = 2.0  # seconds for all workers to end by themselves before they are killed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Call:
    slot: int
    argument: Task | str | None  # the task to reset, the action to step, None: the worker's start
    expected: Step | None = None  # set in a replay: what the environment answered the first time

    @property
    def name(self) -> str:
        return "start" if self.argument is None else "reset" if isinstance(self.argument, Task) else "step"


@dataclass
class _Episode:
    task: Task
    history: list[tuple[_Call, Step]] = field(default_factory=list)  # answered calls, the reset first


class _Worker:
    """One process with its pipe and the calls it has not answered yet, in order."""

    def __init__(self, make_env: Callable[[], Env]) -> None:
        self.process, self.connection = start_worker(make_env)
        self.pending = deque([_Call(-1, None)])
        self.since = time.monotonic()  # when the call at the head of `pending` began, at the latest

    def send(self, calls: list[_Call]) -> None:
        if not self.pending:
            self.since = time.monotonic()
        self.pending.extend(calls)
        self.connection.send([(call.slot, call.argument) for call in calls])

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class EnvPool:
    """Live episodes in worker processes, stepped side by side.

    Args:
        make_env: picklable callable that creates one environment; it runs in the workers.
        workers: number of processes; changes speed, never an answer.
        timeout: seconds one reset or step may take.

    Raises:
        ValueError: workers or timeout not positive.
        RuntimeError: a worker cannot create its environment.
    """

    def __init__(self, make_env: Callable[[], Env], workers: int, timeout: float) -> None:
        if workers < 1:
            raise ValueError(f"env.workers must be at least 1, got {workers}")
        if timeout <= 0:
            raise ValueError(f"env.timeout must be a positive number of seconds, got {timeout}")
        self._make_env = make_env
        self._timeout = timeout
        self._episodes: dict[int, _Episode] = {}  # running ones
        self._errors: dict[int, EnvError] = {}  # of ended ones, not reported yet
        self._failures: dict[str, EnvError] = {}  # task id -> its first error
        self._workers: list[_Worker] = []
        try:
            for _ in range(workers):
                self._workers.append(_Worker(make_env))
            self._run([])  # wait until every worker has its first environment
        except BaseException:
            self.close()
            raise

    @property
    def quarantine(self) -> set[str]:
        """Ids of the tasks that hung, crashed or could not be replayed; they are not started again."""
        return set(self._failures)

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step | EnvError]:
        """Start an episode in each slot. A task in quarantine is answered with its first EnvError, without a call."""
        for slot, task in tasks.items():
            self._errors.pop(slot, None)
            self._episodes[slot] = _Episode(task)
        return self._answers(tasks, self._run([_Call(slot, task) for slot, task in tasks.items()]))

    def step(self, actions: Mapping[int, str]) -> dict[int, Step | EnvError]:
        """Send one command to each slot. Raises ValueError for a slot without a running episode."""
        for slot in actions:
            if slot not in self._episodes and slot not in self._errors:
                raise ValueError(f"slot {slot} has no running episode: reset it before stepping it")
        return self._answers(actions, self._run([_Call(slot, action) for slot, action in actions.items()]))

    def close(self) -> None:
        """End all workers; may be called again. A worker inside a call is killed after CLOSE_TIMEOUT."""
        workers, self._workers = self._workers, []
        deadline = time.monotonic() + CLOSE_TIMEOUT
        try:
            for worker in workers:
                worker.connection.close()
            for worker in workers:
                worker.process.join(max(0.0, deadline - time.monotonic()))
        finally:  # also after a second Ctrl-C
            for worker in workers:
                worker.kill()

    def __enter__(self) -> EnvPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(self, slots: Iterable[int], steps: dict[int, Step]) -> dict[int, Step | EnvError]:
        return {slot: steps[slot] if slot in steps else self._errors.pop(slot) for slot in slots}

    def _run(self, calls: list[_Call]) -> dict[int, Step]:
        """Send the calls to all workers, then gather their steps; what failed is in `_errors` afterwards."""
        if not self._workers:
            raise RuntimeError("the environment pool is closed")
        for index in range(len(self._workers)):
            self._send(index, [call for call in calls if call.slot % len(self._workers) == index])
        steps: dict[int, Step] = {}
        while busy := [index for index, worker in enumerate(self._workers) if worker.pending]:
            patience = min(self._deadline(index) for index in busy) - time.monotonic()
            ready = wait([self._workers[index].connection for index in busy], max(0.0, patience))
            for index in busy:
                if self._workers[index].connection in ready:
                    self._receive(index, steps)
                elif time.monotonic() >= self._deadline(index):
                    self._fail_worker(index, f"no answer within {self._limit(index):g} seconds")
        return steps

    def _limit(self, index: int) -> float:
        return START_TIMEOUT if self._workers[index].pending[0].name == "start" else self._timeout

    def _deadline(self, index: int) -> float:
        return self._workers[index].since + self._limit(index)

    def _send(self, index: int, calls: list[_Call]) -> None:
        for call in calls:
            if isinstance(call.argument, Task) and call.argument.id in self._failures and call.expected is None:
                self._errors[call.slot] = self._failures[call.argument.id]
                del self._episodes[call.slot]
        calls = [call for call in calls if call.slot in self._episodes]
        if not calls:
            return
        worker = self._workers[index]
        try:
            worker.send(calls)
        except OSError:
            if worker.pending[0].name != "start":  # it died between two batches: no call is to blame
                self._restart(index, calls)

    def _receive(self, index: int, steps: dict[int, Step]) -> None:
        worker = self._workers[index]
        try:
            reply = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join()
            self._fail_worker(index, f"the worker process died (exit code {worker.process.exitcode})")
            return
        call = worker.pending.popleft()
        worker.since = time.monotonic()
        if call.name == "start":
            if reply is not None:
                raise RuntimeError(f"an environment worker could not create its environment: {reply}")
        elif call.slot not in self._episodes:
            pass  # it failed earlier in this replay
        elif isinstance(reply, Failure):
            self._fail_episode(call, reply.reason, reply.outside)
        elif call.expected is None:
            steps[call.slot] = reply
            self._episodes[call.slot].history.append((call, reply))
            if reply.done:
                del self._episodes[call.slot]
        elif reply != call.expected:
            self._fail_episode(call, "the replay in a fresh worker gave another answer")

    def _fail_episode(self, call: _Call, reason: str, outside: bool = False) -> None:
        task = self._episodes.pop(call.slot).task
        error = self._errors[call.slot] = EnvError(task.id, call.name, reason)
        if outside:
            logger.warning("the episode of task %s ended: %s: %s", task.id, call.name, reason)
        elif task.id not in self._failures:
            self._failures[task.id] = error
            logger.warning("task %s is in quarantine: %s: %s", task.id, call.name, reason)

    def _fail_worker(self, index: int, reason: str) -> None:
        """The call at the head hung or killed its worker: end its episode, go on with the others in a fresh worker."""
        pending = self._workers[index].pending
        culprit = pending.popleft()
        if culprit.name == "start":
            raise RuntimeError(f"an environment worker could not start: {reason}")
        if culprit.slot in self._episodes:
            self._fail_episode(culprit, reason)
        self._restart(index, [call for call in pending if call.expected is None])

    def _restart(self, index: int, calls: list[_Call]) -> None:
        replay = [
            _Call(slot, call.argument, expected=answer)
            for slot, episode in self._episodes.items()
            if slot % len(self._workers) == index
            for call, answer in episode.history
        ]
        self._workers[index].kill()
        self._workers[index] = _Worker(self._make_env)
        self._send(index, replay + calls)
