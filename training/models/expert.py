"""An expert that SEARCHES: it knows where things usually are, not where they are, and acts on what it has seen.

It plays household and ALFWorld games from their texts alone, and its play is what the tiny policy imitates.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from training.envs.rooms import TREATMENTS, rooms
from training.envs.sights import closed, contents, things

_GOALS = (
    (re.compile(r"(?:put two|find two) (\w+) (?:and put them )?(?:in|on) (\w+)"), "two"),
    (re.compile(r"(?:look at|examine the) (\w+) (?:under|with) the (\w+)"), "look"),
    (re.compile(r"put a (?P<how>clean|hot|cool) (\w+) (?:in|on) (\w+)"), ""),
    (re.compile(r"(?P<how>clean|heat|cool) some (\w+) and put it (?:in|on) (\w+)"), ""),
    (re.compile(r"put (?:a|some) (\w+) (?:in|on) (\w+)"), "place"),
)


@dataclass(frozen=True)
class Goal:
    """What a task sentence asks: kind is "place", "two", "look", "clean", "heat" or "cool"; target a receptacle type
    (the lamp of a look task)."""

    kind: str
    wanted: str
    target: str

    @classmethod
    def parse(cls, description: str) -> Goal:
        """Raises ValueError on a sentence that is none of ALFWorld's templates."""
        for pattern, kind in _GOALS:
            if match := pattern.search(description.lower()):
                wanted, target = match.groups()[-2:]
                how = match.groupdict().get("how")
                return cls({"hot": "heat"}.get(how, how) if how else kind, wanted, target)
        raise ValueError(f"task sentence {description!r} is none of ALFWorld's templates")

    @property
    def tool(self) -> str | None:
        """Receptacle type of the treatment, if the task has one."""
        return {t.verb: t.tool.lower() for t in TREATMENTS.values()}.get(self.kind)


def kind_of(name: str) -> str:
    """Type of an instance: "mug 2" -> "mug"."""
    return name.rsplit(" ", 1)[0]


def usual_places(wanted: str) -> dict[str, float]:
    """Receptacle type -> percent of the wanted object's instances that are found there, all lower case."""
    table = {name.lower(): places for name, places in rooms()["places"].items()}
    return {place.lower(): float(weight) for place, weight in table.get(wanted, {}).items()}


@dataclass
class Expert:
    """One episode's player.

    A thought names the thing in question as the observations do, and where it was seen: a small model can copy that
    from its context. `known` starts with what a skill says, thing -> place; `avoid`: places to try last.
    """

    goal: Goal
    rng: np.random.Generator
    known: dict[str, str] = field(default_factory=dict)
    avoid: frozenset[str] = frozenset()
    from_skill: frozenset[str] = frozenset()  # things whose place the skill told
    places: list[str] = field(default_factory=list)  # in the order of search
    visited: set[str] = field(default_factory=set)
    opened: set[str] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)
    here: str = ""
    holding: str = ""
    treated: bool = False
    placed: list[str] = field(default_factory=list)  # things already at their target
    home: str = ""  # the target instance, once chosen

    def begin(self, observation: str) -> None:
        """Reads the room from the first observation and decides the order of search."""
        room = things(observation)
        usual = usual_places(self.goal.wanted)
        count = {kind: sum(kind_of(p) == kind for p in room) for kind in map(kind_of, room)}
        # Likely places first, each kind once through in the order of the room's list; the noise makes plays differ.
        score = {kind: np.log(usual.get(kind, 0.3) / n) + 0.5 * self.rng.gumbel() for kind, n in sorted(count.items())}
        first = next((p for p in sorted(room) if kind_of(p) == self.goal.target), "")
        self.home = self.home or first
        ordered = sorted(room, key=lambda p: (p in self.avoid, -score[kind_of(p)]))
        self.places = [p for p in ordered if not (self.goal.kind in ("place", "two") and p == self.home)]

    def observe(self, action: str, observation: str) -> None:
        """Takes in what the environment answered to `action`."""
        if observation.startswith("Nothing happens"):
            return
        verb, _, rest = action.partition(" ")
        if action.startswith("go to "):
            self.here = action.removeprefix("go to ")
        elif verb == "take":
            self.holding = rest.partition(" from ")[0]
            self.known.pop(self.holding, None)
            self.treated = False
        elif verb == "move":
            if kind_of(rest.partition(" to ")[2]) == self.goal.target and self.ready:
                self.placed.append(self.holding)
            else:
                self.known[self.holding] = rest.partition(" to ")[2]
            self.holding = ""
        elif verb == self.goal.kind:
            self.treated = True
        elif verb == "close":
            self.opened.discard(rest)
            self.closed.add(rest)
        if shut := closed(observation):
            self.closed.add(shut)
        for place, inside in contents(observation).items():
            self.visited.add(place)
            self.closed.discard(place)
            self.known = {t: p for t, p in self.known.items() if p != place}
            self.known |= {thing: place for thing in inside if thing not in self.placed}

    @property
    def ready(self) -> bool:
        """The held object needs no treatment any more."""
        return kind_of(self.holding or " ") == self.goal.wanted and (self.goal.tool is None or self.treated)

    def act(self) -> tuple[str, str] | None:
        """(thought, command), or None when every place has been searched."""
        goal = self.goal
        if self.holding and kind_of(self.holding) != goal.wanted:
            return self._reach(
                self.here or self.places[0], f"a {self.holding} back", f"move {self.holding} to {self.here}"
            )
        if not self.holding:
            return self._fetch()
        if goal.tool is not None and not self.treated:
            tool = next((p for p in sorted(self.places) if kind_of(p) == goal.tool), None)
            thought = f"a {self.holding} to {goal.kind}"
            return None if tool is None else self._go(tool, thought, f"{goal.kind} {self.holding} with {tool}")
        if goal.kind == "look":
            lamp = next((thing for thing in sorted(self.known) if kind_of(thing) == goal.target), None)
            if lamp is None:
                return self._search(goal.target)
            return self._reach(self.known[lamp], self._told(lamp), f"use {lamp}")
        return self._reach(self.home, f"a {self.holding} to {goal.target}", f"move {self.holding} to {self.home}")

    def _fetch(self) -> tuple[str, str] | None:
        wanted = self.goal.wanted
        at_home = self.home if self.goal.kind in ("place", "two") else ""
        options = [t for t, p in sorted(self.known.items()) if kind_of(t) == wanted and p != at_home]
        options.sort(key=lambda t: self.known[t] != self.here)  # what is at hand first
        if not options:
            return self._search(wanted)
        thing = options[0]
        place = self.known[thing]
        return self._reach(place, self._told(thing), f"take {thing} from {place}")

    def _told(self, thing: str) -> str:
        place = self.known[thing]
        told = thing in self.from_skill and place not in self.visited
        return f"a {thing} in {place}" + (", says skill" if told else "")

    def _search(self, wanted: str) -> tuple[str, str] | None:
        thought = f"a {wanted} not seen"
        if self.here in self.closed and self.here not in self.visited:
            return thought, f"open {self.here}"
        place = next((p for p in self.places if p not in self.visited), None)
        return None if place is None else (thought, f"go to {place}")

    def _go(self, place: str, thought: str, then: str) -> tuple[str, str]:
        return (thought, then) if self.here == place else (thought, f"go to {place}")

    def _reach(self, place: str, thought: str, then: str) -> tuple[str, str]:
        if self.here == place and place in self.closed:
            return thought, f"open {place}"
        return self._go(place, thought, then)
