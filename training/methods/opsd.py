"""OPSD: distillation alone, without the reward's policy gradient.

    L = KL to the reference - entropy bonus + coefficient * mean over tokens of  sigmoid(beta gap) (sg q - s)

Differences from its nearest relative, SDAR: 1. the surrogate has coefficient 0; 2. the teacher is the frozen policy the
run started from; 3. the full-vocabulary objectives are not gated. Ours where the paper is silent: see docs/methods.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from diagnostics.paired import PairedPass
from training.batch import Batch
from training.distillation import branches, full_divergence, gate, sampled_gap
from training.method import LossTerm, Method, Needs, setting


@dataclass(frozen=True)
class OpsdConfig:
    coefficient: float = setting(0.01, "code")  # 0: KL and entropy terms alone
    beta: float = setting(5.0, "code")  # of the gate
    objective: Literal["gated", "reverse_kl", "jsd", "forward_kl"] = setting("gated", "code")
    teacher: Literal["initial", "rollout"] = setting("initial", "paper")  # rollout: the released code
    skill: Literal["retrieved", "hindsight"] = setting("retrieved", "paper")


def needs(config: OpsdConfig, step: int) -> Needs:
    if not config.coefficient:
        return Needs(policy_coefficient=0.0)
    return Needs(
        config.skill,
        teacher=config.teacher,
        teacher_logprobs=True,
        divergence="none" if config.objective == "gated" else config.objective,
        policy_coefficient=0.0,
    )


def loss(batch: Batch, pair: PairedPass, config: OpsdConfig, step: int, modules: Any) -> list[LossTerm]:
    mask = batch.distilled
    if config.objective != "gated":
        return [LossTerm("opsd", full_divergence(pair, mask), mask, config.coefficient)]
    student, teacher = branches(pair, mask)
    weight = gate("gap", teacher - student, config.beta)
    return [LossTerm("opsd", sampled_gap(student, teacher), mask, config.coefficient, weight)]


METHOD = Method(
    "opsd", "OPSD (arXiv 2601.18734), as run on agents by the SDAR code", "sampled token", OpsdConfig, needs, loss=loss
)
