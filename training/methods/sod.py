"""SOD: token OPD as an advantage, trusted less in turns where student and teacher are further apart than at first.

    A_t = A + coefficient w_k (q_t - b_t)
    d_k = mean over turn k of |b - q|,   w_1 = 1,   w_k = min((d_1 + 1e-6) / (d_k + 1e-6), cap)

Differences from its nearest relative, token OPD: 1. the gap is added to the advantage, so that ratio and clip apply
to it; 2. the weight of the turn; 3. the GRPO advantage stays. Ours where the source is silent: see docs/methods.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diagnostics.paired import PairedPass
from training.advantages import teacher_gap
from training.batch import Batch
from training.method import Method, Needs, setting

EPSILON = 1e-6  # nats, as in the released code: a turn on which both agree has the weight `cap`, not a division by 0


@dataclass(frozen=True)
class SodConfig:
    coefficient: float = setting(1.0, "code")  # 0: plain GRPO
    cap: float = setting(1.2, "code")  # largest weight of a turn (launch script; the function's own default is 1.5)
    skill: Literal["retrieved", "hindsight"] = setting("retrieved", "ours")


def needs(config: SodConfig, step: int) -> Needs:
    if not config.coefficient:
        return Needs()
    return Needs(config.skill, teacher="rollout", teacher_logprobs=True)


def turn_weights(
    distance: Float[Tensor, "M"],
    trajectory: Int[Tensor, "M"],
    turn: Int[Tensor, "M"],
    mask: Bool[Tensor, "M"],
    cap: float,
) -> Float[Tensor, "M"]:
    """How far each turn is trusted: the first turn's mean distance over its own, at most `cap`.

    d_k = mean of distance over the masked tokens of turn k; w_k = min((d_1 + 1e-6) / (d_k + 1e-6), cap), w_1 = 1
    Source: SOD; the product of ratios of neighbouring turns telescopes to this one.
    Args: distance, |b - q|, nats; trajectory and turn, in any order and over any rows; mask, tokens with a teacher.
    Returns: [M] in (0, max(1, cap)], 0 outside the mask; turn 1 is the trajectory's first one inside the mask.
    """
    weights = torch.zeros_like(distance)
    # one row a turn, sorted by trajectory and turn, wherever its tokens stand
    turns, index = torch.stack([trajectory, turn], 1)[mask].unique(dim=0, return_inverse=True)
    sums = distance.new_zeros(len(turns)).index_add(0, index, distance[mask])
    means = sums / index.bincount(minlength=len(turns)) + EPSILON
    _, owner, lengths = turns[:, 0].unique_consecutive(return_inverse=True, return_counts=True)
    first = lengths.cumsum(0) - lengths  # of each trajectory
    ratios = (means[first][owner] / means).clamp(max=cap)
    ratios[first] = 1.0
    weights[mask] = ratios[index]
    return weights


def advantage(batch: Batch, pair: PairedPass, config: SodConfig, step: int) -> Tensor:
    """A + coefficient w (q - b) where there is a teacher context, A elsewhere."""
    if not config.coefficient:
        return batch.advantages
    gap = teacher_gap(batch.old_logprobs, pair.teacher_logprobs, batch.distilled)
    weights = turn_weights(gap.abs(), batch.trajectory, batch.turn, batch.distilled, config.cap)
    return batch.advantages + config.coefficient * weights * gap


METHOD = Method("sod", "SOD (arXiv 2605.07725)", "advantage", SodConfig, needs, advantage=advantage)
