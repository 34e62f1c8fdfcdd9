"""Token-level on-policy distillation: GRPO, and the gap to the skilled teacher as a second advantage of each token.

    L = GRPO + coefficient * mean over tokens of  -sg(q - s) s,   in expectation the gradient of KL(student || teacher)

Differences from its nearest relative, GRPO+OPSD: 1. the gap multiplies s, so that rejected tokens are pushed down;
2. the teacher has the current weights; 3. its skill is self-written hindsight. It is the token-level arm of PR-OPD's
ablation. Ours where the paper is silent: see docs/methods.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from diagnostics.paired import PairedPass
from training.batch import Batch
from training.distillation import branches, full_divergence, policy_gradient
from training.method import LossTerm, Method, Needs, setting


@dataclass(frozen=True)
class OpdConfig:
    coefficient: float = setting(1.0, "ours")  # 0: plain GRPO
    objective: Literal["sampled", "reverse_kl"] = setting("sampled", "ours")  # reverse_kl: over the full vocabulary
    skill: Literal["retrieved", "hindsight"] = setting("hindsight", "paper")


def needs(config: OpdConfig, step: int) -> Needs:
    if not config.coefficient:
        return Needs()
    divergence: Literal["none", "reverse_kl"] = "none" if config.objective == "sampled" else "reverse_kl"
    return Needs(config.skill, teacher="current", teacher_logprobs=True, divergence=divergence)


def loss(batch: Batch, pair: PairedPass, config: OpdConfig, step: int, modules: Any) -> list[LossTerm]:
    mask = batch.distilled
    value = policy_gradient(*branches(pair, mask)) if config.objective == "sampled" else full_divergence(pair, mask)
    return [LossTerm("opd", value, mask, config.coefficient)]


METHOD = Method(
    "opd", "token-level OPD, ablation arm of PR-OPD (arXiv 2609.36642)", "sampled token", OpdConfig, needs, loss=loss
)
