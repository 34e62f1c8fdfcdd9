"""GRPO+OPSD: GRPO and an ungated log-ratio to the skilled teacher. The baseline whose published forms disagree in sign.

    L = GRPO + coefficient * mean over tokens of  (s - sg q)          as the paper writes it: LOWERS every sampled token
                                              or  1/2 (sg q - s)      as released: RAISES every sampled token

In both the teacher carries no information into the gradient, whose expectation on the policy's own tokens is zero.
Differences from its nearest relative, SDAR: 1. no gate; 2. the sign of the paper's form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from diagnostics.paired import PairedPass
from training.batch import Batch
from training.distillation import branches, sampled_gap
from training.method import LossTerm, Method, Needs, setting


@dataclass(frozen=True)
class GrpoOpsdConfig:
    coefficient: float = setting(0.01, "paper")  # 0: plain GRPO
    form: Literal["paper", "code"] = setting("paper", "paper")
    skill: Literal["retrieved", "hindsight"] = setting("retrieved", "paper")


def needs(config: GrpoOpsdConfig, step: int) -> Needs:
    if not config.coefficient:
        return Needs()
    return Needs(config.skill, teacher="rollout", teacher_logprobs=True)


def loss(batch: Batch, pair: PairedPass, config: GrpoOpsdConfig, step: int, modules: Any) -> list[LossTerm]:
    mask = batch.distilled
    value = sampled_gap(*branches(pair, mask))
    if config.form == "paper":
        return [LossTerm("grpo_opsd", -value, mask, config.coefficient)]
    return [LossTerm("grpo_opsd", value, mask, config.coefficient, torch.full_like(value, 0.5))]


METHOD = Method(
    "grpo_opsd", "GRPO+OPSD, baseline of SDAR (arXiv 2605.15155)", "sampled token", GrpoOpsdConfig, needs, loss=loss
)
