"""Household: new games in ALFWorld's own domain and grammar, played by the same real engine, nothing to download.

A layout is a room with its receptacles; a game puts objects into a layout and sets one of ALFWorld's six kinds of
task. Layouts of `train` return in `valid_seen` with other objects in other places; those of `valid_unseen` never
occur in training.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from training.envs.rooms import TREATMENTS, Game, keyed_generator, make_game, make_layout, pick, rooms

SPLITS = ("train", "valid_seen", "valid_unseen")
SIZES = {"train": 512, "valid_seen": 128, "valid_unseen": 128}  # games of a split, unless asked otherwise
TRAIN_LAYOUTS, UNSEEN_LAYOUTS = 120, 32  # like the 108 rooms of ALFWorld's training split


@dataclass(frozen=True)
class Difficulty:
    """`size` scales the number of receptacles of a kind; `hidden` is the chance that the wanted objects start in a
    closed receptacle (where one can hold them), None: as often as the room's ordinary places have it."""

    size: float = 1.0
    hidden: float | None = None


def _entity(kind: str, number: int, count: int) -> str:
    # ALFWorld numbers the instances of a name backwards in the sorted order of their ids.
    name = {"SinkBasin": "Sink", "BathtubBasin": "Bathtub"}.get(kind, kind)
    return f"{name}_bar_{count - number:02d}" + (f"_bar_{kind}" if name != kind else "")


def pddl_problem(game: Game) -> str:
    """The game in ALFWorld's domain: objects, initial facts and goal."""
    table, present = rooms(), dict(game.layout.receptacles)
    counts = Counter(kind for kind, *_ in game.places)
    receptacles = [(kind, n, _entity(kind, n, present[kind])) for kind in present for n in range(1, present[kind] + 1)]
    location = {entity: f"loc_bar_{i + 1}" for i, (_, _, entity) in enumerate(receptacles)}
    otypes = sorted({kind for kind, *_ in game.places} | {"Knife", "ButterKnife"})  # the domain names the knives
    rtypes = sorted(set(present) | {"Sink", "SinkBasin", "Microwave", "Fridge"})  # and these receptacles
    facts = []
    for kind, _, entity in receptacles:
        facts += [f"receptacleType {entity} {kind}Type", f"receptacleAtLocation {entity} {location[entity]}"]
        facts += [f"openable {entity}"] if kind in table["openable"] else []
    facts += [f"canContain {r}Type {o}Type" for r in sorted(present) for o in table["holds"].get(r, ()) if o in counts]
    objects = []
    for kind, number, spot, index in game.places:
        entity, holder = _entity(kind, number, counts[kind]), _entity(spot, index, present[spot])
        objects.append(entity)
        facts += [f"objectType {entity} {kind}Type", f"inReceptacle {entity} {holder}"]
        facts.append(f"objectAtLocation {entity} {location[holder]}")
        facts += [
            f"{attribute} {entity}"
            for attribute in ("pickupable", "cleanable", "heatable", "coolable", "isReceptacleObject")
            if kind in table[attribute]
        ]
        facts += [f"toggleable {entity}"] if kind == "DeskLamp" else []
    facts.append("atLocation agent1 loc_bar_0")
    declared = ["agent1 - agent", *(f"{t}Type - otype" for t in otypes), *(f"{t}Type - rtype" for t in rtypes)]
    declared += [*(f"{o} - object" for o in objects), *(f"{entity} - receptacle" for _, _, entity in receptacles)]
    declared += [f"loc_bar_{i} - location" for i in range(len(receptacles) + 1)]
    lines = ["(define (problem household)", "(:domain alfred)", "(:objects", *(f"    {d}" for d in declared), ")"]
    return "\n".join([*lines, "(:init", *(f"    ({fact})" for fact in facts), ")", f"(:goal {_goal(game)})", ")\n"])


def _goal(game: Game) -> str:
    wanted, target = f"{game.wanted}Type", f"{game.target}Type"
    if game.task_type == "look_at_obj_in_light":
        return (
            "(and (exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and (objectType ?ot DeskLampType) "
            "(toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?ot ?r))) "
            f"(exists (?o - object ?a - agent) (and (objectType ?o {wanted}) (holds ?a ?o))))"
        )
    if game.task_type == "pick_two_obj_and_place":
        placed = "(objectType {0} {1}) (receptacleType ?r {2}) (inReceptacle {0} ?r)"
        first, second = (placed.format(o, wanted, target) for o in ("?o1", "?o2"))
        return (
            f"(and (exists (?r - receptacle) (exists (?o1 - object) (and {first} (exists (?o2 - object) "
            f"(and (not (= ?o1 ?o2)) {second}))))))"
        )
    treatment = TREATMENTS.get(game.task_type)
    state = f"({treatment.able} ?o) ({treatment.done} ?o) " if treatment else ""
    return (
        f"(and (exists (?r - receptacle) (exists (?o - object) (and {state}(objectType ?o {wanted}) "
        f"(receptacleType ?r {target}) (inReceptacle ?o ?r)))))"
    )


def plan_game(split: str, index: int, seed: int, difficulty: Difficulty = Difficulty()) -> Game:
    """Game number `index` of a split; depends on nothing but its arguments."""
    table = rooms()
    rng = keyed_generator("game", seed, split, index, difficulty)
    first, count = (TRAIN_LAYOUTS, UNSEEN_LAYOUTS) if split == "valid_unseen" else (0, TRAIN_LAYOUTS)
    task_type = pick(rng, table["tasks"])
    while True:  # a drawn room may not be able to pose the task; then another one is drawn
        room = pick(rng, table["task_rooms"][task_type])
        layout = make_layout(first + int(rng.integers(count)), room, seed, difficulty.size)
        if (game := make_game(layout, task_type, rng, difficulty.hidden)) is not None:
            return game


def game_record(game: Game, split: str) -> dict[str, Any]:
    """The packed form of ALFWorld's games; the id names the task and, by its hash, the game."""
    problem = pddl_problem(game)
    name = f"{game.task_type}-{game.wanted}-{game.target}-{game.layout.room.replace(' ', '')}{game.layout.id}"
    digest = hashlib.sha256((game.description + problem).encode()).hexdigest()
    return {
        "env": "household",
        "split": split,
        "task": name,
        "trial": f"household_{digest[:12]}",
        "task_desc": game.description,
        "walkthrough": list(game.walkthrough),
        "pddl_problem": problem,
        "traj": {"task_type": game.task_type, "layout": game.layout.id, "room": game.layout.room},
    }


def generate(
    folder: Path,
    sizes: dict[str, int] | None = None,
    *,
    seed: int = 0,
    difficulty: Difficulty = Difficulty(),
    workers: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write household games in the packed form (`games_<split>.jsonl.xz`, `alfred.pddl`, `alfred_template.twl2`).

    Every game's walkthrough is played to `won` on the real engine before the game is written. The same arguments
    give the same bytes at any number of workers. Source: ours; domain and grammar are ALFWorld's.

    Args: sizes: games of each split. progress: called with (games done, games in all).
    Raises: RuntimeError if a walkthrough does not win (a fault of the generator, never skipped).
    """
    import alfworld.info as wheel  # where the package keeps its domain and grammar

    sizes = {**SIZES, **(sizes or {})}
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in (("alfred.pddl", wheel.ALFRED_PDDL_PATH), ("alfred_template.twl2", wheel.ALFRED_TWL2_PATH)):
        _write(folder / name, Path(source).read_bytes())
    jobs = [(split, index, seed, difficulty, folder) for split in SPLITS for index in range(sizes[split])]
    lines: dict[str, dict[str, str]] = {split: {} for split in SPLITS}
    for done, (split, record) in enumerate(_played(jobs, workers), start=1):
        lines[split].setdefault(record["trial"], json.dumps(record, separators=(",", ":")))  # twins are kept once
        if progress is not None:
            progress(done, len(jobs))
    for split in ("valid_seen", "valid_unseen"):  # equal to a training game: not a validation game
        lines[split] = {trial: line for trial, line in lines[split].items() if trial not in lines["train"]}
    for split, games in lines.items():
        _write(folder / f"games_{split}.jsonl.xz", lzma.compress("".join(f"{g}\n" for g in games.values()).encode()))
    return folder


def _played(jobs: list[tuple[Any, ...]], workers: int) -> Iterator[tuple[str, dict[str, Any]]]:
    if workers < 2:
        yield from map(_play, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap(_play, jobs, chunksize=8)


@lru_cache(maxsize=1)
def process_env() -> Any:
    """The one real engine of a process that plays game after game."""
    from training.envs.alfworld import AlfworldEnv

    return AlfworldEnv()


def _play(job: tuple[Any, ...]) -> tuple[str, dict[str, Any]]:
    from training.envs.games import game_data

    split, index, seed, difficulty, folder = job
    record = game_record(plan_game(split, index, seed, difficulty), split)
    env = process_env()
    env.reset_game(game_data(record, folder))
    if not any(env.step(command).won for command in record["walkthrough"]):
        raise RuntimeError(f"the walkthrough of household game {split}/{index} (seed {seed}) does not win: {record}")
    return split, record


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    os.replace(partial, path)
