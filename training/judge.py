"""Which commands of an episode an expert accepts: the searching expert, replaying what the player saw.

The expert knows what the observations told the player and nothing else: no skill, and not where things are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from diagnostics.records import Trajectory
from training.models.expert import Expert, Goal, kind_of

ENVS = ("household", "alfworld")
_NAME = re.compile(r"[a-z]+ \d+")


def judged(trajectories: Sequence[Trajectory]) -> dict[str, tuple[bool | None, ...]]:
    """Trajectory id -> the expert's verdict on each turn.

    Left out are episodes of other environments, and those whose task sentence is none of ALFWorld's templates.
    """
    return {t.id: verdicts(t) for t in trajectories if t.env in ENVS and _understood(t.description)}


def verdicts(trajectory: Trajectory) -> tuple[bool | None, ...]:
    """Whether the expert accepts the command of each turn, see `accepts`.

    Each verdict is on the state that the player itself has led to: a poor command counts once, not in what follows.
    Source: ours. Returns: one a turn; None where the expert would give up.
    Raises: ValueError on a task sentence that is none of ALFWorld's templates.
    """
    if not trajectory.turns:
        return ()
    # the draws decide between equals, all of which are accepted
    expert = Expert(Goal.parse(trajectory.description), np.random.default_rng(0))
    expert.begin(trajectory.turns[0].observation)
    found: list[bool | None] = []
    following = [*(turn.observation for turn in trajectory.turns[1:]), None]
    for turn, observation in zip(trajectory.turns, following, strict=True):
        found.append(accepts(expert, turn.action))
        if observation is not None:
            n_placed = len(expert.placed)
            expert.observe(turn.action, observation)
            if len(expert.placed) > n_placed:  # what is still to be placed belongs there too
                expert.home = turn.action.partition(" to ")[2]
    return tuple(found)


def accepts(expert: Expert, command: str) -> bool | None:
    """Whether the expert would give this command now, or one that it holds as equally good.

    Equal are: any place not searched yet while the thing in question is unseen (a closed one in front of it is opened
    first), any of the wanted things that were seen, any target and any tool of the right kind. Not accepted: to go
    where nothing new is to be seen, to look around, to take another thing, to leave the plan fetch - treat - place.
    Source: ours. Returns: None when every place has been searched, where the expert has no answer.
    """
    if expert.act() is None:
        return None
    moves = (equal.act() for equal in _equals(expert, command))
    return any(move is not None and move[1] == command for move in moves)


def _understood(description: str) -> bool:
    try:
        Goal.parse(description)
    except ValueError:
        return False
    return True


def _equals(expert: Expert, command: str) -> Iterator[Expert]:
    """The expert, and as it would be if its choices between equals fell on what the command names."""
    yield expert
    named = set(_NAME.findall(command))
    kinds = {kind_of(name) for name in named}
    places = [p for p in expert.places if p in named or kind_of(p) not in kinds]
    places.sort(key=lambda place: place not in named)
    chosen = {t: p for t, p in expert.known.items() if t in named or p in named}
    chosen_kinds = {kind_of(thing) for thing in chosen}
    others = {t: p for t, p in expert.known.items() if kind_of(t) not in chosen_kinds}
    homes = [expert.home]
    if not expert.placed:
        homes += [place for place in places if place in named and kind_of(place) == expert.goal.target]
    for home in homes:
        yield replace(expert, places=places, known=others | chosen, home=home)
