"""What the tiny policy of Search-QA imitates: a player of the invented world that is often hasty, play with a skill,
and skills written from finished play.

The hasty player is a lesson too: a policy that was taught nothing else would leave reinforcement nothing to improve.
Worlds have seeds of their own, and names are permuted over all that can be made, so that what is learnt is to copy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np

from diagnostics import render
from diagnostics.records import Message, Trajectory, Turn
from training.envs.base import Task
from training.envs.fact_world import parts
from training.envs.questions import PASSAGES, load_questions
from training.envs.rooms import keyed_generator
from training.envs.search_folders import fact_world_folder
from training.envs.search_qa import SearchQAEnv
from training.models.corpus import Example, acting
from training.models.search_expert import READ, Move, expert_move, read_chain
from training.models.tiny import Lessons, Recipe, Report
from training.skills.hindsight import hindsight_messages

HASTE = 0.45  # chance that a fact is read wrong, or taken for the answer before the chain is at its end
WORLD = 512  # questions of one world, as many as a run trains on
MAX_TURNS = 4
YEARS = range(1700, 1960)
_DIED = re.compile(r"died in (\w+)")
_TOLD = re.compile(r"The (\w+) of (.+?) is ([^.]+)\.")
_NAME = re.compile(r"\w+")


def skill_text(question: str, turns: Sequence[Turn]) -> str:
    """What an attempt teaches about its question: the facts it came by, and what to do with them."""
    found, missing = read_chain(question, [turn.observation for turn in turns[1:]])
    told = [f"The {relation} of {name} is {fact}." for relation, name, fact in found]
    return " ".join([*told, f"Answer {found[-1][2]}." if missing is None else f"Search {missing[1]}."])


def facts(skill: str) -> dict[tuple[str, str], str]:
    """What a skill says: (relation, name) -> fact."""
    return {(relation, name): fact for relation, name, fact in _TOLD.findall(skill)}


def hasty_move(question: str, observations: Sequence[str], rng: np.random.Generator) -> Move | None:
    """A wrong answer as a hasty reader gives it: the first link of a chain, or a fact that a passage tells of something
    else; None where there is nothing to be mistaken about."""
    found, missing = read_chain(question, observations)
    if not found:
        return None
    relation, name, fact = found[-1]
    seen = "\n".join(observations)
    wrong = {match for match in READ[relation].findall(f"{seen} ")} | set(
        _DIED.findall(seen) if relation == "birthplace" else ()
    )
    options = sorted(wrong - {fact})
    early = missing is not None
    if not early and not options:
        return None
    if options and not (early and rng.random() < 0.5):
        fact = options[int(rng.integers(len(options)))]
    return Move(f"The {relation} of {name} is {fact}.", f"<answer>{fact}</answer>")


def play(env: SearchQAEnv, task: Task, rng: np.random.Generator, skill: str = "", haste: float = HASTE) -> Trajectory:
    """One episode. Args: haste, chance at every turn that the player is hasty."""
    known, step = facts(skill), env.reset(task)
    turns: list[Turn] = []
    while not step.done:
        observations = [turn.observation for turn in turns[1:]] + ([step.observation] if turns else [])
        move = expert_move(task.description, observations, known)
        if rng.random() < haste:
            move = hasty_move(task.description, observations, rng) or move
        reply = spaced(move)
        action = render.parse_reply(reply)[1] or ""
        turns.append(Turn(step.observation, step.admissible, reply, action, True))
        step = env.step(action)
    return Trajectory(
        id=task.id, task_id=task.id, task_type=task.task_type, env=task.env, split=task.split,
        description=task.description, group=0, attempt=0, seed=0, step=0, turns=tuple(turns), segments=(),
        reward=step.reward, success=step.won, stop_reason="won" if step.won else "done",
        first_observation_sha256="", skill=skill or None, score=step.score, outcome=step.outcome,
    )  # fmt: skip


def spaced(move: Move) -> str:
    """The reply with a space in front of every word, so that a word is the same token wherever it stands."""
    action = move.action.replace(">", "> ", 1)
    return f"<think> {move.thought}</think>{action}"


def writing(trajectory: Trajectory) -> Example:
    """A finished attempt and the skill to write from it."""
    text = skill_text(trajectory.description, trajectory.turns)
    return Example("write", (*hindsight_messages(trajectory), Message("assistant", f"<skill> {text}</skill>")), (True,))


def examples_of(env: SearchQAEnv, task: Task, seed: int, plays: int) -> list[Example]:
    """All examples of one question: each play, the skill it teaches, and a careful play with that skill."""
    rng = keyed_generator("search corpus", seed, task.id)
    out: list[Example] = []
    for _ in range(plays):
        attempt = play(env, task, rng)
        again = play(env, task, rng, skill_text(task.description, attempt.turns), haste=0.0)
        out += [_acting(attempt), writing(attempt), _acting(again)]
    return out


def make_corpus(recipe: Recipe, work: Path, report: Report) -> list[Example]:
    """Examples of the train questions of as many worlds as it takes. The folders lie in the cache, not in `work`."""
    out: list[Example] = []
    for done, (env, task) in enumerate(islice(_questions(recipe), recipe.games), start=1):
        out += examples_of(env, task, recipe.seed, recipe.plays)
        report("expert play", done, recipe.games, float("nan"))
    return out


def _questions(recipe: Recipe) -> Iterator[tuple[SearchQAEnv, Task]]:
    for seed in range(recipe.games_seed, recipe.games_seed + 1 + recipe.games // WORLD):
        folder = fact_world_folder(sizes={"train": WORLD}, seed=seed)
        env = SearchQAEnv(str(folder / PASSAGES), max_turns=MAX_TURNS)
        yield from ((env, task) for task in load_questions(folder, "train"))


def _acting(trajectory: Trajectory) -> Example:
    return acting(trajectory, [True] * len(trajectory.turns))


@lru_cache(maxsize=1)
def names() -> tuple[tuple[str, ...], ...]:
    """All names of each kind that a world can have, parts of a title apart, and all years."""
    table = parts()

    def made(ends: str) -> tuple[str, ...]:
        return tuple(onset + end for onset in table["onsets"] for end in table[ends])

    kinds = [tuple(table[kind]) for kind in ("first", "colours", "things")]
    return (*kinds, made("family"), made("city"), made("country"), tuple(map(str, YEARS)))


def renamed(messages: Sequence[Message], rng: np.random.Generator, every: bool) -> tuple[Message, ...]:
    """The chat with the names of each kind permuted among themselves, years as well: what is copied stays right."""
    swap: dict[str, str] = {}
    for kind in names():
        swap |= dict(zip(kind, rng.permutation(kind).tolist(), strict=True))
    return tuple(Message(m.role, _NAME.sub(lambda match: swap.get(match[0], match[0]), m.content)) for m in messages)


def pieces() -> list[str]:
    """What names and years are made of: few enough that each is met often, so that copying one is soon learnt."""
    table = parts()
    begins = [f" {part}" for kind in ("first", "colours", "things", "onsets") for part in table[kind]]
    ends = [part for kind in ("family", "city", "country") for part in table[kind]]
    return [*begins, *ends, *(f"{number:02d}" for number in range(100)), " Search"]  # or " Sea" would be its beginning


LESSONS = Lessons(
    corpus=make_corpus,
    renamed=renamed,
    words=lambda: ["system", "user", "assistant", "Skill", "Task", "Outcome", "success", "failure"],
    whole=lambda: [
        *(f"<{end}{tag}>" for tag in ("search", "answer", "information") for end in ("", "/")),
        *pieces(),
    ],
)
