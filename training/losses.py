"""Losses per token: pure functions over flat response tokens, no reduction, no state.

Log-probabilities are nats of the sampled token. Masked-out entries may hold anything (-inf, nan): inputs are
SELECTED by the mask before any arithmetic, so neither values nor gradients leak (cases B21, B30). Half precision is
raised to float32; float64 stays float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# exp(20) = 4.9e8: far outside every clip, so no value changes; an overflowing exp would make the gradient 0 * inf.
MAX_LOG_RATIO = 20.0


class PolicyLoss(NamedTuple):
    value: Float[Tensor, "M"]  # carries the gradient
    clipped: Bool[Tensor, "M"]  # the ratio lies outside the clip range
    dual_clipped: Bool[Tensor, "M"]  # the bound for negative advantages decided


def policy_loss(
    student: Float[Tensor, "M"],
    old: Float[Tensor, "M"],
    advantages: Float[Tensor, "M"],
    mask: Bool[Tensor, "M"],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
) -> PolicyLoss:
    """Clipped surrogate: move towards tokens that did better than their group, at most a little per step.

    ratio = exp(s - b); value = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)); for A < 0 at most
    -A dual_clip.
    Source: PPO (Schulman et al. 2017), Eq. 7; dual clip (Ye et al. 2020), Eq. 5; GRPO.
    Args: student, old [M] nats; advantages [M], dimensionless, no gradient is taken through them or through old.
    Returns: value [M] in [-(1 + clip_high) |A|, dual_clip |A|], 0 outside the mask; two masks of the clipped tokens.
    """
    student, old, advantages = (selected(x, mask) for x in (student, old.detach(), advantages.detach()))
    ratio = (student - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    value = torch.maximum(-advantages * ratio, -advantages * bounded)
    limit = torch.where(advantages < 0, -advantages * dual_clip, torch.inf)
    return PolicyLoss(torch.minimum(value, limit), ratio != bounded, value > limit)


def kl_k3(
    student: Float[Tensor, "M"], reference: Float[Tensor, "M"], mask: Bool[Tensor, "M"], limit: float = 10.0
) -> Float[Tensor, "M"]:
    """Estimate of KL(student || reference) from the sampled token, never negative.

    value = exp(r - s) - (r - s) - 1, at most `limit`.
    Source: Schulman, "Approximating KL divergence" (k3). Used as a LOSS term, whose expected gradient is not that of
    the KL it estimates (case B25): for student softmax([0.4, 0]) and reference [.9, .1] it is -0.301 instead of -0.432.
    Args: student, reference [M] nats. Returns: [M] nats in [0, limit], 0 outside the mask; no gradient at the limit.
    """
    student, reference = selected(student, mask), selected(reference.detach(), mask)
    difference = (reference - student).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (difference.exp() - difference - 1).clamp(max=limit)


def alignment(
    projected: Float[Tensor, "L M D"], teacher: Float[Tensor, "L M D"], mask: Bool[Tensor, "M"]
) -> Float[Tensor, "L M"]:
    """Squared distance of the directions of two states: what the student (projected) and the teacher think.

    value = || p/|p| - sg(h/|h|) ||^2 = 2 - 2 cos(p, h)
    Source: PR-OPD, the alignment loss before its mean over layers and tokens.
    Args: states [L, M, D] of the position BEFORE each token. Returns: [L, M] in [0, 4], 0 outside the mask.
    Departures: the direction of a zero vector is the zero vector (value 1 against any direction, finite gradient).
    """
    inside = mask[None, :, None]
    student = _direction(selected(projected, inside))
    return (student - _direction(selected(teacher.detach(), inside))).square().sum(-1)


def _direction(states: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(states.detach(), dim=-1, keepdim=True)
    zero = norm == 0  # selected before the differentiable norm, whose gradient is undefined at 0
    unit = torch.ones((), dtype=states.dtype, device=states.device)
    return states / torch.linalg.vector_norm(torch.where(zero, unit, states), dim=-1, keepdim=True)


def selected(values: Tensor, mask: Tensor) -> Tensor:
    """`values` inside the mask, 0 elsewhere, at least in float32."""
    if values.dtype in (torch.bfloat16, torch.float16):
        values = values.float()
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
