"""SDAR: GRPO, and the teacher's log-probability of each sampled token, weighed by a gate on the gap.

    L = GRPO + coefficient * mean over tokens of  g (sg q - s),   g = sigmoid(beta gap),  gap = q - s

Gate and teacher are detached: the gradient on s is -g, so every sampled token is raised, those that the skilled teacher
prefers most. Differences from its nearest relative, GRPO+OPSD: 1. the gate (beta 0 is GRPO+OPSD's released form).
Ours where the paper is silent: see docs/methods.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from diagnostics.paired import PairedPass
from training.batch import Batch
from training.distillation import branches, full_divergence, gate, response_normalised, sampled_gap
from training.losses import selected
from training.method import LossTerm, Method, Needs, setting


@dataclass(frozen=True)
class SdarConfig:
    coefficient: float = setting(0.01, "paper")  # 0: plain GRPO
    beta: float = setting(5.0, "paper")  # 0: every gate is 1/2
    gate: Literal["gap", "entropy", "soft_or", "hard"] = setting("gap", "paper")
    normalise: Literal["none", "response"] = setting("none", "paper")  # response: weights over their mean in a turn
    objective: Literal["sampled", "reverse_kl", "jsd", "forward_kl"] = setting("sampled", "paper")
    skill: Literal["retrieved", "hindsight"] = setting("retrieved", "paper")


def needs(config: SdarConfig, step: int) -> Needs:
    if not config.coefficient:
        return Needs()
    return Needs(
        config.skill,
        teacher="rollout",
        teacher_logprobs=True,
        divergence="none" if config.objective == "sampled" else config.objective,
        entropy=config.gate in ("entropy", "soft_or"),
    )


def weights(batch: Batch, pair: PairedPass, config: SdarConfig) -> Float[Tensor, "M"]:
    """The gate of each token, in [0, 1] unless normalised; anything outside the mask."""
    mask = batch.distilled
    student, teacher = branches(pair, mask)
    entropy = None if pair.student_entropy is None else selected(pair.student_entropy, mask)
    weight = gate(config.gate, teacher - student, config.beta, entropy)
    if config.normalise == "response":
        return response_normalised(weight, mask, batch.row, batch.turn)
    return weight


def loss(batch: Batch, pair: PairedPass, config: SdarConfig, step: int, modules: Any) -> list[LossTerm]:
    mask = batch.distilled
    value = sampled_gap(*branches(pair, mask)) if config.objective == "sampled" else full_divergence(pair, mask)
    return [LossTerm("sdar", value, mask, config.coefficient, weights(batch, pair, config))]


METHOD = Method("sdar", "SDAR (arXiv 2605.15155)", "sampled token", SdarConfig, needs, loss=loss)
