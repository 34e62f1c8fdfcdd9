"""What is read at the response tokens of pairs, put together from the readings of the forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diagnostics.forward import Reading


@dataclass(frozen=True, eq=False)
class PairedPass:
    """What a model reads at the M response tokens of some pairs, flat and in their order.

    Entry t of a log-prob is the probability OF response token t; the state paired with it is the residual stream at
    the position BEFORE it. Only student tensors can carry gradients.
    """

    row: Int[Tensor, "M"]  # index of the pair
    has_teacher: Bool[Tensor, "M"]  # False: no teacher context; teacher tensors there read the student's
    student_logprobs: Float[Tensor, "M"]  # nats
    student_entropy: Float[Tensor, "M"] | None = None  # nats, of the full distribution
    teacher_logprobs: Float[Tensor, "M"] | None = None  # nats
    divergence: Float[Tensor, "M"] | None = None  # nats, of the full distributions
    student_states: Float[Tensor, "L M D"] | None = None  # output of every block, before or at the token
    teacher_states: Float[Tensor, "L M D"] | None = None
    student_extra: dict[str, Float[Tensor, "M D"]] = field(default_factory=dict)  # "embed", "final_norm"
    teacher_extra: dict[str, Float[Tensor, "M D"]] = field(default_factory=dict)
    student_outputs: dict[str, Tensor] = field(default_factory=dict)  # [M, ...] of the full distribution, by name
    teacher_outputs: dict[str, Tensor] = field(default_factory=dict)


def student_pass(
    row: Int[Tensor, "M"],
    has_teacher: Sequence[bool],
    readings: Sequence[Reading],
    blocks: Sequence[str],
    back: Int[Tensor, "M"],
) -> PairedPass:
    """The pass of the student branch alone.

    Args: row, pair of each token in the order of the pairs; has_teacher, by pair; readings, of the forwards in the
    order of reading; blocks, names of the layers that make up the states; back, place in the order of reading of each
    token in the order of the pairs.
    """
    row = row.to(readings[0].logprobs.device)
    states, extra = _join_states(readings, blocks, back)
    return PairedPass(
        row=row,
        has_teacher=torch.tensor(has_teacher, device=row.device)[row],
        student_logprobs=_join([reading.logprobs for reading in readings], back),
        student_entropy=_join([reading.entropy for reading in readings], back),
        divergence=_join([reading.divergence for reading in readings], back),
        student_states=states,
        student_extra=extra,
        student_outputs=_join_outputs(readings, back),
    )


def with_teacher(
    passed: PairedPass, readings: Sequence[Reading], blocks: Sequence[str], back: Int[Tensor, "M"]
) -> PairedPass:
    """The pass with a teacher branch beside the student's, whose tensors stay the same objects.

    Args: as in student_pass; a divergence that the teacher's readings hold takes the place of none.
    """
    states, extra = _join_states(readings, blocks, back)
    apart = _join([reading.divergence for reading in readings], back)
    return replace(
        passed,
        teacher_logprobs=_join([reading.logprobs for reading in readings], back),
        divergence=passed.divergence if apart is None else apart,
        teacher_states=states,
        teacher_extra=extra,
        teacher_outputs=_join_outputs(readings, back),
    )


def finite_rows(states: Float[Tensor, "L M D"]) -> Bool[Tensor, "M"]:
    """The tokens whose states are finite in every layer."""
    finite = states.sum(-1).isfinite().all(0)  # a finite sum has finite terms; only the others need a look at each
    return finite if bool(finite.all()) else states.isfinite().all(-1).all(0)


def _join(parts: Sequence[Any], back: Tensor) -> Any:
    """The parts in the order of the pairs; None where nothing was read."""
    if parts[0] is None or len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts))[back.to(parts[0].device)]


def _join_states(
    readings: Sequence[Reading], blocks: Sequence[str], back: Tensor
) -> tuple[Tensor | None, dict[str, Tensor]]:
    joined = {name: _join([reading.states[name] for reading in readings], back) for name in readings[0].states}
    stacked = torch.stack([joined.pop(name) for name in blocks]) if blocks else None
    return stacked, joined


def _join_outputs(readings: Sequence[Reading], back: Tensor) -> dict[str, Tensor]:
    return {name: _join([reading.outputs[name] for reading in readings], back) for name in readings[0].outputs}
