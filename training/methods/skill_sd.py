"""Skill-SD: GRPO and an importance-weighted estimate of the reverse KL to the skilled teacher.

    L = GRPO + coefficient * mean over tokens of  rho (exp(min(-d, 20)) - 1 + d)
    d = s - sg q,  rho = exp(min(s - sg b, 10))

Differences from its nearest relative, OPD: 1. the estimator k3, weighted by the ratio to the start-of-step policy,
which is differentiated; 2. the teacher has the weights of the rollout; 3. its skill is retrieved, as in the SDAR code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from diagnostics.paired import PairedPass
from training.batch import Batch
from training.distillation import branches, weighted_k3
from training.losses import selected
from training.method import LossTerm, Method, Needs, setting


@dataclass(frozen=True)
class SkillSdConfig:
    coefficient: float = setting(0.001, "paper")  # 0: plain GRPO
    skill: Literal["retrieved", "hindsight"] = setting("retrieved", "code")


def needs(config: SkillSdConfig, step: int) -> Needs:
    if not config.coefficient:
        return Needs()
    return Needs(config.skill, teacher="rollout", teacher_logprobs=True)


def loss(batch: Batch, pair: PairedPass, config: SkillSdConfig, step: int, modules: Any) -> list[LossTerm]:
    mask = batch.distilled
    student, teacher = branches(pair, mask)
    old = student.detach() if batch.old_logprobs is None else selected(batch.old_logprobs, mask)
    return [LossTerm("skill_sd", weighted_k3(student, teacher, old), mask, config.coefficient)]


METHOD = Method(
    "skill_sd", "Skill-SD (arXiv 2604.10674), as in the SDAR code", "sampled token", SkillSdConfig, needs, loss=loss
)
