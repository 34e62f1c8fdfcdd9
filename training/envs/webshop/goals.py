"""Goals: what a customer asks for, made from products by WebShop's rules, in one order for all workers and runs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product as combinations
from typing import Any

from training.envs.rooms import keyed_generator
from training.envs.webshop.products import Product
from training.skills.library import load_library
from training.skills.schema import Library

SHUFFLE = 233  # the original's own seed: goal n of the original files is its `fixed_n`
# Goal numbers of a split: from, to. SDAR names 1000 training and 128 validation tasks and not which; these are ours.
SPLITS: dict[str, tuple[int, int | None]] = {
    "test": (0, 500),
    "eval": (500, 1500),
    "train": (1500, None),
    "sdar_valid": (0, 128),
    "sdar_train": (1500, 2500),
}
NO_LIMIT = 1e6  # dollars
_LIMITS = [10.0 * i for i in range(1, 100)]


@dataclass(frozen=True)
class Goal:
    """One request. `number` is its id: the place in the one shuffle of all goals."""

    asin: str  # of the product it was made from
    product: int  # that product's row
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]  # values
    limit: float  # dollars
    family: str  # kind of task
    number: int = -1


def synthetic_goals(product: Product, row: int, entry: Mapping[str, Any]) -> Iterator[Goal]:
    """The goals of a product with a made instruction: one for every combination of its options.

    Source: WebShop. A product without an instruction or without attributes in it has none.
    """
    instruction, attributes = entry.get("instruction"), tuple(entry.get("instruction_attributes") or ())
    if not instruction or not attributes:
        return
    limit, kind = price_limit(product, instruction), family(instruction)
    names = sorted(product.options)
    for values in combinations(*(product.options[name] for name in names)):
        asked = ", and ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
        text = f"{instruction} with {asked}" if asked else instruction
        yield Goal(product.asin, row, text + _limit_text(limit), attributes, values, limit, kind)


def human_goals(product: Product, row: int, entries: Sequence[Mapping[str, Any]]) -> Iterator[Goal]:
    """The goals of a product with instructions that people wrote. Source: WebShop. Those without attributes go."""
    for entry in entries:
        attributes = tuple(entry["instruction_attributes"])
        if attributes:
            text = entry["instruction"].strip(".")
            limit = price_limit(product, text)
            options = tuple(str(option) for option in entry["instruction_options"])
            yield Goal(product.asin, row, text + _limit_text(limit), attributes, options, limit, family(text))


def family(instruction: str) -> str:
    """The kind of a task, by the keywords that lead it to its skills in our library. Source: SkillRL (words ours)."""
    return _library().section_of_sentence(instruction) or "other"


@lru_cache(maxsize=1)
def _library() -> Library:
    return load_library("webshop")


def price_limit(product: Product, instruction: str) -> float:
    """The larger of two draws, without replacement, from the first four multiples of 10 dollars above the price.

    Source: WebShop. Departures: the draw depends on product and instruction only; the original's on the process.
    """
    above = [limit for limit in _LIMITS if limit > product.price][:4]
    if len(above) < 2:
        return NO_LIMIT
    rng = keyed_generator("limit", product.asin, instruction)
    return max(above[i] for i in rng.choice(len(above), 2, replace=False))


def shuffled(goals: Sequence[Goal]) -> list[Goal]:
    """All goals in the order of their numbers.

    Source: WebShop's one shuffle of the goals in the order of the product file. In some forks each worker shuffles
    with a seed of its own, so that test goals are training goals elsewhere (case B46); here nothing else enters.
    """
    order = list(range(len(goals)))
    random.Random(SHUFFLE).shuffle(order)
    return [replace(goals[place], number=number) for number, place in enumerate(order)]


def _limit_text(limit: float) -> str:
    return "" if limit == NO_LIMIT else f", and price lower than {limit:.2f} dollars"
