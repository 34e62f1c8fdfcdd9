"""What the tiny policy imitates: expert play without a skill, with a skill, and skills written from finished play.

An example is a chat whose assistant messages are scored or not: a reply that was put in to lead the expert off its
path is context, not a lesson.
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from diagnostics import render
from diagnostics.records import Message, Trajectory, Turn
from training.envs.base import Task
from training.envs.household import process_env
from training.envs.rooms import keyed_generator, rooms
from training.envs.sights import contents
from training.models.expert import Expert, Goal, kind_of
from training.skills.hindsight import hindsight_messages

MAX_TURNS = 30
SLIP = 0.1  # chance a turn that the expert is led astray by an unscored command
OVERLOOK = 0.9  # chance that a careless player does not see the wanted thing in a place
_FOUND = re.compile(r"\ba ([a-z]+ \d+) in ([a-z]+ \d+)")
_EMPTY = re.compile(r"No [a-z]+ in ([^.]*)\.")


@dataclass(frozen=True)
class Example:
    kind: str  # "act" | "act_with_skill" | "write"
    messages: tuple[Message, ...]
    scored: tuple[bool, ...]  # of each assistant message


def skill_text(goal: Goal, turns: Sequence[Turn], success: bool) -> str:
    """What an attempt teaches about its task: where things were and what to do, or where they were not."""
    found: dict[str, str] = {}  # wanted things, the latest find first -> the place where they were first seen
    empty: list[str] = []
    lamp = ""
    for turn in turns[1:]:
        for place, things in contents(turn.observation).items():
            wanted = [thing for thing in things if kind_of(thing) == goal.wanted]
            found = {thing: place for thing in wanted if thing not in found} | found
            if not wanted and place not in empty:
                empty.append(place)
            if goal.kind == "look" and (lamps := [thing for thing in things if kind_of(thing) == goal.target]):
                lamp = lamp or f"a {lamps[0]} in {place}"
    done = [turn.action for turn in turns if turn.valid]
    taken = [action.removeprefix("take ").partition(" from ") for action in done if action.startswith("take ")]
    used = {thing: found.get(thing, place) for thing, _, place in taken if kind_of(thing) == goal.wanted}
    where = [f"a {thing} in {place}" for thing, place in (used if success else used | found).items()]
    where = where[: 2 if goal.kind == "two" else 1]
    where += [lamp] if lamp else []
    if not where or (not success and not used and not found):
        searched = f"No {goal.wanted} in {', '.join(empty[:12])}. " if empty else ""
        return f"{searched}{' and '.join(where) + '. ' if where else ''}Search other places first."
    told = " and ".join(where)
    if not success:
        return f"{told}. Go there first."
    end = [action for action in done if action.startswith(("move ", "use "))][-1]
    treat = [action for action in done if goal.tool and action.startswith(f"{goal.kind} ")]
    return f"{told}. Take it, {', '.join([*treat[-1:], end])}."


def hints(skill: str) -> tuple[dict[str, str], frozenset[str]]:
    """What a skill says: thing -> place, and the places that are not worth a look."""
    avoid = {place.strip() for places in _EMPTY.findall(skill) for place in places.split(",")}
    return dict(_FOUND.findall(skill)), frozenset(avoid)


def play(
    env: Any, task: Task, rng: np.random.Generator, skill: str = "", *, slip: float = SLIP, overlook: float = 0.0
) -> tuple[Trajectory, tuple[bool, ...]]:
    """One expert episode and, for each turn, whether the reply is the expert's own.

    Args: overlook, chance that the things the task is about go unnoticed in an observation; a player of this kind
        goes round again when it has searched every place.
    """
    goal, step = Goal.parse(task.description), env.reset(task)
    known, avoid = hints(skill)
    expert = Expert(goal, rng, known=known, avoid=avoid, from_skill=frozenset(known))
    expert.begin(step.observation)
    turns: list[Turn] = []
    own: list[bool] = []
    while len(turns) < MAX_TURNS and not step.done:
        move = expert.act()
        if move is None and overlook:
            expert.visited.clear()
            move = expert.act()
        if move is None:
            break
        slips = rng.random() < slip
        thought, action = misstep(expert, step.admissible, turns[-1].action if turns else "", rng) if slips else move
        own.append(not slips)
        reply = f"<think>{thought}</think><action>{action}</action>"
        turns.append(Turn(step.observation, step.admissible, reply, action, action in step.admissible))
        step = env.step(action)
        blind = overlook > 0 and rng.random() < overlook
        expert.observe(action, overlooked(step.observation, goal) if blind else step.observation)
    trajectory = Trajectory(
        id=task.id, task_id=task.id, task_type=task.task_type, env=task.env, split=task.split,
        description=task.description, group=0, attempt=0, seed=0, step=0, turns=tuple(turns), segments=(),
        reward=10.0 * step.won, success=step.won, stop_reason="won" if step.won else "turn_limit",
        first_observation_sha256="", skill=skill or None,
    )  # fmt: skip
    return trajectory, tuple(own)


def overlooked(observation: str, goal: Goal) -> str:
    """The observation without the things that the task is about."""
    names = f"{goal.wanted}|{goal.target}" if goal.kind == "look" else goal.wanted
    return re.sub(rf"\b({names}) \d+", "thing 0", observation)


def misstep(expert: Expert, admissible: Sequence[str], last: str, rng: np.random.Generator) -> tuple[str, str]:
    """(thought, command) as a poor player would give it: take what is not there, treat or place what is not held, go
    where nothing is, say the same again, or do just anything. What follows shows how to recover."""
    goal, number = expert.goal, int(rng.integers(1, 4))
    thing = f"{goal.wanted} {number}"
    place = expert.here or expert.places[0]
    beyond = max((int(p.rsplit(" ", 1)[1]) for p in expert.places if kind_of(p) == kind_of(place)), default=1) + number
    searching = f"a {goal.wanted} not seen"
    options = [
        (f"a {thing} in {place}", f"take {thing} from {place}"),
        (f"a {thing} in {place}", f"take {thing} from {place}"),
        (searching, f"go to {kind_of(place)} {beyond}"),
        (searching, last or f"go to {place}"),
        (searching, str(rng.choice([c for c in admissible if not c.startswith(("help", "look", "inv"))]))),
    ]
    if goal.kind == "look":
        options.append((f"a {goal.target} 1 in {place}", f"use {goal.target} 1"))
    elif goal.tool is not None:
        options.append((f"a {thing} to {goal.kind}", f"{goal.kind} {thing} with {goal.tool} 1"))
    else:
        options.append((f"a {thing} to {goal.target}", f"move {thing} to {expert.home}"))
    return options[int(rng.integers(len(options)))]


def truncated(trajectory: Trajectory, turns: int) -> Trajectory:
    """The attempt as if it had run out of turns."""
    return replace(trajectory, turns=trajectory.turns[:turns], success=False, reward=0.0, stop_reason="turn_limit")


def acting(trajectory: Trajectory, own: Sequence[bool]) -> Example:
    """Play as a chat; a skill stands in the first message."""
    first = trajectory.turns[0]
    messages = list(render.task_messages(trajectory.description, first.observation, None, trajectory.skill))
    for k, turn in enumerate(trajectory.turns):
        messages += [render.observation_message(turn.observation, None)] if k else []
        messages.append(Message("assistant", turn.response))
    return Example("act_with_skill" if trajectory.skill else "act", tuple(messages), tuple(own))


def writing(trajectory: Trajectory) -> Example:
    """A finished attempt and the skill to write from it."""
    text = skill_text(Goal.parse(trajectory.description), trajectory.turns, trajectory.success)
    return Example("write", (*hindsight_messages(trajectory), Message("assistant", f"<skill>{text}</skill>")), (True,))


def examples_of(env: Any, task: Task, seed: int, plays: int = 3) -> list[Example]:
    """All examples of one game. Each play is followed by one that has a skill: in turn of that play, and of a careless
    player's attempt, which fails as a half-taught policy does."""
    rng = keyed_generator("corpus", seed, task.id)
    goal, out = Goal.parse(task.description), []
    for k in range(plays):
        attempt, own = play(env, task, rng, slip=SLIP if k else 0.0)
        if not attempt.success:
            continue
        out.append(acting(attempt, own))
        source = attempt
        if k % 2:
            careless, _ = play(env, task, rng, slip=3 * SLIP, overlook=OVERLOOK)
            whole = k % 4 == 1 and not careless.success
            source = truncated(careless, len(careless.turns) if whole else int(rng.integers(2, len(careless.turns))))
        out.append(writing(source))
        again, own = play(env, task, rng, skill_text(goal, source.turns, source.success))
        out += [acting(again, own)] if again.success else []
    return out


def _examples(job: tuple[Task, int, int]) -> list[Example]:
    return examples_of(process_env(), *job)


def make_corpus(
    folders: Sequence[Path],
    *,
    seed: int,
    plays: int = 3,
    workers: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> list[Example]:
    """Examples of the train games of all folders, in the order of the games; the same at any number of workers."""
    from training.envs.games import load_tasks

    jobs = [(task, seed, plays) for folder in folders for task in load_tasks(folder, "train")]
    out: list[Example] = []
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for done, examples in enumerate(pool.imap(_examples, jobs, chunksize=8), start=1):
            out += examples
            if progress is not None:
                progress(done, len(jobs))
    return out


@lru_cache(maxsize=1)
def _vocabulary() -> tuple[tuple[str, ...], tuple[str, ...]]:
    table = rooms()
    tools = {"fridge", "microwave", "sinkbasin"}
    things = tuple(sorted(name.lower() for name in table["pickupable"]))
    return things, tuple(sorted(name.lower() for name in table["holds"] if name.lower() not in tools))


def renamed(messages: Sequence[Message], rng: np.random.Generator, places: bool) -> tuple[Message, ...]:
    """The chat with object names permuted among themselves (and, if asked, receptacle names): what is copied from
    the context stays right, what is guessed from a name does not. Tools and lamps keep their names."""
    things, receptacles = _vocabulary()
    swap = dict(zip(things, rng.permutation(things).tolist(), strict=True))
    if places:
        swap |= dict(zip(receptacles, rng.permutation(receptacles).tolist(), strict=True))
    pattern = _words()
    return tuple(Message(m.role, pattern.sub(lambda match: swap.get(match[0], match[0]), m.content)) for m in messages)


@lru_cache(maxsize=1)
def _words() -> re.Pattern[str]:
    return re.compile(r"\b(" + "|".join(name for names in _vocabulary() for name in names) + r")\b")


def texts(examples: Sequence[Example]) -> Iterator[str]:
    """Every message of every example, for the tokenizer."""
    return (message.content for example in examples for message in example.messages)
