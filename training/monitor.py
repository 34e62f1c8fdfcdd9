"""What is watched: means over a step, the run's log (metrics.jsonl), and an alarm for collapsing states."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diagnostics.paired import PairedPass
from training.dynamics import Metrics

RANK_TOKENS = 256  # tokens an effective rank is estimated from: their Gram matrix costs next to nothing


class Means:
    """Weighted means over all micro-batches of a step, never the last one only."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Any]] = {}

    def add(self, metrics: Mapping[str, tuple[Any, Any]]) -> None:
        for name, (total, weight) in metrics.items():
            entry = self._sums.setdefault(name, [0.0, 0.0])
            entry[0], entry[1] = entry[0] + total, entry[1] + weight  # tensors: read once, at the end of the step

    def sums(self) -> dict[str, tuple[float, float]]:
        """name -> (sum, weight)."""
        return {name: (float(total), float(weight)) for name, (total, weight) in self._sums.items()}

    def result(self) -> dict[str, float]:
        """name -> sum / weight; names without any weight (a term without tokens) are left out."""
        return {name: total / weight for name, (total, weight) in self.sums().items() if weight}


class Log:
    """metrics.jsonl: one row a step, each with the attempt that wrote it.

    Opening it after a resume at `step` drops the rows behind that step, which are about to be made again, so that
    every step stands there once (case B71). Row n holds training of the n-th step and evaluation of the weights after
    n steps; row 0 the evaluation before training.
    """

    def __init__(self, run: str | Path, step: int) -> None:
        self.path = Path(run) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = read_metrics(run)
        self.attempt = 1 + max((row["attempt"] for row in rows), default=-1)
        kept = [row for row in rows if row["step"] <= step]
        self.steps = {row["step"] for row in kept}
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(temporary, self.path)

    def write(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Append a row and return it. Numbers that JSON cannot hold (nan, inf) are written as null."""
        row: dict[str, Any] = {"step": step, "attempt": self.attempt}
        row |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        return row


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """Rows of a run's metrics.jsonl in order; [] without a file. A last line that was cut by a kill is left out."""
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # a complete row ends with a newline
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"line {number} of {path} is not JSON; remove the line") from error
    return rows


def state_metrics(pair: PairedPass, mask: Bool[Tensor, "M"]) -> Metrics:
    """Per layer: raw cosine of student and teacher states, and effective rank of the student's (collapse alarm).

    Args: mask, the tokens with a teacher. Returns `states/cosine_raw/<layer>` in [-1, 1] and
    `states/effective_rank/<layer>` in [1, min(256, D)], layers 0-based.
    """
    if pair.student_states is None or pair.teacher_states is None or not mask.any():
        return {}
    student, teacher = pair.student_states.detach()[:, mask].float(), pair.teacher_states[:, mask].float()
    cosines = torch.cosine_similarity(student, teacher, dim=-1)
    ranks = effective_rank(student[:, :RANK_TOKENS])
    metrics: Metrics = {}
    for layer, (cosine, rank) in enumerate(zip(cosines, ranks, strict=True)):
        metrics[f"states/cosine_raw/{layer}"] = (cosine.sum(), len(cosine))
        metrics[f"states/effective_rank/{layer}"] = (rank * len(cosine), len(cosine))
    return metrics


def effective_rank(states: Float[Tensor, "L M D"]) -> Float[Tensor, "L"]:
    """How many directions the states of a layer use: exp of the entropy of the normalised singular values.

    Source: Roy and Vetterli (2007). Args: states, centred here over the M tokens. Returns: [L] in [1, min(M - 1, D)]
    (1 for states that do not vary).
    Departures: singular values from the M x M Gram matrix.
    """
    centred = (states - states.mean(1, keepdim=True)).double()
    singular = torch.linalg.eigvalsh(centred @ centred.mT).clamp(min=0).sqrt()
    share = singular / singular.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.special.entr(share).sum(-1).exp().float()
