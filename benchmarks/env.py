"""The cached ALFWorld engine against the stock one: the same answers, and how much faster.

Both engines run in this process on the same games and the same random commands; every observation, admissible list,
reward and `won` is compared as they go. Times are CPU seconds of this process, so that a busy machine matters little.
Games: --data, else $ALFWORLD_DATA, else a few generated household games.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.envs import facts, grammar, translation
from training.envs.alfworld import AlfworldEnv
from training.envs.base import Step, Task
from training.envs.games import load_tasks, read_record

BARS = {"cold reset": 2.0, "reset from disk cache": 8.0, "warm reset": 30.0, "step": 15.0}  # times faster than stock
INADMISSIBLE = ("dance", "put apple 1 in/on fridge 1", "")


class StockEnv(AlfworldEnv):
    """AlfworldEnv over TextWorld's own, unchanged PddlEnv."""

    def __init__(self, max_turns: int = 50):
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
        from textworld.envs.pddl import PddlEnv

        infos = textworld.EnvInfos(won=True, admissible_commands=True, extras=["gamefile"])
        self._engine = PddlEnv(infos)
        self._env = AlfredInfos(AlfredDemangler(self._engine, shuffle=False))
        self.max_turns = max_turns
        self._turn = None

    def close(self) -> None:
        self._turn = None


def command(step: Step, rng: random.Random) -> str:
    """A random admissible command, now and then one that is not, and half of the time one that changes the world."""
    if rng.random() < 0.05:
        return rng.choice(INADMISSIBLE)
    idle = ("go to", "examine", "look", "inventory", "help")
    lively = [c for c in step.admissible if not c.startswith(idle)]
    return rng.choice(lively if lively and rng.random() < 0.5 else step.admissible)


def trace_digest(env: AlfworldEnv, game: Mapping[str, Any], seed: int) -> str:
    """sha256 of everything the environment answers in one episode of random commands."""
    rng, digest = random.Random(seed), hashlib.sha256()
    step = env.reset_game(game)
    while True:
        digest.update(json.dumps([step.observation, step.admissible, step.reward, step.done, step.won]).encode())
        if step.done:
            return digest.hexdigest()
        step = env.step(command(step, rng))


def forget() -> None:
    """Drop what this process remembers of earlier games; the files on disk stay."""
    for remembered in (translation._remembered, grammar.load_logic, grammar._symbols, grammar._document):
        remembered.cache_clear()
    facts.compile_query.cache_clear()


def compare(games: list[Mapping[str, Any]], episodes: int, turns: int, report: Callable[[int], None]) -> dict[str, Any]:
    """Play every game on both engines. Raises AssertionError at the first answer that differs."""
    stock, cached = StockEnv(turns), AlfworldEnv(turns)
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"stock": [], "cached": []})

    def clocked(what: str, who: str, call: Callable[[], Any]) -> Any:
        start = time.process_time()
        answer = call()
        seconds[what][who].append(time.process_time() - start)
        return answer

    steps = 0
    cached.reset_game(games[0])  # imports and the first library copy are paid once a process
    stock.reset_game(games[0])
    for index, game in enumerate(games[1:]):
        first = clocked("cold reset", "cached", lambda game=game: cached.reset_game(game))
        assert first == clocked("cold reset", "stock", lambda game=game: stock.reset_game(game))
        seconds["reset from disk cache"]["stock"].append(seconds["cold reset"]["stock"][-1])
        cached.reset_game(games[0])
        forget()
        assert first == clocked("reset from disk cache", "cached", lambda game=game: cached.reset_game(game))
        for episode in range(episodes):
            # A warm reset is the reset of the loaded game: the stock engine translates twice in it, not four times.
            for who, env in (("cached", cached), ("stock", stock)):
                state = clocked("warm reset", who, env._env.reset)
                env._turn = 0
                assert env._step(state) == first, f"game {index}: {who} reset differs"
            rng, step = random.Random(f"{index} {episode}"), first
            while not step.done:
                action = command(step, rng)
                step = clocked("step", "cached", lambda action=action: cached.step(action))
                wanted = clocked("step", "stock", lambda action=action: stock.step(action))
                assert step == wanted, f"game {index}, episode {episode}, {action!r}: {step} is not {wanted}"
                steps += 1
        report(index + 1)
    rows = []
    for what, times in seconds.items():
        medians = {who: 1000 * statistics.median(values) for who, values in times.items()}
        ratio = medians["stock"] / medians["cached"]
        row = {"what": what, "stock_ms": medians["stock"], "cached_ms": medians["cached"], "ratio": ratio}
        rows.append({**row, "bar": BARS[what], "n": len(times["cached"])})
    count = len(games) - 1
    return {"games": count, "episodes": count * episodes, "steps": steps, "identical": True, "rows": rows}


def pick_tasks(tasks: list[Task], count: int) -> list[Task]:
    """`count` tasks spread evenly over the list, so over the task types."""
    return [tasks[i * len(tasks) // count] for i in range(min(count, len(tasks)))]


def write_digests(path: Path, data: Path, split: str, games: int, episodes: int, turns: int) -> None:
    """Digests of stock traces, which the tests replay on the cached engine."""
    env, rows = StockEnv(turns), []
    for task in pick_tasks(load_tasks(data, split), games):
        for seed in range(episodes):
            rows.append({"task": task.id, "seed": seed, "sha256": trace_digest(env, read_record(task), seed)})
    content = {"split": split, "turns": turns, "episodes": rows}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("ALFWORLD_DATA"), help="folder with games")
    parser.add_argument("--split", default="train")
    parser.add_argument("--games", type=int, default=50)
    parser.add_argument("--episodes", type=int, default=4, help="of each game")
    parser.add_argument("--turns", type=int, default=20, help="of each episode")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/env.json"))
    parser.add_argument("--write-digests", type=Path, help="write digests of stock traces there and stop")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["UNDERTOW_CACHE"] = scratch  # cold is cold
        data = args.data
        if data is None:
            from training.envs.household import generate

            sizes = {"train": args.games + 1, "valid_seen": 0, "valid_unseen": 0}
            data = generate(Path(scratch, "household"), sizes=sizes)
            os.environ["UNDERTOW_CACHE"] = str(Path(scratch, "empty"))
            forget()
        if args.write_digests:
            write_digests(args.write_digests, data, args.split, args.games, args.episodes, args.turns)
            return
        tasks = pick_tasks(load_tasks(data, args.split), args.games + 1)
        result = compare(
            [read_record(task) for task in tasks],
            args.episodes,
            args.turns,
            lambda done: print(f"\r{done}/{args.games} games", end="", file=sys.stderr),
        )
    print(f"\n{result['episodes']} episodes over {result['games']} games, {result['steps']} steps: answers identical")
    print(f"{'':24}{'stock ms':>10}{'cached ms':>11}{'ratio':>8}{'bar':>6}")
    for row in result["rows"]:
        print(f"{row['what']:24}{row['stock_ms']:10.1f}{row['cached_ms']:11.2f}{row['ratio']:8.1f}{row['bar']:6.0f}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    partial = args.out.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, args.out)


if __name__ == "__main__":
    main()
