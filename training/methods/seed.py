"""SEED: GRPO and token-level distillation from hindsight that the same weights wrote.

    L = GRPO + coefficient * mean over tokens of  -sg(q - s) s

A trajectory whose hindsight cannot be parsed keeps its reward terms and gets no distillation term. Differences from its
nearest relative, OPD: 1. the coefficient. Departure: the paper's first stage, supervised training on hindsight of an
external analyst, is left out. Ours where the paper is silent: see docs/methods.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from diagnostics.paired import PairedPass
from training.batch import Batch
from training.distillation import branches, policy_gradient
from training.method import LossTerm, Method, Needs, setting


@dataclass(frozen=True)
class SeedConfig:
    coefficient: float = setting(0.01, "ours")  # 0: plain GRPO
    skill: Literal["retrieved", "hindsight"] = setting("hindsight", "paper")


def needs(config: SeedConfig, step: int) -> Needs:
    if not config.coefficient:
        return Needs()
    return Needs(config.skill, teacher="current", teacher_logprobs=True)


def loss(batch: Batch, pair: PairedPass, config: SeedConfig, step: int, modules: Any) -> list[LossTerm]:
    value = policy_gradient(*branches(pair, batch.distilled))
    return [LossTerm("seed", value, batch.distilled, config.coefficient)]


METHOD = Method("seed", "SEED (arXiv 2607.14777)", "sampled token", SeedConfig, needs, loss=loss)
