"""Group-relative advantages (GRPO), and the gap of a teacher, from which other methods make theirs.

The standard deviation is the unbiased one: [10, 0] gives +-0.7071, not +-1.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from training.losses import selected

# Keeps the quotient finite when a group's rewards nearly agree. It is added to the standard deviation, never put
# inside the variance, where it would shrink close rewards by orders of magnitude (case B18).
EPSILON = 1e-6


def group_advantages(returns: Float[Tensor, "N"], groups: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """How much better a row did than the other attempts at its task.

    A_i = (R_i - mean R) / (std R + 1e-6) inside the group, ddof 1; exactly 0 in a group of one or of equal returns.
    Source: GRPO (Shao et al. 2024), Eq. 21 of DeepSeekMath; ddof 1 as in the released agent code.
    Args: returns [N] in reward units, one a row. A row is a trajectory, or a turn under `advantage_scope: turn_rows`,
    where a long episode has many rows and so weighs more in mean and deviation. groups [N]: id of the row's task.
    Returns: [N], dimensionless, |A| < sqrt(size of the group), dtype of returns; computed in float64.
    Raises: ValueError when a return is not finite.
    """
    if not torch.isfinite(returns).all():
        row = int((~torch.isfinite(returns)).nonzero()[0])
        raise ValueError(
            f"return of row {row} is {float(returns[row])}; expected a finite number (errors are left out)"
        )
    exact = returns.double()
    advantages = torch.zeros_like(exact)
    for group in groups.unique():
        member = groups == group
        values = exact[member]
        if not _dead(values):
            advantages[member] = (values - values.mean()) / (values.std(correction=1) + EPSILON)
    return advantages.to(returns.dtype)


def centred_returns(returns: Float[Tensor, "N"], groups: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Return minus the mean return of its group, without a deviation. Source: OPID. Args: as group_advantages."""
    centred = returns.double().clone()
    for group in groups.unique():
        centred[groups == group] -= centred[groups == group].mean()
    return centred.to(returns.dtype)


def dead_group_share(returns: Float[Tensor, "N"], groups: Int[Tensor, "N"]) -> float:
    """Share of the groups, among those of two or more rows, whose returns are all equal: they teach nothing (case B19).

    Source: ours. Args: as group_advantages. Returns: in [0, 1]; 0 when no group has two rows.
    """
    members = [returns[groups == group] for group in groups.unique()]
    compared = [values for values in members if len(values) > 1]
    return sum(_dead(values) for values in compared) / max(len(compared), 1)


def teacher_gap(
    old: Float[Tensor, "M"] | None, teacher: Float[Tensor, "M"] | None, mask: Bool[Tensor, "M"]
) -> Float[Tensor, "M"]:
    """How much likelier the teacher finds each sampled token than the policy that played it.

    gap = q - b inside the mask, 0 outside, whatever stands there
    Source: RLSD, SOD, OPID (the released code of each takes the start-of-step policy for b).
    Args: old, b; teacher, q: nats; mask, tokens with a teacher context. Returns: [M] nats, no gradient.
    Raises: ValueError when b or q was not read, though there are such tokens.
    """
    if not mask.any():
        return torch.zeros(len(mask), device=mask.device)
    if old is None or teacher is None:
        missing = "old_logprobs" if old is None else "teacher_logprobs"
        raise ValueError(f"the advantage needs {missing}, which the step did not read; check the method's needs")
    return (selected(teacher, mask) - selected(old, mask)).detach()


def _dead(values: Tensor) -> bool:
    # By comparison and not by std == 0: the mean of equal floats can miss them by one rounding.
    return bool(values.min() == values.max())
