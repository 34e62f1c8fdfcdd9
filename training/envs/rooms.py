"""Plausible rooms and what is asked in them: layouts, furnished games, and a command list that wins.

`data/rooms.json` holds what makes a room plausible: which receptacles and objects it has, where an object is usually
found (percent), which receptacle can hold what, and in which rooms ALFWorld poses which kind of task.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Treatment:
    """What must be done to the object before it is placed."""

    verb: str
    able: str  # predicate an object needs
    tool: str  # receptacle type where it is done
    done: str  # predicate of the goal


TREATMENTS = {
    "pick_clean_then_place_in_recep": Treatment("clean", "cleanable", "SinkBasin", "isClean"),
    "pick_heat_then_place_in_recep": Treatment("heat", "heatable", "Microwave", "isHot"),
    "pick_cool_then_place_in_recep": Treatment("cool", "coolable", "Fridge", "isCool"),
}


@dataclass(frozen=True)
class Layout:
    id: int
    room: str
    receptacles: tuple[tuple[str, int], ...]  # (type, how many), sorted by type


@dataclass(frozen=True)
class Game:
    """One game before it is written: where everything is, what is asked, and how to win."""

    layout: Layout
    task_type: str
    wanted: str  # object type
    target: str  # receptacle type; "DeskLamp" for a look task
    places: tuple[tuple[str, int, str, int], ...]  # (object type, number, receptacle type, number)
    description: str
    walkthrough: tuple[str, ...]


@lru_cache(maxsize=1)
def rooms() -> dict[str, Any]:
    """The table of plausible rooms."""
    return json.loads((files("training.envs") / "data" / "rooms.json").read_text())


def keyed_generator(*key: object) -> np.random.Generator:
    """A generator that depends on its key only."""
    return np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:16], "big")))


def pick(rng: np.random.Generator, weights: dict[Any, float]) -> Any:
    """One key, drawn in proportion to its weight."""
    keys, mass = list(weights), np.array(list(weights.values()), dtype=float)
    return keys[int(rng.choice(len(keys), p=mass / mass.sum()))]


def make_layout(layout_id: int, room: str, seed: int, size: float = 1.0) -> Layout:
    """Receptacles of one room: each kind is there with its usual chance, in a usual number scaled by `size`."""
    rng = keyed_generator("layout", seed, room, layout_id)
    counts = {}
    for kind, (chance, low, high) in rooms()["rooms"][room]["receptacles"].items():
        if rng.random() < chance:
            counts[kind] = max(1, round(int(rng.integers(low, high + 1)) * size))
    return Layout(layout_id, room, tuple(sorted(counts.items())))


def _usual_places(kind: str, layout: Layout) -> dict[str, float]:
    present, holds = dict(layout.receptacles), rooms()["holds"]
    fixed = kind == "DeskLamp"  # nothing that is put down, so no receptacle is said to hold it
    usual = {r: w for r, w in rooms()["places"][kind].items() if r in present and (fixed or kind in holds.get(r, ()))}
    return usual or {r: 1.0 for r in present if kind in holds.get(r, ())}


def _furnish(layout: Layout, rng: np.random.Generator) -> dict[str, list[tuple[str, int]]]:
    """Object type -> the (receptacle type, number) of each instance."""
    present = dict(layout.receptacles)
    places: dict[str, list[tuple[str, int]]] = {}
    for kind, (chance, low, high) in rooms()["rooms"][layout.room]["objects"].items():
        usual = _usual_places(kind, layout)
        if rng.random() < chance and usual:
            spots = [pick(rng, usual) for _ in range(int(rng.integers(low, high + 1)))]
            places[kind] = [(spot, int(rng.integers(1, present[spot] + 1))) for spot in spots]
    return places


def _candidates(task_type: str, layout: Layout, places: dict[str, list[tuple[str, int]]]) -> list[tuple[str, str]]:
    """(wanted object, target receptacle) pairs that make sense in this room."""
    table, present = rooms(), dict(layout.receptacles)
    if task_type == "look_at_obj_in_light":
        return [(o, "DeskLamp") for o in places if o in table["pickupable"]] if "DeskLamp" in places else []
    treatment = TREATMENTS.get(task_type)
    able, tool = (treatment.able, treatment.tool) if treatment else ("pickupable", None)
    if tool is not None and tool not in present:
        return []
    need = 2 if task_type == "pick_two_obj_and_place" else 1
    return [
        (kind, target)
        for kind in places
        if kind in table[able] and len(places[kind]) >= need
        for target in present
        if target != tool
        and kind in table["holds"].get(target, ())
        and any(r != target for r in _usual_places(kind, layout))
    ]


def make_game(layout: Layout, task_type: str, rng: np.random.Generator, hidden: float | None = None) -> Game | None:
    """Furnish the layout and set a task in it; None if this room cannot pose such a task."""
    places, present = _furnish(layout, rng), dict(layout.receptacles)
    if (
        task_type == "look_at_obj_in_light"
        and "DeskLamp" not in places
        and (usual := _usual_places("DeskLamp", layout))
    ):
        places["DeskLamp"] = [(pick(rng, usual), 1)]
    by_object: dict[str, list[str]] = defaultdict(list)
    for kind, target in _candidates(task_type, layout, places):
        by_object[kind].append(target)
    if not by_object:
        return None
    wanted = sorted(by_object)[int(rng.integers(len(by_object)))]  # objects alike, however many targets each has
    target = sorted(by_object[wanted])[int(rng.integers(len(by_object[wanted])))]
    # The goal must not hold, nor be half done, at the start: wanted objects stand elsewhere.
    elsewhere = {r: w for r, w in _usual_places(wanted, layout).items() if r != target}
    closed = {r: w for r, w in elsewhere.items() if r in rooms()["openable"]}
    if hidden is not None and closed and len(closed) < len(elsewhere):
        opened = {r: w for r, w in elsewhere.items() if r not in closed}
        elsewhere = closed if rng.random() < hidden else opened
    places[wanted] = [
        spot if spot[0] in elsewhere else (r := pick(rng, elsewhere), int(rng.integers(1, present[r] + 1)))
        for spot in places[wanted]
    ]
    description, walkthrough = _solve(task_type, wanted, target, places, present, rng)
    flat = tuple((kind, i + 1, *spot) for kind in sorted(places) for i, spot in enumerate(places[kind]))
    return Game(layout, task_type, wanted, target, flat, description, walkthrough)


DESCRIPTIONS = {
    "pick_and_place_simple": ("put a {o} in {r}.", "put some {o} on {r}."),
    "look_at_obj_in_light": ("look at {o} under the desklamp.", "examine the {o} with the desklamp."),
    "pick_clean_then_place_in_recep": ("put a clean {o} in {r}.", "clean some {o} and put it in {r}."),
    "pick_heat_then_place_in_recep": ("put a hot {o} in {r}.", "heat some {o} and put it in {r}."),
    "pick_cool_then_place_in_recep": ("put a cool {o} in {r}.", "cool some {o} and put it in {r}."),
    "pick_two_obj_and_place": ("put two {o} in {r}.", "find two {o} and put them in {r}."),
}


def _solve(
    task_type: str,
    wanted: str,
    target: str,
    places: dict[str, list[tuple[str, int]]],
    present: dict[str, int],
    rng: np.random.Generator,
) -> tuple[str, tuple[str, ...]]:
    """The task sentence and a command list that wins."""
    templates = DESCRIPTIONS[task_type]
    description = templates[int(rng.integers(len(templates)))].format(o=wanted.lower(), r=target.lower())

    def reach(kind: str, number: int) -> list[str]:
        name = f"{kind.lower()} {number}"
        return [f"go to {name}"] + ([f"open {name}"] if kind in rooms()["openable"] else [])

    def take(number: int) -> list[str]:
        kind, index = places[wanted][number - 1]
        return [*reach(kind, index), f"take {wanted.lower()} {number} from {kind.lower()} {index}"]

    if task_type == "look_at_obj_in_light":
        kind, index = places["DeskLamp"][0]
        return description, (*take(1), *reach(kind, index), "use desklamp 1")
    treatment = TREATMENTS.get(task_type)
    where = int(rng.integers(1, present[target] + 1))
    commands: list[str] = []
    for number in (1, 2) if task_type == "pick_two_obj_and_place" else (1,):
        commands += take(number)
        if treatment is not None:
            tool = f"{treatment.tool.lower()} 1"
            commands += [f"go to {tool}", f"{treatment.verb} {wanted.lower()} {number} with {tool}"]
        steps = reach(target, where)
        commands += [s for s in steps if not (s.startswith("open") and s in commands)]  # it stays open
        commands.append(f"move {wanted.lower()} {number} to {target.lower()} {where}")
    return description, tuple(_without_idle_moves(commands))


def _without_idle_moves(commands: list[str]) -> Iterator[str]:
    here = ""
    for command in commands:
        if command != here:
            yield command
        here = command if command.startswith("go to") else here
