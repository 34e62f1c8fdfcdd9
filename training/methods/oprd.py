"""OPRD: the student's states AT the response tokens become those of a teacher that knows the skill.

    L = GRPO + coefficient * mean over layers, tokens and coordinates of (student state - sg(teacher state))^2

Differences from its nearest relative, PR-OPD: 1. no projector; 2. squared distance of raw states, or of their
directions; 3. the state at each token, which has read it, not the one before; 4. a fixed teacher; 5. no Stage I.
Ours where the source is silent: see docs/methods.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor, nn

from diagnostics.paired import PairedPass
from training.batch import Batch
from training.losses import alignment, selected
from training.method import LossTerm, Method, Needs, setting


@dataclass(frozen=True)
class OprdConfig:
    coefficient: float = setting(1.0, "code")  # 0: plain GRPO
    layers: Literal["all", "last"] | tuple[int, ...] = setting("all", "ours")  # blocks, 0-based; (): none, loss 0
    normalise: bool = setting(False, "paper")  # states divided by their lengths first
    teacher: Literal["initial", "current"] = setting("initial", "paper")  # fixed, or the policy itself
    skill: Literal["retrieved", "hindsight"] = setting("hindsight", "ours")


def needs(config: OprdConfig, step: int) -> Needs:
    if not config.coefficient:
        return Needs()
    return Needs(config.skill, teacher=config.teacher, states="at")


def loss(batch: Batch, pair: PairedPass, config: OprdConfig, step: int, modules: nn.Module | None) -> list[LossTerm]:
    """The distance of the states, mean over the chosen layers."""
    value = state_distance(pair, config.layers, config.normalise, batch.distilled, "oprd")
    return [LossTerm("oprd", value, batch.distilled, config.coefficient)]


def state_distance(
    pair: PairedPass,
    layers: Literal["all", "last"] | tuple[int, ...],
    normalise: bool,
    mask: Bool[Tensor, "M"],
    method: str,
) -> Float[Tensor, "M"]:
    """Mean squared error of the student's states, over layers and coordinates.

    value = mean over layers and coordinates of (h_s - sg(h_T))^2;  normalised: of the directions, (2 - 2 cos) / D
    Source: OPRD. Args: pair, with states; mask, tokens with a teacher context; method, for messages.
    Returns: [M], in squared units of the states (normalised: in [0, 4 / D]); 0 outside the mask and without layers.
    Raises: ValueError when the pair holds no states, or on a layer that the model does not have.
    """
    if pair.student_states is None or pair.teacher_states is None:
        raise ValueError(f"{method} needs the hidden states of both branches, which the pair does not hold")
    chosen = _blocks(layers, len(pair.student_states), method)
    student, teacher = pair.student_states[chosen], pair.teacher_states[chosen].detach()
    if not chosen:
        return student.new_zeros(len(mask))  # a mean over nothing is 0 here, not 0/0
    if normalise:
        return alignment(student, teacher, mask).mean(0) / student.shape[-1]
    inside = mask[None, :, None]
    return (selected(student, inside) - selected(teacher, inside)).square().mean(-1).mean(0)


def _blocks(layers: Literal["all", "last"] | tuple[int, ...], blocks: int, method: str) -> list[int]:
    if layers == "all":
        return list(range(blocks))
    chosen = [blocks - 1] if layers == "last" else list(layers)
    outside = [layer for layer in chosen if not 0 <= layer < blocks]
    if outside:
        raise ValueError(f"{method} layer {outside[0]} does not exist; the model has blocks 0 to {blocks - 1}")
    return chosen


METHOD = Method("oprd", "OPRD (arXiv 2606.06021)", "hidden states", OprdConfig, needs, loss=loss)
