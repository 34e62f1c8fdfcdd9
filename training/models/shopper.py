"""An expert that SHOPS from texts alone: it searches for what is asked, compares, chooses and buys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from diagnostics.records import Trajectory
from training.envs.webshop.pages import BACK, BUY, PARTS, PREVIOUS, SEARCH, SEPARATOR

_LIMIT = re.compile(r",? and price lower than ([\d.]+) dollars")
_ASKED = re.compile(r"(?:with |, and )([a-z ]+): (.+?)(?=, and [a-z ]+: |$)")  # "with color: navy, and size: large"
_OPENING = re.compile(r"^(?:find me|i (?:want|need|am looking for|would like)|show me)\s+", re.IGNORECASE)
_WORD = re.compile(r"[a-z0-9.]+")
_ASIN = re.compile(r"B[0-9A-Z]{9}")
_DOLLARS = re.compile(r"\$([\d.]+)")
_SMALL = frozenset(("a", "an", "and", "for", "in", "is", "it", "of", "or", "s", "that", "the", "to", "with"))
_TO_LOOK = 7  # turns that are enough to open a product, read it, go back, and buy another one
_OPTION = 10  # an option that is not there counts as so many words
_BUTTONS = {name.lower() for name in (BACK, PREVIOUS, BUY, *PARTS)}


@dataclass(frozen=True)
class Request:
    """What a task sentence asks for, as far as its words tell."""

    text: str  # without the price
    query: str
    limit: float
    words: frozenset[str]  # of the product itself
    options: dict[str, str]  # name -> value, where the sentence names options

    @classmethod
    def parse(cls, sentence: str) -> Request:
        found = _LIMIT.search(sentence)
        text = _LIMIT.sub("", sentence).strip().lower()
        options = {name.strip(): value.strip() for name, value in _ASKED.findall(text)}
        product = _OPENING.sub("", text)
        for name in options:  # the first of them ends what is said of the product
            product = product.split(f" with {name}: ")[0]
        query = ", ".join([product, *options.values()])
        words = frozenset(_WORD.findall(product)) - _SMALL
        return cls(text, query, float(found[1]) if found else float("inf"), words, options)


@dataclass
class Shopper:
    """One episode's player; it reads the sentence, the pages and the commands, and nothing else.

    A product suits when the page has every option that the sentence names, and title and features have its words.
    Args: turns, actions of the episode; it buys the best that it has seen while there are enough of them left.
    """

    request: Request
    turns: int = 15
    seen: dict[str, int] = field(default_factory=dict)  # asin -> words and options that its page lacks
    at: str = ""  # asin of the open product
    title: str = ""
    read: set[str] = field(default_factory=set)  # asins whose features were read
    chosen: set[str] = field(default_factory=set)
    decided: bool = False

    def act(self, observation: str, admissible: Sequence[str]) -> tuple[str, str]:
        """(thought, command) on a page."""
        self.turns -= 1
        if SEARCH in admissible:
            return "search for what is asked", f"search[{self.request.query}]"
        pieces = observation.split(SEPARATOR)
        if any(piece.startswith("Price: ") for piece in pieces):
            return self._product(pieces, admissible)
        if any(piece.startswith("Page ") for piece in pieces):
            return self._results(pieces)
        self.seen[self.at] = len(self._lacking(" ".join([self.title, *pieces])))
        return "back to the product", f"click[{PREVIOUS.lower()}]"

    def misstep(
        self, observation: str, admissible: Sequence[str], last: str, rng: np.random.Generator
    ) -> tuple[str, str]:
        """(thought, command) of a poor customer: click what is not on the page, say the same again, go back to the
        start, read a part that tells nothing, or choose another value than the one asked for. None ends the episode.

        Args: last, the command before; "" for the first.
        """
        self.turns -= 1
        pieces = observation.split(SEPARATOR)
        here, asked = set(pieces), list(self.request.options.values())
        missing = [value for value in asked if value not in here]
        options = [("it is here", f"click[{value}]") for value in missing[:1]]
        options += [("once more", last)] if last else []
        if any(piece.startswith("Price: ") for piece in pieces):
            values = self._values(pieces, admissible)
            options += [("what do others say", f"click[{PARTS[2].lower()}]")]
            options += [
                (f"{name}: {value}", f"click[{value}]")
                for name, found in values.items()
                for value in found
                if (wanted := self._wanted(name, found)) and wanted not in self.chosen and value != wanted
            ]
        else:
            options.append(("buy it now", f"click[{BUY.lower()}]"))
        if SEARCH not in admissible:
            options.append(("search again", f"click[{BACK.lower()}]"))
        return options[int(rng.integers(len(options)))]

    def _results(self, pieces: Sequence[str]) -> tuple[str, str]:
        offers = [
            (pieces[i], pieces[i + 1], pieces[i + 2]) for i in range(len(pieces) - 2) if _ASIN.fullmatch(pieces[i])
        ]
        fitting = [offer for offer in offers if self._affordable(offer[2])] or offers
        if not fitting:
            return "nothing found", f"click[{BACK.lower()}]"
        new = [offer for offer in fitting if offer[0] not in self.seen]
        if self.decided or not new or (self.seen and self.turns < _TO_LOOK):
            self.decided = True
            return self._open(min(self.seen, key=lambda asin: self.seen[asin]), "this one suits best")
        asin = min(new, key=lambda offer: len(self._lacking(offer[1])) + offers.index(offer))[0]
        return self._open(asin, "a title that suits")

    def _open(self, asin: str, thought: str) -> tuple[str, str]:
        self.at, self.chosen = asin, set()
        return f"{thought}: {asin}", f"click[{asin.lower()}]"

    def _product(self, pieces: Sequence[str], admissible: Sequence[str]) -> tuple[str, str]:
        values = self._values(pieces, admissible)
        if not self.decided:
            offered = {value for found in values.values() for value in found}
            missing = [value for value in self.request.options.values() if value not in offered]
            self.title = next(pieces[i] for i in range(len(pieces)) if pieces[i + 1].startswith("Price: "))
            lacking = self.seen.get(self.at, len(self._lacking(self.title)))
            self.seen[self.at] = max(lacking, _OPTION * len(missing))
            if missing:
                return f"no {missing[0]} here", f"click[{PREVIOUS.lower()}]"
            if self.seen[self.at] and self.at not in self.read:
                self.read.add(self.at)
                return "what else is it", f"click[{PARTS[1].lower()}]"
            if self.seen[self.at] and self.turns >= _TO_LOOK:
                return "it lacks something", f"click[{PREVIOUS.lower()}]"
            self.decided = True
        for name, found in values.items():
            wanted = self._wanted(name, found)
            if wanted and wanted not in self.chosen:
                self.chosen.add(wanted)
                return f"{name}: {wanted}", f"click[{wanted}]"
        return "all is chosen", f"click[{BUY.lower()}]"

    def _values(self, pieces: Sequence[str], admissible: Sequence[str]) -> dict[str, list[str]]:
        """Option name -> values on the page of a product: a piece that cannot be clicked names those behind it."""
        values: dict[str, list[str]] = {}
        name = ""
        for piece in pieces:
            if piece.startswith("Price: "):
                break
            if piece.lower() in _BUTTONS:
                continue
            if f"click[{piece}]" in admissible:
                values.setdefault(name, []).append(piece)
            else:
                name = piece
        return values

    def _wanted(self, name: str, offered: Sequence[str]) -> str | None:
        if self.request.options.get(name) in offered:
            return self.request.options[name]
        named = [value for value in offered if re.search(rf"\b{re.escape(value)}\b", self.request.text)]
        return max(named, key=len, default=None)

    def _lacking(self, text: str) -> frozenset[str]:
        return self.request.words - set(_WORD.findall(text.lower()))

    def _affordable(self, tag: str) -> bool:
        prices = [float(price) for price in _DOLLARS.findall(tag)]
        return not prices or min(prices) < self.request.limit


def skill_text(trajectory: Trajectory) -> str:
    """What a visit teaches: the search for all that was asked, which product to take, and what to choose on it; of one
    that was not paid for, what was wrong with the product instead."""
    request = Request.parse(trajectory.description)
    number, page = 0, list[str]()
    for turn in trajectory.turns:
        shown = [piece.lower() for piece in turn.observation.split(SEPARATOR) if _ASIN.fullmatch(piece)]
        page = shown or page
        asin = turn.action.removeprefix("click[").removesuffix("]")
        number = page.index(asin) + 1 if asin in page else number
    chosen = f" Choose {', '.join(request.options.values())}." if request.options else ""
    if not number:
        return f"Search {request.query}. Then open a product.{chosen}"
    if trajectory.success:
        return f"Search {request.query}. Take number {number}.{chosen}"
    return f"Search {request.query}. Number {number}: {trajectory.outcome}. Take another one.{chosen}"
