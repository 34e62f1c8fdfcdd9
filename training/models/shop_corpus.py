"""What the tiny policy of WebShop imitates: a customer of a made-up shop who is often hasty, shopping with a skill, and
skills written from finished visits.

A hasty customer leaves the options out of the search, or buys before all of them are chosen: what reinforcement is
to mend. The shop has a seed of its own, and brands are drawn anew for every example.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from diagnostics.records import Message, Trajectory, Turn
from training.envs.base import Task
from training.envs.rooms import keyed_generator
from training.envs.webshop.catalogue import codes
from training.envs.webshop.env import WebShopEnv
from training.envs.webshop.folders import generated_shop
from training.envs.webshop.pages import SEPARATOR
from training.envs.webshop.shop import load_tasks
from training.models.corpus import Example, acting
from training.models.shopper import Request
from training.models.tiny import Lessons, Recipe, Report
from training.skills.hindsight import hindsight_messages

HASTE = 0.37  # chance that a search leaves the options out, or that an option is not chosen
PRODUCTS = 1  # on a page of results
OPENED = 2  # products that are looked at
MAX_TURNS = 12
_ASIN = re.compile(r"\bB0([0-9A-Z]{8})\b", re.IGNORECASE)
_NUMBER = re.compile(r"Take number (\d)\.")


class Customer:
    """One visit's player. It takes the products in the order in which the search found them.

    Args: first, number of the product that is opened first.
    """

    def __init__(self, sentence: str, rng: np.random.Generator, haste: float, first: int = 1) -> None:
        request = Request.parse(sentence)
        self.query, self.options = request.query, request.options
        self.product = request.query.removesuffix(", ".join(["", *self.options.values()]))
        self.rng, self.haste, self.next = rng, haste, first
        self.last = max(first, OPENED)
        self.chosen: list[str] = []

    def act(self, observation: str) -> tuple[str, str]:
        """(thought, command) on a page."""
        pieces = observation.split(SEPARATOR)
        hasty = self.rng.random() < self.haste
        if pieces == ["Search"]:
            what, query = ("the product", self.product) if hasty else ("all words", self.query)
            return what, f"search[{query}]"
        if pieces[1].startswith("Page "):
            found = [piece for piece in pieces if _ASIN.fullmatch(piece)]
            if not pieces[1].startswith(f"Page {self.next} ") and "Next >" in pieces:
                return f"number {self.next}", "click[next >]"
            self.next += 1
            return pieces[pieces.index(found[0]) + 1].split()[0], f"click[{found[0]}]"
        missing = [value for value in self.options.values() if value not in pieces]
        if missing and not hasty and self.next <= self.last:
            self.chosen = []
            return f"no {missing[0]} here", "click[< prev]"
        left = {name: value for name, value in self.options.items() if value in pieces and value not in self.chosen}
        if not left or hasty:
            return "buy it", "click[buy now]"
        name, value = next(iter(left.items()))
        self.chosen.append(value)
        return f"{name} {value}", f"click[{value}]"


def skill_text(trajectory: Trajectory) -> str:
    """What a visit teaches: the search for all that was asked, which product to take, and what to choose on it."""
    request = Request.parse(trajectory.description)
    actions = [turn.action for turn in trajectory.turns]
    full = f"search[{request.query}]" in actions
    all_chosen = all(f"click[{value}]" in actions for value in request.options.values())
    opened = sum(_ASIN.search(action) is not None for action in actions)
    number = opened + (full and all_chosen and not trajectory.success)  # what was not at fault is taken again
    chosen = f" Choose {', '.join(request.options.values())}." if request.options else ""
    return f"Search all words. Take number {max(number, 1)}.{chosen}"


def play(env: WebShopEnv, task: Task, rng: np.random.Generator, skill: str = "", haste: float = HASTE) -> Trajectory:
    """One visit. Args: haste, chance at every turn that the customer is hasty."""
    first = _NUMBER.search(skill)
    customer = Customer(task.description, rng, haste, int(first[1]) if first else 1)
    step, turns = env.reset(task), []
    while not step.done:
        thought, action = customer.act(step.observation)
        reply = f"<think> {thought}</think><action>{action}</action>"
        turns.append(Turn(step.observation, step.admissible, reply, action.lower(), True))
        step = env.step(action)
    return Trajectory(
        id=task.id, task_id=task.id, task_type=task.task_type, env=task.env, split=task.split,
        description=task.description, group=0, attempt=0, seed=0, step=0, turns=tuple(turns), segments=(),
        reward=step.reward, success=step.won, stop_reason="won" if step.won else "done",
        first_observation_sha256="", skill=skill or None, score=step.score, outcome=step.outcome,
    )  # fmt: skip


def writing(trajectory: Trajectory) -> Example:
    """A finished visit and the skill to write from it."""
    answer = Message("assistant", f"<skill> {skill_text(trajectory)}</skill>")
    return Example("write", (*hindsight_messages(trajectory), answer), (True,))


def examples_of(env: WebShopEnv, task: Task, seed: int, plays: int) -> list[Example]:
    """All examples of one goal: each visit, the skill it teaches, and a careful visit with that skill."""
    rng = keyed_generator("shop corpus", seed, task.id)
    out: list[Example] = []
    for _ in range(plays):
        attempt = play(env, task, rng)
        again = play(env, task, rng, skill_text(attempt), haste=0.0)
        out += [_acting(attempt), writing(attempt), _acting(again)]
    return out


def make_corpus(recipe: Recipe, work: Path, report: Report) -> list[Example]:
    """Examples of the first train goals of a shop of its own. The shop lies in the cache, not in `work`."""
    env = WebShopEnv(MAX_TURNS, PRODUCTS)
    tasks = load_tasks(generated_shop(seed=recipe.games_seed), "train")[: recipe.games]
    out: list[Example] = []
    for done, task in enumerate(tasks, start=1):
        out += examples_of(env, task, recipe.seed, recipe.plays)
        report("expert play", done, len(tasks), float("nan"))
    return out


def _acting(trajectory: Trajectory) -> Example:
    return acting(trajectory, [True] * len(trajectory.turns))


def renamed(messages: Sequence[Message], rng: np.random.Generator, every: bool) -> tuple[Message, ...]:
    """The chat with the brands permuted, in titles and in ids: what is clicked is copied, never known."""
    brands, _ = codes()
    swap: dict[str, str] = {}
    for old, new in zip(brands, rng.permutation(list(brands)).tolist(), strict=True):
        begins = [f"B0{brands[brand]}" for brand in (old, new)]
        swap |= {old: new, begins[0]: begins[1], begins[0].lower(): begins[1].lower()}
    names = re.compile("|".join(swap))
    return tuple(Message(m.role, names.sub(lambda match: swap[match[0]], m.content)) for m in messages)


LESSONS = Lessons(
    corpus=make_corpus,
    renamed=renamed,
    words=lambda: ["system", "user", "assistant", "Skill", "Task", "Outcome", "success", "failure", *codes()[0]],
    whole=lambda: [SEPARATOR.rstrip(), "search[", "click[", "B0", *codes()[0].values(), *codes()[1].values()],
)
