"""Token-level maths shared by the methods that distil in the output space. No reduction, no state.

s and q are the log-probabilities (nats) of the sampled token under student and teacher, gap = q - s. Only s carries a
gradient. Entries outside the mask are 0 whatever stood there (cases B21, B30).

Two families, and they behave differently. `sampled_gap` with a weight w has gradient -w on s: it only ever raises the
sampled token, the gap sets the weight and never the sign. `policy_gradient` has gradient -(q - s): it also pushes down
what the teacher rejects, and its expectation is the gradient of the reverse KL.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diagnostics.paired import PairedPass
from training.losses import selected

Gate = Literal["gap", "entropy", "soft_or", "hard"]

MAX_LOG_WEIGHT = 10.0  # of Skill-SD's importance ratio, as released
MAX_NEGATIVE_LOG_RATIO = 20.0  # of Skill-SD's exp(q - s), as released


def branches(pair: PairedPass, mask: Bool[Tensor, "M"]) -> tuple[Float[Tensor, "M"], Float[Tensor, "M"]]:
    """s with its gradient and q without, inside the mask. Raises ValueError where no teacher was read."""
    if pair.teacher_logprobs is None:
        raise ValueError("the loss needs teacher_logprobs, which the pair does not hold; check the method's needs")
    return selected(pair.student_logprobs, mask), selected(pair.teacher_logprobs.detach(), mask)


def full_divergence(pair: PairedPass, mask: Bool[Tensor, "M"]) -> Float[Tensor, "M"]:
    """The divergence over the whole vocabulary that `needs` named, with the student's gradient."""
    if pair.divergence is None:
        raise ValueError("the loss needs divergence, which the pair does not hold; check the method's needs")
    return selected(pair.divergence, mask)


def sampled_gap(student: Float[Tensor, "M"], teacher: Float[Tensor, "M"]) -> Float[Tensor, "M"]:
    """The distance that gated losses weigh: how much likelier the teacher finds the sampled token.

    value = sg(q) - s
    Source: SDAR; PCSD. Its gradient on s is -1, so with a constant weight its expected gradient is 0 (case B25).
    Args: student, teacher [M] nats. Returns: [M] nats, any sign.
    """
    return teacher.detach() - student


def policy_gradient(student: Float[Tensor, "M"], teacher: Float[Tensor, "M"]) -> Float[Tensor, "M"]:
    """Token-level on-policy distillation: the gap is the advantage of the sampled token.

    value = -sg(q - s) s
    Source: on-policy distillation, sampled reverse KL. Its gradient on s is s - q, that of the loss k2 = (s - q)^2 / 2,
    and in expectation over the student's own tokens that of KL(student || teacher) in each visited context.
    Args: student, teacher [M] nats. Returns: [M]; the value itself has no meaning, read the gap.
    """
    return -(teacher - student).detach() * student


def weighted_k3(
    student: Float[Tensor, "M"], teacher: Float[Tensor, "M"], old: Float[Tensor, "M"]
) -> Float[Tensor, "M"]:
    """Reverse KL estimated with tokens of the start-of-step policy.

    value = rho (exp(min(-d, 20)) - 1 + d),  d = s - sg(q),  rho = exp(min(s - sg(b), 10))
    Source: Skill-SD in the released SDAR code. rho IS differentiated: that alone makes the expected gradient the one
    of the reverse KL (k3 as a loss has another, case B25).
    Args: student, teacher, old [M] nats. Returns: [M] nats, >= 0 below the bounds.
    """
    d = student - teacher.detach()
    rho = (student - old.detach()).clamp(max=MAX_LOG_WEIGHT).exp()
    return rho * ((-d).clamp(max=MAX_NEGATIVE_LOG_RATIO).exp() - 1 + d)


def gate(
    kind: Gate, gap: Float[Tensor, "M"], beta: float, entropy: Float[Tensor, "M"] | None = None
) -> Float[Tensor, "M"]:
    """How much a token counts.

    gap: sigmoid(beta gap); entropy: sigmoid(beta h); soft_or: sigmoid(beta [1 - (1 - h)(1 - gap)]); hard: gap > 0
    Source: SDAR. Args: gap [M] nats; beta, 1/nats; entropy h [M] nats, not normalised (ours), for the two that read it.
    Returns: [M] in [0, 1], detached. Raises: ValueError when a gate that reads the entropy gets none.
    """
    gap = gap.detach()
    if kind == "gap":
        return torch.sigmoid(beta * gap)
    if kind == "hard":
        return (gap > 0).to(gap.dtype)
    if entropy is None:
        raise ValueError(f"the gate {kind!r} needs student_entropy, which the pair does not hold")
    entropy = entropy.detach()
    return torch.sigmoid(beta * (entropy if kind == "entropy" else 1 - (1 - entropy) * (1 - gap)))


def response_normalised(
    weights: Float[Tensor, "M"], mask: Bool[Tensor, "M"], row: Int[Tensor, "M"], turn: Int[Tensor, "M"]
) -> Float[Tensor, "M"]:
    """Weights relative to their mean over the response (one turn of one row) they belong to.

    value = w / mean w. Source: the variant that PCSD's text attributes to SDAR; nothing published normalises.
    Args: weights [M] >= 0. Returns: [M] with mean 1 over the mask of each response; a response of zeros stays zero.
    """
    kept = torch.where(mask, weights, 0.0)
    _, response = torch.unique(torch.stack([row, turn]), dim=1, return_inverse=True)
    total = kept.new_zeros(len(kept)).index_add(0, response, kept)[response]
    count = kept.new_zeros(len(kept)).index_add(0, response, mask.to(kept.dtype))[response]
    return kept * count / torch.where(total == 0, 1.0, total)
