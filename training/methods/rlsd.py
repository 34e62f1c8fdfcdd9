"""RLSD: the reward gives the direction of every token, the skill's reader its size.

    A_t = A [(1 - lam) + lam w_t],   w_t = clip(exp(sign(A) (q_t - b_t)), 1 - clip, 1 + clip)

No term in the loss. `lam` falls linearly to 0 over `decay_steps`; from then on no teacher is read and the step is GRPO.
Differences from its nearest relative, GRPO: 1. the advantage above; 2. a skill and a teacher, the policy of the start
of the step, while lam > 0. Ours where the source is silent: see docs/methods.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from diagnostics.paired import PairedPass
from training.advantages import teacher_gap
from training.batch import Batch
from training.method import Method, Needs, setting


@dataclass(frozen=True)
class RlsdConfig:
    lam: float = setting(0.5, "paper")  # share of the advantage that is reweighted, at step 0; 0: plain GRPO
    decay_steps: int = setting(100, "code")  # steps until lam is 0
    clip: float = setting(0.2, "paper")  # w stays within 1 +- clip
    skill: Literal["retrieved", "hindsight"] = setting("retrieved", "code")


def needs(config: RlsdConfig, step: int) -> Needs:
    if not mixing(config, step):
        return Needs()
    return Needs(config.skill, teacher="rollout", teacher_logprobs=True)


def mixing(config: RlsdConfig, step: int) -> float:
    """lam of a step: lam (1 - step / decay_steps), from `decay_steps` on exactly 0. Returns: dimensionless, >= 0."""
    return config.lam * (1 - step / config.decay_steps) if step < config.decay_steps else 0.0


def evidence(advantages: Float[Tensor, "M"], gap: Float[Tensor, "M"], clip: float) -> Float[Tensor, "M"]:
    """How much more (or less) likely a token is to the teacher, read in favour of the advantage's sign.

    w = clip(exp(sign(A) gap), 1 - clip, 1 + clip)
    Source: RLSD, as in the released SDAR code. Args: gap = q - b, nats. Returns: [M], dimensionless; 1 where A is 0.
    """
    return (advantages.sign() * gap).exp().clamp(1 - clip, 1 + clip)


def advantage(batch: Batch, pair: PairedPass, config: RlsdConfig, step: int) -> Tensor:
    """A [(1 - lam) + lam w] where there is a teacher context, A elsewhere."""
    lam = mixing(config, step)
    if not lam:
        return batch.advantages
    gap = teacher_gap(batch.old_logprobs, pair.teacher_logprobs, batch.distilled)
    weight = evidence(batch.advantages, gap, config.clip)
    return torch.where(batch.distilled, batch.advantages * ((1 - lam) + lam * weight), batch.advantages)


METHOD = Method("rlsd", "RLSD (arXiv 2604.03128)", "advantage", RlsdConfig, needs, advantage=advantage)
