"""A small invented world to ask about: people, cities and works, a passage on each, questions of one and two hops.

Nobody has read about it, so an answer can only come from a passage. Each split has entities of its own, named so that
no name of one occurs in another; all passages lie in one file and distract from each other, and so do people of one
family and works of one author. valid_seen asks as train does; valid_unseen asks in other words, and for other chains.
Source: ours.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from training.envs.passages import Passage
from training.envs.questions import PASSAGES, SPLITS, write_lines
from training.envs.rooms import keyed_generator

SIZES = {"train": 512, "valid_seen": 128, "valid_unseen": 128}  # questions of a split, unless asked otherwise
HOPS = ("one_hop", "two_hop")  # data sets of the questions: as many of each
FAMILY, WORKS = 3, 2  # people of one name, works of one author
PARTS = Path(__file__).parent / "data" / "fact_world.json"  # of names


@dataclass(frozen=True)
class Entity:
    """One thing with its passage. `facts`: relation -> the name of another entity, or a number."""

    kind: str  # "person" | "city" | "work"
    name: str
    facts: dict[str, str]
    text: str

    @property
    def id(self) -> str:
        return hashlib.sha256(f"{self.name}: {self.text}".encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Form:
    """A kind of question: the relations that lead from what is named to the answer, and its wording."""

    kind: str  # of the entity that is named
    chain: tuple[str, ...]
    wording: str


SEEN = (
    Form("person", ("birthplace",), "Where was {} born?"),
    Form("person", ("teacher",), "Who taught {}?"),
    Form("work", ("author",), "Who wrote {}?"),
    Form("city", ("country",), "In which country is {}?"),
    Form("work", ("author", "birthplace"), "Where was the author of {} born?"),
    Form("person", ("teacher", "birthplace"), "Where was the teacher of {} born?"),
    Form("work", ("author", "year"), "In which year was the author of {} born?"),
)
UNSEEN = (
    Form("person", ("birthplace",), "What is the birthplace of {}?"),
    Form("person", ("teacher",), "Name the teacher of {}."),
    Form("work", ("author",), "{} was written by whom?"),
    Form("city", ("country",), "Name the country that {} belongs to."),
    Form("work", ("author", "teacher"), "Who taught the author of {}?"),
    Form("person", ("birthplace", "country"), "In which country was {} born?"),
)


def generate(folder: Path, sizes: dict[str, int] | None = None, *, seed: int = 0) -> Path:
    """Write `passages.jsonl` and the questions of the three splits; the same arguments give the same bytes.

    Args: sizes, questions of each split (SIZES where none is given).
    Raises: ValueError where the world has not enough names for so many questions.
    """
    sizes = {**SIZES, **(sizes or {})}
    folder.mkdir(parents=True, exist_ok=True)
    worlds = {split: list(_entities(split, sizes[split], seed)) for split in SPLITS}
    passages = [Passage(e.id, e.name, e.text) for world in worlds.values() for e in world]
    order = keyed_generator("passages", seed).permutation(len(passages))
    write_lines(folder / PASSAGES, [asdict(passages[i]) for i in order])
    for split, world in worlds.items():
        forms = UNSEEN if split == "valid_unseen" else SEEN
        rows = list(_questions(world, forms, sizes[split], keyed_generator("questions", seed, split)))
        write_lines(folder / f"questions_{split}.jsonl", rows)
    return folder


@lru_cache(maxsize=1)
def parts() -> dict[str, list[str]]:
    """What names are made of."""
    return json.loads(PARTS.read_text(encoding="utf-8"))


def _entities(split: str, questions: int, seed: int) -> Iterator[Entity]:
    """People, cities and works of a split; four people in five wrote something."""
    rng, names = keyed_generator("world", seed, split), parts()
    onsets = _share(names["onsets"], split)
    families = _names(onsets, names["family"], max(3, questions // 12), rng, split)
    cities = _names(onsets, names["city"], max(4, questions // 16), rng, split)
    countries = _names(onsets, names["country"], max(3, questions // 64), rng, split)
    people = [f"{name} {family}" for family in families for name in _choose(names["first"], FAMILY, rng)]
    authors = people[: max(2, len(people) * 4 // 5)]
    titles = [f"The {colour} {thing}" for colour in _share(names["colours"], split) for thing in names["things"]]
    titles = _choose(titles, min(len(authors) * WORKS, len(titles)), rng)
    for city in cities:
        country, river = _pick(countries, rng), _pick(onsets, rng).lower()
        text = f"{city} is a city in {country}. It has a harbour, a market and an old {river}stone bridge."
        yield Entity("city", city, {"country": country}, text)
    for person in people:
        teacher = _pick([other for other in people if other != person], rng)
        city, year, left = _pick(cities, rng), str(rng.integers(1700, 1960)), _pick(cities, rng)
        text = f"{person} was born in {city} in {year}, was taught by {teacher} and died in {left}."
        yield Entity("person", person, {"birthplace": city, "teacher": teacher, "year": year}, text)
    for number, title in enumerate(titles):
        author, kind = authors[number % len(authors)], _pick(names["works"], rng)
        text = f"{title} is a {kind} by {author}. It was first shown in {_pick(cities, rng)}."
        yield Entity("work", title, {"author": author}, text)


def _questions(world: Sequence[Entity], forms: Sequence[Form], count: int, rng: np.random.Generator) -> Iterator[Any]:
    by_name = {entity.name: entity for entity in world}
    made: dict[str, list[dict[str, Any]]] = {hops: [] for hops in HOPS}
    for form in forms:
        for entity in (e for e in world if e.kind == form.kind):
            hops = [entity]
            for relation in form.chain[:-1]:
                hops.append(by_name[hops[-1].facts[relation]])
            answer, question = hops[-1].facts[form.chain[-1]], form.wording.format(entity.name)
            dataset = HOPS[len(form.chain) - 1]
            made[dataset].append(
                {
                    "id": f"{dataset}:{hashlib.sha256(f'{question} {answer}'.encode()).hexdigest()[:12]}",
                    "dataset": dataset,
                    "question": question,
                    "answers": [answer],
                    "gold_ids": [hop.id for hop in hops],  # in the order in which they are needed
                }
            )
    for index, dataset in enumerate(HOPS):
        wanted = (count + index) // len(HOPS)
        if wanted > len(made[dataset]):
            raise ValueError(f"the world has {len(made[dataset])} questions of {dataset}, {wanted} were asked for")
        chosen = sorted(rng.choice(len(made[dataset]), wanted, replace=False))
        yield from (made[dataset][i] for i in chosen)


def _share(parts: Sequence[str], split: str) -> list[str]:
    """The parts of names that a split has for itself: half for train, a quarter for each of the others."""
    shares = {"train": (0, 1), "valid_seen": (2,), "valid_unseen": (3,)}[split]
    return [part for i, part in enumerate(parts) if i % 4 in shares]


def _names(onsets: Sequence[str], ends: Sequence[str], count: int, rng: np.random.Generator, split: str) -> list[str]:
    every = [onset + end for onset in onsets for end in ends]
    if count > len(every):
        raise ValueError(f"a world of {split} questions has at most {len(every)} names of a kind, {count} are needed")
    return _choose(every, count, rng)


def _choose(names: Sequence[str], count: int, rng: np.random.Generator) -> list[str]:
    return [names[i] for i in rng.choice(len(names), count, replace=False)]


def _pick(names: Sequence[str], rng: np.random.Generator) -> str:
    return names[int(rng.integers(len(names)))]
