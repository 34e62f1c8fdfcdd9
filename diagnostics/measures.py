"""The measures: what each needs of a paired pass, and the stream that counts it. A measure is added here by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from diagnostics.change import NULL_CONTEXT, Change
from diagnostics.paired import PairedPass, PairedSegment
from diagnostics.records import Provenance


class Stream(Protocol):
    """Counts of one measure; what it stores must not grow with the number of tokens."""

    def prepare(self, pairs: Sequence[PairedSegment], passed: PairedPass) -> None:
        """Sees every student once, without teachers, before the first update."""

    def update(self, pairs: Sequence[PairedSegment], passed: PairedPass) -> None:
        """Sees a batch of pairs of one context."""

    def result(self, provenance: Provenance) -> dict[str, pa.Table]:
        """The tables of the measure by name; tables of one name are joined over measures."""


@dataclass(frozen=True)
class Needs:
    states: bool  # hidden states of both branches
    prepare: bool  # a first pass over the students alone
    first: tuple[str, ...] = ()  # contexts that must be measured before the others


@dataclass(frozen=True)
class Measure:
    name: str
    needs: Needs
    start: Callable[[], Stream]


MEASURES: dict[str, Measure] = {
    "change": Measure("change", Needs(states=True, prepare=True, first=(NULL_CONTEXT,)), Change),
}


def measure(name: str) -> Measure:
    """The measure of that name. Raises ValueError with the nearest name when there is none."""
    if name not in MEASURES:
        near = difflib.get_close_matches(name, MEASURES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"measures are {', '.join(MEASURES)}"
        raise ValueError(f"unknown measure {name!r}; {hint}")
    return MEASURES[name]
