"""PR-OPD: align what the student thinks without the skill with what it thinks with it, at every layer.

    L = GRPO + coefficient * mean over layers and tokens of || p/|p| - sg(h/|h|) ||^2,   p = projector(student state)

Stage I (steps before `start_step`) is GRPO alone. In Stage II the policy writes one skill a finished trajectory and
reads its own response again, without and with that skill, both at the current weights; nothing in the output space.
Differences from its nearest relative, GRPO: 1. the alignment term; 2. hindsight skills; 3. a projector a layer.
Ours where the paper is silent: see docs/methods.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from diagnostics.paired import PairedPass
from training.batch import Batch
from training.losses import alignment
from training.method import LossTerm, Method, Needs, setting
from training.models.projector import Projector


@dataclass(frozen=True)
class PrOpdConfig:
    start_step: int = setting(100, "paper")  # steps of Stage I; 0 in a branch from a Stage-I checkpoint
    coefficient: float = setting(0.01, "paper")  # 0: plain GRPO
    reward_coefficient: float = setting(1.0, "paper")  # of Stage II; 0: alignment only
    layers: Literal["all"] | tuple[int, ...] = setting("all", "ours")  # blocks, 0-based; (): none, the loss is 0
    projector: bool = setting(True, "paper")
    hidden: int = setting(512, "paper")
    projector_lr: float = setting(1e-4, "paper")
    projector_updates: int = setting(0, "ours")  # extra projector-only updates a step, for recipes of few updates


def needs(config: PrOpdConfig, step: int) -> Needs:
    if step < config.start_step:
        return Needs()
    alone = Needs(policy_coefficient=config.reward_coefficient, regularised=bool(config.reward_coefficient))
    if not config.coefficient:
        return alone
    return replace(alone, skill="hindsight", teacher="current", states="before")


def loss(batch: Batch, pair: PairedPass, config: PrOpdConfig, step: int, projector: nn.Module | None) -> list[LossTerm]:
    """The alignment term, and per layer the projected cosine (coefficient 0: logged only)."""
    if pair.student_states is None or pair.teacher_states is None:
        raise ValueError("pr_opd needs the hidden states of both branches, which the pair does not hold")
    layers = _layers(config, len(pair.student_states))
    student, teacher = pair.student_states[layers], pair.teacher_states[layers]
    values = alignment(student if projector is None else projector(student), teacher, batch.distilled)
    mean = values.mean(0) if layers else student.new_zeros(len(batch.distilled))  # no layers: 0, not 0/0
    cosines = 1 - values.detach() / 2
    logged = [
        LossTerm(f"pr_opd/cosine_projected/{layer}", cosine, batch.distilled, 0.0)
        for layer, cosine in zip(layers, cosines, strict=True)
    ]
    return [LossTerm("pr_opd", mean, batch.distilled, config.coefficient), *logged]


def modules(model_config: Any, config: PrOpdConfig) -> nn.Module | None:
    layers = _layers(config, model_config.num_hidden_layers)
    if not (config.projector and layers):
        return None
    return Projector(
        len(layers), model_config.hidden_size, config.hidden, config.projector_lr, config.projector_updates
    )


def _layers(config: PrOpdConfig, blocks: int) -> list[int]:
    layers = list(range(blocks)) if config.layers == "all" else list(config.layers)
    outside = [layer for layer in layers if not 0 <= layer < blocks]
    if outside:
        raise ValueError(f"pr_opd layer {outside[0]} does not exist; the model has blocks 0 to {blocks - 1}")
    return layers


METHOD = Method("pr_opd", "PR-OPD (arXiv 2609.36642)", "hidden states", PrOpdConfig, needs, loss=loss, modules=modules)
