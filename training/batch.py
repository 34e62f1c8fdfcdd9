"""From trajectories to the flat token tensors of one forward pass. A row is one segment.

Masks and denominators depend on the rows of the whole optimiser mini-batch only and are known before its first
forward pass, so that any split into micro-batches gives the same gradient (case B27).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diagnostics.paired import PairedPass, PairedSegment
from diagnostics.records import Segment, Trajectory
from training.advantages import centred_returns, dead_group_share, group_advantages
from training.config import ObjectiveConfig


@dataclass(frozen=True, eq=False)
class Row:
    """One segment with everything that is known about its M response tokens before an update."""

    pair: PairedSegment
    trajectory: int  # index inside the step
    advantages: Float[Tensor, "M"]
    centred: Float[Tensor, "M"]  # return minus the mean of its group
    rollout_logprobs: Float[Tensor, "M"]
    old_logprobs: Float[Tensor, "M"] | None = None
    reference_logprobs: Float[Tensor, "M"] | None = None
    teacher_logprobs: Float[Tensor, "M"] | None = None  # of a teacher that stays as it is during the step
    step_teacher_logprobs: Float[Tensor, "M"] | None = None  # of the teacher with a skill for single turns
    step_distilled: Bool[Tensor, "M"] | None = None  # the tokens of those turns

    @property
    def n_tokens(self) -> int:
        return len(self.pair.response_ids)

    @property
    def distilled(self) -> bool:
        return self.pair.teacher_ids is not None

    @property
    def width(self) -> int:
        """Tokens of its longer context."""
        teacher = 0 if self.pair.teacher_ids is None else len(self.pair.teacher_ids)
        return max(len(self.pair.student_ids), teacher)


@dataclass(frozen=True, eq=False)
class Batch:
    """A micro-batch, flat over its M response tokens and aligned with the PairedPass of the same rows.

    A loss term is sum(coefficient * weight * value * scale) over its mask. `scale` sums to 1 over the mask of the
    mini-batch, `distill_scale` over its distilled tokens.
    """

    row: Int[Tensor, "M"]
    trajectory: Int[Tensor, "M"]
    turn: Int[Tensor, "M"]
    token_class: Int[Tensor, "M"]
    mask: Bool[Tensor, "M"]
    distilled: Bool[Tensor, "M"]  # of the mask, those with a teacher context
    advantages: Float[Tensor, "M"]
    rollout_logprobs: Float[Tensor, "M"]  # sampler's engine: for kl/rollout_train only
    old_logprobs: Float[Tensor, "M"] | None  # trainer's engine, start of the step; None: the student's own, detached
    reference_logprobs: Float[Tensor, "M"] | None
    scale: Float[Tensor, "M"]
    distill_scale: Float[Tensor, "M"]
    n_tokens: int  # of the mini-batch
    n_distilled: int  # of the mini-batch
    centred: Float[Tensor, "M"] | None = None  # return minus the mean of its group
    teacher_logprobs: Float[Tensor, "M"] | None = None  # of a teacher that stays as it is during the step
    step_teacher_logprobs: Float[Tensor, "M"] | None = None  # of the teacher with a skill for single turns
    step_distilled: Bool[Tensor, "M"] | None = None  # the tokens of those turns


class Advantages(NamedTuple):
    """By trajectory and turn, and how many groups teach nothing."""

    normalised: list[Float[Tensor, "K"]]  # (R - mean R) / (std R + 1e-6), dimensionless
    centred: list[Float[Tensor, "K"]]  # R - mean R, in reward units
    dead: float  # share of the groups with equal returns, in [0, 1]


@dataclass(frozen=True)
class Denominators:
    """Tokens of a mini-batch by trajectory, all and distilled, and how they are averaged."""

    tokens: Counter[int]
    distilled: Counter[int]
    reduction: str

    def scale(self, trajectory: int, distilled: bool = False) -> float:
        """Weight of one token of this trajectory. token_mean: 1 / tokens; sequence_mean: a mean of means."""
        counts = self.distilled if distilled else self.tokens
        if self.reduction == "token_mean":
            return 1 / counts.total()
        return 1 / (counts[trajectory] * len(counts))


def denominators(rows: Sequence[Row], reduction: str) -> Denominators:
    """Counts of a whole mini-batch. Args: reduction, "token_mean" or "sequence_mean" (over trajectories)."""
    tokens: Counter[int] = Counter()
    distilled: Counter[int] = Counter()
    for row in rows:
        tokens[row.trajectory] += row.n_tokens
        if row.distilled:
            distilled[row.trajectory] += row.n_tokens
    return Denominators(tokens, distilled, reduction)


def turn_advantages(trajectories: Sequence[Trajectory], config: ObjectiveConfig) -> Advantages:
    """What every turn of every trajectory is worth against the other attempts at its task.

    `trajectory`: R_i = reward - penalty * n_invalid, one advantage for all its turns. `turn_rows`: every turn is a row
    of the group with the trajectory's reward, and an invalid one pays the penalty alone.
    Source: GRPO; turn_rows as in the released agent code. Args: trajectories without errors, grouped by `group`.
    """
    by_turn = config.advantage_scope == "turn_rows"
    returns: list[float] = []
    groups: list[int] = []
    for trajectory in trajectories:
        if by_turn:
            rows = [trajectory.reward - config.invalid_penalty * (not turn.valid) for turn in trajectory.turns]
        else:
            rows = [trajectory.reward - config.invalid_penalty * trajectory.n_invalid]
        returns += rows
        groups += [trajectory.group] * len(rows)
    returned, group = torch.tensor(returns, dtype=torch.float64), torch.tensor(groups, dtype=torch.long)
    lengths = [len(trajectory.turns) for trajectory in trajectories]

    def per_turn(values: Tensor) -> list[Tensor]:
        values = values.float()
        return list(values.split(lengths)) if by_turn else [v.expand(n) for v, n in zip(values, lengths, strict=True)]

    return Advantages(
        per_turn(group_advantages(returned, group)),
        per_turn(centred_returns(returned, group)),
        dead_group_share(returned, group),
    )


def build_rows(
    segments: Sequence[tuple[int, Segment]], pairs: Sequence[PairedSegment], advantages: Advantages
) -> list[Row]:
    """Rows of a step. Args: segments (index of the trajectory, segment), their pairs in the same order."""
    rows = []
    for (index, segment), pair in zip(segments, pairs, strict=True):
        turns = torch.from_numpy(pair.turn.astype(np.int64))
        logprobs = torch.from_numpy(segment.rollout_logprobs[segment.response_mask])
        rows.append(Row(pair, index, advantages.normalised[index][turns], advantages.centred[index][turns], logprobs))
    return rows


def micro_batches(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Rows of similar length together, each list at most `max_tokens` padded tokens (or a single longer row)."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row.width, reverse=True):
        if not batches or batches[-1][0].width * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


def collate(rows: Sequence[Row], of: Denominators, device: torch.device) -> Batch:
    """The flat tensors of a micro-batch, in the order of `rows`. Args: of, the denominators of its mini-batch."""
    lengths = torch.tensor([row.n_tokens for row in rows])

    def per_row(values: Sequence[float | int | bool], dtype: torch.dtype) -> Tensor:
        return torch.repeat_interleave(torch.tensor(values, dtype=dtype), lengths).to(device)

    def per_token(parts: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

    def known(parts: Sequence[Tensor | None]) -> Tensor | None:
        present = [part for part in parts if part is not None]
        return torch.cat(present).to(device) if len(present) == len(parts) else None

    distill = [of.scale(row.trajectory, distilled=True) if row.distilled else 0.0 for row in rows]
    return Batch(
        row=per_row(range(len(rows)), torch.long),
        trajectory=per_row([row.trajectory for row in rows], torch.long),
        turn=per_token([row.pair.turn for row in rows]),
        token_class=per_token([row.pair.token_class for row in rows]),
        mask=per_row([True] * len(rows), torch.bool),
        distilled=per_row([row.distilled for row in rows], torch.bool),
        advantages=torch.cat([row.advantages for row in rows]).to(device),
        rollout_logprobs=torch.cat([row.rollout_logprobs for row in rows]).to(device),
        old_logprobs=known([row.old_logprobs for row in rows]),
        reference_logprobs=known([row.reference_logprobs for row in rows]),
        scale=per_row([of.scale(row.trajectory) for row in rows], torch.float32),
        distill_scale=per_row(distill, torch.float32),
        n_tokens=of.tokens.total(),
        n_distilled=of.distilled.total(),
        centred=torch.cat([row.centred for row in rows]).to(device),
        teacher_logprobs=known([row.teacher_logprobs for row in rows]),
        step_teacher_logprobs=known([row.step_teacher_logprobs for row in rows]),
        step_distilled=known([row.step_distilled for row in rows]),
    )


def take_tokens(batch: Batch, pair: PairedPass, index: Int[Tensor, "N"]) -> tuple[Batch, PairedPass]:
    """Some tokens of a micro-batch, everything detached."""

    def taken(source: Batch | PairedPass) -> dict[str, Any]:
        fields = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
        tensors = {name: value.detach() for name, value in fields.items() if isinstance(value, Tensor)}
        return {name: value[:, index] if value.dim() == 3 else value[index] for name, value in tensors.items()}

    return dataclasses.replace(batch, **taken(batch)), dataclasses.replace(pair, **taken(pair))
