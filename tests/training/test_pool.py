"""The environment pool: same answers at any worker count, bad games counted apart, nothing leaked."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.training.fake_envs import Counter, Forgetful, Introspective, Unavailable, facts, task
from training.envs.alfworld import AlfworldEnv
from training.envs.base import EnvError, Step
from training.envs.games import load_tasks
from training.envs.pool import EnvPool

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 1.0  # seconds
PLANS = [["win"] * 3, ["wait"] * 3, ["win", "wait", "win"], ["a", "b", "c"]]


def play(pool: EnvPool, slots: range) -> dict[int, list[Step | EnvError]]:
    """Play PLANS[slot % 4] in every slot until its episode ends."""
    traces = {slot: [answer] for slot, answer in pool.reset({slot: task(f"game-{slot}") for slot in slots}).items()}
    for turn in range(3):
        for slot, answer in pool.step({slot: PLANS[slot % 4][turn] for slot in slots}).items():
            traces[slot].append(answer)
    return traces


def alone(slot: int) -> list[Step]:
    """The same episode in this process, without a pool."""
    env = Counter()
    return [env.reset(task(f"game-{slot}")), *(env.step(action) for action in PLANS[slot % 4])]


def gone(pid: int, seconds: float = 5.0) -> bool:
    """Whether a process ends (a zombie whose parent was killed has ended)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("slots", [2, 8])
def test_traces_equal_a_single_run_at_any_worker_count(workers: int, slots: int) -> None:
    """Case B40: 2 and 8 environments side by side, fixed action lists."""
    with EnvPool(Counter, workers=workers, timeout=30.0) as pool:
        traces = play(pool, range(slots))
    assert traces == {slot: alone(slot) for slot in range(slots)}
    assert [slot for slot, trace in traces.items() if trace[-1].won] == list(range(0, slots, 4))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [("hang", "no answer within 1 seconds"), ("exit", "exit code 3"), ("raise", "KeyError: 'the parser lost its way'")],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_reset_is_an_error_and_the_run_goes_on(bad: str, reason: str, workers: int) -> None:
    """Case B50: the game is named and quarantined, the others are played as if nothing had happened."""
    with EnvPool(Counter, workers=workers, timeout=TIMEOUT) as pool:
        first = pool.reset({0: task("a"), 1: task("b"), 2: task(bad), 3: task("c")})
        second = pool.step({slot: "win" for slot in (0, 1, 3)})
        again = pool.reset({2: task(bad)})
        other = pool.reset({2: task("d")})
        assert isinstance(first[2], EnvError)
        assert (first[2].task_id, first[2].call) == (bad, "reset")
        assert reason in first[2].reason
        assert again == {2: first[2]}
        assert pool.quarantine == {bad}
        assert list(first) == [0, 1, 2, 3]
        assert [answer.observation for answer in second.values()] == ["a > win", "b > win", "c > win"]
        assert other[2].observation == "d"


@pytest.mark.parametrize("bad", ["hang", "exit", "raise"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_step_loses_one_episode_only(bad: str, workers: int) -> None:
    with EnvPool(Counter, workers=workers, timeout=TIMEOUT) as pool:
        pool.reset({slot: task(f"game-{slot}") for slot in range(5)})
        pool.step({slot: "win" for slot in range(5)})
        answers = pool.step({0: "win", 2: bad, 4: "win"})  # slots 1 and 3 wait: their state must survive as well
        rest = pool.step({0: "win", 1: "win", 3: "win", 4: "win"})
        last = pool.step({1: "win", 3: "win"})
        assert isinstance(answers[2], EnvError)
        assert (answers[2].task_id, answers[2].call) == ("game-2", "step")
        assert pool.quarantine == {"game-2"}
        assert rest[0].won and rest[4].won and last[1].won and last[3].won
        assert last[3].observation == "game-3 > win > win > win"
        with pytest.raises(ValueError, match="slot 2 has no running episode"):
            pool.step({2: "win"})


def test_every_slot_of_a_hanging_game_costs_one_timeout() -> None:
    """A group of rollouts of one bad task in one worker: the first failure ends the others without a wait."""
    with EnvPool(Counter, workers=1, timeout=TIMEOUT) as pool:
        answers = pool.reset({slot: task("hang") for slot in range(8)} | {8: task("fine")})
        assert set(answers) == set(range(9))
        assert {answers[slot] for slot in range(8)} == {answers[0]}
        assert answers[8].observation == "fine"


def test_a_running_episode_outlives_the_quarantine_of_its_task() -> None:
    """Which rollout of a task fails first depends on nothing: the others of the group are played to their end."""
    for workers in (1, 2):
        with EnvPool(Counter, workers=workers, timeout=TIMEOUT) as pool:
            pool.reset({0: task("same"), 1: task("same"), 2: task("same")})
            answers = pool.step({0: "win", 1: "exit", 2: "win"})
            assert isinstance(answers[1], EnvError)
            assert answers[0].observation == answers[2].observation == "same > win"


def test_an_episode_that_cannot_be_replayed_is_an_error_never_lost_silently() -> None:
    with EnvPool(Forgetful, workers=1, timeout=TIMEOUT) as pool:
        pool.reset({0: task("a"), 1: task("b"), 2: task("c")})
        answers = pool.step({0: "exit", 1: "go"})
        assert "exit code 3" in answers[0].reason
        assert isinstance(answers[1], EnvError) and "replay" in answers[1].reason
        late = pool.step({2: "go"})  # it had no call in that batch: told at its next one
        assert isinstance(late[2], EnvError) and "replay" in late[2].reason
        assert pool.quarantine == {"a", "b", "c"}


def test_a_worker_killed_between_calls_costs_nothing() -> None:
    with EnvPool(Counter, workers=1, timeout=TIMEOUT) as pool:
        pool.reset({0: task("a"), 1: task("b")})
        (worker,) = multiprocessing.active_children()
        worker.kill()
        worker.join()
        answers = pool.step({0: "win", 1: "win"})
        assert [answer.observation for answer in answers.values()] == ["a > win", "b > win"]
        assert pool.quarantine == set()


def test_environments_are_reused_and_a_worker_stays_flat() -> None:
    """Case B45: 200 episodes leave threads, file handles and memory where they were after warm-up."""
    with EnvPool(Introspective, workers=1, timeout=30.0) as pool:
        readings = []
        for episode in range(200):
            pool.reset({0: task(f"a{episode}"), 1: task(f"b{episode}")})
            for _ in range(3):
                answers = pool.step({0: "go", 1: "go"})
            readings.append(facts(answers[1]))
    assert {reading["pid"] for reading in readings} == {readings[0]["pid"]}
    assert {reading["created"] for reading in readings} == {"2"}
    for name in ("threads", "files"):
        assert len({reading[name] for reading in readings[20:]}) == 1
    memory = [int(reading["memory"]) for reading in readings]
    assert abs(memory[-1] / memory[20] - 1) < 0.05


def test_workers_use_one_thread_and_never_load_torch_by_themselves() -> None:
    before = os.environ.get("OMP_NUM_THREADS")
    with EnvPool(Introspective, workers=1, timeout=30.0) as pool:
        answer = facts(pool.reset({0: task("a")})[0])
    assert (answer["omp"], answer["torch"]) == ("1", "0")
    assert os.environ.get("OMP_NUM_THREADS") == before


def test_pools_leave_nothing_behind() -> None:
    """Open, use, fail, close: no child process, no file handle (the first pool warms up the resource tracker)."""
    handles = []
    for _ in range(3):
        with EnvPool(Counter, workers=2, timeout=TIMEOUT) as pool:
            pool.reset({0: task("a"), 1: task("exit")})
        pool.close()  # again: allowed
        handles.append(psutil.Process().num_fds())
    assert multiprocessing.active_children() == []
    assert handles[1] == handles[2]
    with pytest.raises(RuntimeError, match="closed"):
        pool.reset({0: task("a")})


def test_an_exception_in_the_run_ends_a_hanging_worker() -> None:
    with pytest.raises(ZeroDivisionError), EnvPool(Counter, workers=1, timeout=1000.0) as pool:
        pool._workers[0].connection.send([(0, task("hang"))])  # the worker hangs while the run fails elsewhere
        _ = 1 / 0
    assert multiprocessing.active_children() == []


def test_an_environment_that_cannot_be_created_is_told_at_once() -> None:
    with pytest.raises(RuntimeError, match="FileNotFoundError: no games in the data folder"):
        EnvPool(Unavailable, workers=2, timeout=TIMEOUT)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("workers", "timeout"), [(0, 1.0), (-1, 1.0), (1, 0.0)])
def test_impossible_sizes_are_refused(workers: int, timeout: float) -> None:
    with pytest.raises(ValueError, match=r"env\.(workers|timeout)"):
        EnvPool(Counter, workers=workers, timeout=timeout)


SCRIPT = """
import multiprocessing, sys
if __name__ == "__main__":
    {before}
    from tests.training.fake_envs import Counter, task
    from training.envs.pool import EnvPool
    with EnvPool(Counter, workers=2, timeout=1000.0) as pool:
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        print(pool.reset({{0: task("{first}"), 1: task("fine")}})[1].observation, flush=True)
"""


def launch(folder: Path, before: str = "", first: str = "hang") -> subprocess.Popen[str]:
    path = folder / "script.py"
    path.write_text(SCRIPT.format(before=before, first=first))
    return subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )


@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_an_interrupted_run(tmp_path: Path, blow: signal.Signals) -> None:
    """Ctrl-C reaches the whole process group; a killed parent cannot clean up, so its workers end by themselves."""
    process = launch(tmp_path)
    assert process.stdout is not None
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    time.sleep(0.2)  # let one of them hang
    if blow == signal.SIGINT:
        os.killpg(process.pid, blow)
    else:
        process.send_signal(blow)
    _, errors = process.communicate(timeout=20)
    assert process.returncode != 0
    assert all(gone(pid) for pid in workers)
    assert errors.count("Traceback") == (blow == signal.SIGINT)  # the parent's own KeyboardInterrupt and no other


def test_it_works_after_another_library_has_set_a_start_method(tmp_path: Path) -> None:
    """Case B52, for both methods another library may have chosen."""
    for method in ("fork", "spawn"):
        process = launch(tmp_path, before=f"multiprocessing.set_start_method({method!r})", first="also fine")
        output, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "")
        assert output.splitlines()[1] == "fine"


def test_real_games_play_alike_alone_interleaved_and_replayed(shared: Path) -> None:
    """Case B40 with the real engine: 4 games in 2 workers, both killed half-way, against one game after the other."""
    tasks = load_tasks(shared / "data" / "alfworld", "valid_seen")[:4]
    choose = random.Random(0)
    env = AlfworldEnv(max_turns=6)
    alone: list[list[Step]] = []
    actions: list[list[str]] = []
    for game in tasks:
        alone.append([env.reset(game)])
        actions.append([])
        for _ in range(6):
            actions[-1].append(choose.choice(alone[-1][-1].admissible))
            alone[-1].append(env.step(actions[-1][-1]))
    with EnvPool(partial(AlfworldEnv, max_turns=6), workers=2, timeout=60.0) as pool:
        traces = [[first] for first in pool.reset(dict(enumerate(tasks))).values()]
        for turn in range(6):
            if turn == 3:
                for worker in multiprocessing.active_children():
                    worker.kill()
                    worker.join()
            answers = pool.step({slot: plan[turn] for slot, plan in enumerate(actions)})
            for slot, answer in answers.items():
                traces[slot].append(answer)
        assert pool.quarantine == set()
    assert traces == alone
