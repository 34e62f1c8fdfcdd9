"""The contract between the reader of pairs and what is measured on them: what a measure needs, gets and returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import pyarrow as pa
from torch import Tensor

from diagnostics.capture import CaptureStates
from diagnostics.forward import Divergence, Output
from diagnostics.paired import PairedPass, PairedSegment
from diagnostics.records import Provenance, Segment, Trajectory

__all__ = ["Measure", "Needs", "Output", "Stream", "Subject", "WeightFn"]

# (gap [M] in nats, teacher minus student log-prob; turn [M]; row [M]) -> weight [M] of each token
WeightFn = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Needs:
    """What a measure wants to find in each PairedPass; the reader reads what any of the chosen measures needs."""

    states: bool = False  # hidden states [L, M, D] of both branches, at the position before the token
    prepare: bool = False  # a first pass over a fixed subset of the students alone
    first: tuple[str, ...] = ()  # contexts that must be measured before the others
    extra_layers: tuple[str, ...] = ()  # of "embed", "final_norm": student_extra and teacher_extra
    outputs: Mapping[str, Output] = field(default_factory=dict)  # name -> function of the full distribution
    divergence: Divergence | Literal["none"] = "none"  # of the full distributions


def merged(needs: Sequence[Needs]) -> Needs:
    """What all of them need together. Raises ValueError where two give one name to different functions."""
    outputs: dict[str, Output] = {}
    for name, output in (item for each in needs for item in each.outputs.items()):
        if outputs.setdefault(name, output) is not output:
            raise ValueError(f"two measures call different functions of the distribution {name!r}; rename one of them")
    divergences = {each.divergence for each in needs} - {"none"}
    if len(divergences) > 1:
        raise ValueError(f"measures need different divergences ({', '.join(sorted(divergences))}); run them apart")
    return Needs(
        states=any(each.states for each in needs),
        prepare=any(each.prepare for each in needs),
        first=tuple(dict.fromkeys(context for each in needs for context in each.first)),
        extra_layers=tuple(dict.fromkeys(layer for each in needs for layer in each.extra_layers)),
        outputs=outputs,
        divergence=next(iter(divergences), "none"),
    )


@dataclass(frozen=True)
class Subject:
    """What a measure may know about what it measures."""

    model: Any
    tokenizer: Any
    trajectories: Sequence[Trajectory]  # those that are read
    skills: Mapping[str, str]  # own skill text by trajectory id
    seed: int
    temperature: float  # of every log-prob
    weights: Mapping[str, WeightFn]  # method name -> its token weight; may be empty
    texts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # context -> trajectory id -> text in front
    segments: Mapping[str, Sequence[Segment]] = field(default_factory=dict)  # trajectory id -> as they are read
    # trajectory id -> for each turn whether an expert accepts the command, None: it cannot say
    accepted: Mapping[str, Sequence[bool | None]] = field(default_factory=dict)
    capture: CaptureStates | None = None  # of the backend, for who reads more contexts; None: the forward hooks


class Stream(Protocol):
    """Counts of one measure; of a token it stores at most one number, as the trajectories do, and never a state."""

    def prepare(self, pairs: Sequence[PairedSegment], passed: PairedPass) -> None:
        """Sees a fixed subset of the students before the first update: states and log-probs, without teachers."""

    def update(self, pairs: Sequence[PairedSegment], passed: PairedPass) -> None:
        """Sees a batch of pairs of one context, each with a teacher."""

    def result(self, provenance: Provenance) -> dict[str, pa.Table]:
        """The tables of the measure by name; tables of one name are joined over measures."""


@dataclass(frozen=True)
class Measure:
    """A measure: a stream over all pairs, or a function that runs the model itself on a small fixed subset of them."""

    name: str
    needs: Needs
    start: Callable[[Subject], Stream] | None = None
    # context -> the same single turns in each
    direct: Callable[[Subject, Mapping[str, list[PairedSegment]], Provenance], dict[str, pa.Table]] | None = None
