"""Where in an episode gaps and weights live: means over tokens, by turn and by relative position inside the turn.

A metric is (sum, weight), so that means are taken over a whole step and not over its last micro-batch.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diagnostics.paired import PairedPass
from training.batch import Batch

FIFTHS = 5  # of a turn, by relative position
TURNS = 50  # later turns are not told apart

Metrics = dict[str, tuple[Tensor, Tensor | float]]  # name -> (sum, weight)


def relative_position(batch: Batch) -> Float[Tensor, "M"]:
    """Place of each token inside its turn: 0 for the first, 1 for the last, 0 for an only one."""
    count = len(batch.turn)
    if not count:
        return torch.zeros(0)
    starts = torch.ones(count, dtype=torch.bool, device=batch.turn.device)
    starts[1:] = (batch.turn[1:] != batch.turn[:-1]) | (batch.row[1:] != batch.row[:-1])
    span = starts.cumsum(0) - 1
    length = torch.bincount(span)[span]
    first = starts.nonzero()[:, 0][span]
    index = torch.arange(count, device=span.device) - first
    return index / (length - 1).clamp(min=1)


def gap_metrics(batch: Batch, pair: PairedPass) -> Metrics:
    """Of gap = q - s (nats) over the distilled tokens: mean, share below zero, and means by turn and position."""
    if pair.teacher_logprobs is None or not batch.distilled.any():
        return {}
    mask = batch.distilled
    gap = torch.where(mask, pair.teacher_logprobs - pair.student_logprobs.detach(), 0.0)
    return {
        "gap/mean": (gap.sum(), mask.sum()),
        "gap/negative_share": ((gap < 0).sum(), mask.sum()),
        **_by_place("gap", batch, gap, mask),
    }


def weight_metrics(batch: Batch, name: str, weight: Float[Tensor, "M"], mask: Bool[Tensor, "M"]) -> Metrics:
    """Of a gate or weight over its mask: mean, share over one half, and means by turn and position."""
    weight = torch.where(mask, weight.detach(), 0.0)
    return {
        f"{name}/mean": (weight.sum(), mask.sum()),
        f"{name}/over_half": ((weight > 0.5).sum(), mask.sum()),
        **_by_place(name, batch, weight, mask),
    }


def _by_place(name: str, batch: Batch, values: Tensor, mask: Tensor) -> Metrics:
    metrics: Metrics = {}
    fifth = (relative_position(batch) * FIFTHS).long().clamp(max=FIFTHS - 1)
    for label, place, size in (("turn", batch.turn.clamp(max=TURNS - 1), TURNS), ("fifth", fifth, FIFTHS)):
        sums = torch.zeros(size, dtype=values.dtype, device=values.device).index_add(0, place[mask], values[mask])
        counts = torch.bincount(place[mask], minlength=size)
        for index in counts.nonzero()[:, 0].tolist():
            metrics[f"{name}/{label}/{index}"] = (sums[index], counts[index])
    return metrics
