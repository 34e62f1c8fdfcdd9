"""The cached ALFWorld engine answers what the stock engine answers, from every entrance to the cache."""

from __future__ import annotations

import gc
import gzip
import hashlib
import json
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import textworld
from textworld.envs.pddl.logic import PddlState
from textworld.logic import Placeholder, Proposition, Rule, Type, TypeHierarchy, Variable

from benchmarks.env import StockEnv, command, forget, trace_digest
from training.envs import engine, library, translation
from training.envs.alfworld import AlfworldEnv
from training.envs.base import Step
from training.envs.facts import Facts, compile_query
from training.envs.games import game_data, load_tasks, read_record
from training.envs.grammar import _expression
from training.envs.household import Difficulty, game_record, generate, plan_game

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "alfworld_digests.json").read_text())


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache on disk and in memory."""
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "cache"))
    forget()
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Three generated games; no data from elsewhere."""
    folder = generate(tmp_path_factory.mktemp("household"), {"train": 0, "valid_seen": 0, "valid_unseen": 0}, workers=1)
    records = [game_record(plan_game("train", index, 0, Difficulty()), "train") for index in range(3)]
    return [game_data(record, folder) for record in records]


def play(env: AlfworldEnv, game: dict[str, Any], seed: int) -> list[Step]:
    """One episode of random commands."""
    rng, steps = random.Random(seed), [env.reset_game(game)]
    while not steps[-1].done:
        steps.append(env.step(command(steps[-1], rng)))
    return steps


# The same answers as the stock engine


@pytest.mark.parametrize("task_id", sorted({row["task"] for row in GOLDEN["episodes"]}))
def test_real_games_replay_the_stored_traces_of_the_stock_engine(shared: Path, task_id: str) -> None:
    tasks = {task.id: task for task in load_tasks(shared / "data" / "alfworld", GOLDEN["split"])}
    env, game = AlfworldEnv(GOLDEN["turns"]), read_record(tasks[task_id])
    rows = [row for row in GOLDEN["episodes"] if row["task"] == task_id]
    assert [trace_digest(env, game, row["seed"]) for row in rows] == [row["sha256"] for row in rows]


def test_a_generated_game_equals_the_stock_engine_live(games: list[dict[str, Any]]) -> None:
    assert play(AlfworldEnv(10), games[0], seed=1) == play(StockEnv(10), games[0], seed=1)


def test_digest_sees_a_changed_word(games: list[dict[str, Any]]) -> None:
    """Negative control of the digests."""
    changed = {**games[0], "grammar": games[0]["grammar"].replace("Your task is to:", "Your task was to:")}
    digests = [trace_digest(AlfworldEnv(5), game, 3) for game in (games[0], games[0], changed)]
    assert digests[0] == digests[1] != digests[2]


def test_queries_bind_in_textworlds_order() -> None:
    """Oracle: State.all_assignments on random facts over a small hierarchy of types."""
    types = (("object", ()), ("food", ("object",)), ("fruit", ("food",)), ("place", ("object",)))
    hierarchy = TypeHierarchy()
    for name, supertypes in types:
        hierarchy.add(Type(name, supertypes))
    expressions = ["in(a: object, p: place)", "in(a: food, p: place) & in(b: fruit, p: place)", "on(a: food, a: food)"]
    expressions += ["in(a: fruit, p: place) & hot(a: fruit)", "on(a: food, b: object) & on(b: object, a: food)"]
    rng = random.Random(0)
    nonempty = 0
    for trial in range(60):
        names = {f"x{i}": rng.choice(["food", "fruit"]) for i in range(5)} | {f"p{i}": "place" for i in range(3)}
        stock = object.__new__(PddlState)
        textworld.logic.State.__init__(stock, textworld.logic.GameLogic())
        stock._logic.types = hierarchy
        rows: dict[Any, set[Any]] = {}
        for _ in range(14):
            name, arity = rng.choice([("in", 2), ("on", 2), ("hot", 1)])
            row = tuple(rng.choice(list(names)) for _ in range(arity))
            rows.setdefault((name, tuple(names[a] for a in row)), set()).add(row)
            stock.add_fact(Proposition(name, [Variable(a, names[a]) for a in row]))
        facts = Facts({signature: frozenset(found) for signature, found in rows.items()})
        start = {("a", "food"): ("x0", names["x0"])} if trial % 3 == 0 else {}
        mapping = {Placeholder(*ph): Variable(*var) for ph, var in start.items()}
        for expression in expressions:
            rule = Rule.parse_conjunctive_query(expression)
            wanted = [
                {(p.name, p.type): (v.name, v.type) for p, v in found.items()}
                for found in stock.all_assignments(rule, mapping)
            ]
            got = list(compile_query(expression, types).bindings(facts, start))
            assert [list(b.items()) for b in got] == [list(b.items()) for b in wanted]
            nonempty += bool(wanted)
    assert 50 < nonempty < 300  # both answers occur


def test_grammar_expressions_are_text_and_never_code() -> None:
    info = textworld.generator.game.EntityInfo("cup 1", "object")
    info.name, info.indefinite = "cup 1", "a"
    variables = {"o": info}
    assert _expression("o.indefinite + ' ' + o.name ")(variables) == "a cup 1"
    info.name = ""
    assert _expression("o.name or o.id")(variables) == "cup 1"
    for code in ("__import__('os').getcwd()", "o.__class__", "open('x')", "[1, 2]", "o.name if o else 1", "1 +"):
        with pytest.raises(ValueError, match="grammar expression"):
            _expression(code)


# Episodes


def test_the_walkthrough_earns_ten_on_its_last_command_and_nothing_before(games: list[dict[str, Any]]) -> None:
    env = AlfworldEnv()
    for game in games:
        steps = [env.reset_game(game), *(env.step(c) for c in game["walkthrough"])]
        assert [s.reward for s in steps] == [0.0] * (len(steps) - 1) + [10.0]
        assert [s.won for s in steps] == [s.done for s in steps] == [False] * (len(steps) - 1) + [True]
        with pytest.raises(ValueError, match="reset before step"):
            env.step("look")


def test_done_at_the_limit_is_no_success(games: list[dict[str, Any]]) -> None:
    """Case B38: "look" 50 times."""
    env = AlfworldEnv()
    env.reset_game(games[0])
    steps = [env.step("look") for _ in range(50)]
    assert [s.done for s in steps] == [False] * 49 + [True]
    assert not any(s.won or s.reward for s in steps)


def test_old_action_dialect_changes_nothing(games: list[dict[str, Any]]) -> None:
    """Case B39: "put X in/on Y" of earlier versions; test_doctor.py has the report."""
    env, game = AlfworldEnv(), games[0]
    before = env.reset_game(game)
    after = env.step("put apple 1 in/on fridge 1")
    assert after.observation == "Nothing happens."
    assert after.admissible == before.admissible


def test_first_observation_is_the_same_in_every_process(games: list[dict[str, Any]], tmp_path: Path) -> None:
    """Case B41: two processes with different hash seeds, and two resets in this one."""
    (tmp_path / "game.json").write_text(json.dumps(games[1]))
    code = (
        "import json, hashlib; from training.envs.alfworld import AlfworldEnv;"
        f"step = AlfworldEnv().reset_game(json.load(open({str(tmp_path / 'game.json')!r})));"
        "print(hashlib.sha256(repr(step).encode()).hexdigest())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={"PYTHONHASHSEED": seed, "HOME": str(tmp_path)},
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    env = AlfworldEnv()
    outputs |= {hashlib.sha256(repr(env.reset_game(games[1])).encode()).hexdigest() for _ in range(2)}
    assert len(outputs) == 1


# Several environments in one process


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("way", ["threads", "interleaved"])
def test_environments_side_by_side_answer_as_alone(games: list[dict[str, Any]], count: int, way: str) -> None:
    """Case B40. Games repeat, so some environments share a library copy."""
    chosen = [games[i % len(games)] for i in range(count)]
    alone = [play(AlfworldEnv(15), game, seed) for seed, game in enumerate(chosen)]
    forget()  # threads translate and parse at the same time
    traces: list[list[Step]] = [[] for _ in chosen]
    if way == "threads":

        def run(i: int) -> None:
            traces[i] = play(AlfworldEnv(15), chosen[i], i)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        envs, rngs = [AlfworldEnv(15) for _ in chosen], [random.Random(i) for i in range(count)]
        traces = [[env.reset_game(game)] for env, game in zip(envs, chosen, strict=True)]
        while not all(trace[-1].done for trace in traces):
            for env, rng, trace in zip(envs, rngs, traces, strict=True):
                if not trace[-1].done:
                    trace.append(env.step(command(trace[-1], rng)))
    assert traces == alone


def test_two_hundred_environments_leave_nothing_behind(games: list[dict[str, Any]]) -> None:
    """Case B45: threads, file handles, library copies and memory stay flat, closed or merely forgotten."""
    process = psutil.Process()

    def measure() -> tuple[int, int, int, int]:
        return process.num_threads(), process.num_fds(), len(library._COPIES), process.memory_info().rss

    def use(i: int) -> None:
        env = AlfworldEnv()
        env.reset_game(games[i % len(games)])
        env.step("look")
        if i % 2:
            env.close()

    for i in range(20):
        use(i)
    before = measure()
    for i in range(200):
        use(i)
    after = measure()
    assert after[:3] == before[:3]
    assert 0.95 * before[3] <= after[3] <= 1.05 * before[3]


def test_episodes_of_one_game_share_a_library_copy(
    games: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    borrowed: list[library.Library] = []
    returned: list[library.Library] = []

    def borrow(*arguments: Any) -> library.Library:
        borrowed.append(library.borrow(*arguments))
        return borrowed[-1]

    def give_back(copy: library.Library) -> None:
        returned.append(copy)
        library.give_back(copy)

    gc.collect()  # engines of earlier tests that nobody closed are given back before we count
    monkeypatch.setattr(engine, "borrow", borrow)
    monkeypatch.setattr(engine, "give_back", give_back)
    envs = [AlfworldEnv() for _ in range(4)]
    for env in envs:
        env.reset_game(games[0])
    assert len(borrowed) - len(returned) == 4
    assert all(copy is borrowed[0] for copy in borrowed)
    for env in envs:
        env.close()
        env.close()  # twice is once
    assert len(borrowed) == len(returned)


# The cache


def test_disk_cache_spares_the_translator_and_heals(
    games: list[dict[str, Any]], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = play(AlfworldEnv(5), games[0], 0)
    (stored,) = (own_cache / "translations").iterdir()  # nothing partial beside it
    intact = stored.read_bytes()
    calls = Counter[str]()
    original = translation._pddl_to_sas

    def counted(domain: str, problem: str, optimize: bool) -> tuple[Any, str]:
        calls["planning" if optimize else "playing"] += 1
        return original(domain, problem, optimize)

    monkeypatch.setattr(translation, "_pddl_to_sas", counted)
    forget()
    assert play(AlfworldEnv(5), games[0], 0) == first
    assert not calls
    swapped = gzip.compress(json.dumps({**json.loads(gzip.decompress(intact)), "key": "other"}).encode())
    for damaged in (intact[: len(intact) // 2], b"", b"not gzip", gzip.compress(b"[1]"), gzip.compress(b"{}"), swapped):
        stored.write_bytes(damaged)
        forget()
        assert play(AlfworldEnv(5), games[0], 0) == first
        assert stored.read_bytes() == intact
    assert calls == {"playing": 6}


def test_a_cache_that_cannot_be_written_is_no_obstacle(
    games: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "file"))
    assert AlfworldEnv().reset_game(games[0]).admissible


def test_translator_leaves_the_command_line_alone(games: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["undertow", "train", "--steps", "3"])
    AlfworldEnv().reset_game(games[0])
    assert sys.argv == ["undertow", "train", "--steps", "3"]


def test_planning_translates_when_asked_and_its_plan_wins(
    games: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    original = engine.translate_for_planning
    monkeypatch.setattr(engine, "translate_for_planning", lambda *texts: asked.append(1) or original(*texts))
    play(AlfworldEnv(5), games[0], 0)
    assert not asked
    planner = engine.Engine(textworld.EnvInfos(won=True, policy_commands=True))
    planner.load(games[0])
    state, limit = planner.reset(), 30
    while not state["won"] and limit:
        state, *_ = planner.step(state["policy_commands"][0])
        limit -= 1
    planner.close()
    assert state["won"]
    assert asked == [1]
