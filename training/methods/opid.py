"""OPID: centred returns, and the gaps of two teachers: one knows a skill of the episode, one a skill of the turn.

    A_t = (R - mean R) + episode_coefficient (q_episode - b) + step_coefficient m_step (q_step - b)

Differences from its nearest relative, token OPD: 1. the gap is added to the advantage; 2. returns are centred in the
group, not divided by their deviation; 3. a second teacher reads a skill of the single turn, m_step marks the tokens
that have one; 4. the policy writes both skills itself. Ours where the source is silent: see docs/methods.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from diagnostics.paired import PairedPass
from training.advantages import teacher_gap
from training.batch import Batch
from training.method import Method, Needs, setting


@dataclass(frozen=True)
class OpidConfig:
    episode_coefficient: float = setting(0.001, "code")
    step_coefficient: float = setting(0.001, "code")  # both 0: centred returns alone
    skill: Literal["retrieved", "hindsight"] = setting("hindsight", "paper")  # retrieved: none for single turns


def needs(config: OpidConfig, step: int) -> Needs:
    step_skill = bool(config.step_coefficient) and config.skill == "hindsight"
    if not (config.episode_coefficient or step_skill):
        return Needs()
    return Needs(config.skill, step_skill=step_skill, teacher="rollout", teacher_logprobs=True)


def advantage(batch: Batch, pair: PairedPass, config: OpidConfig, step: int) -> Tensor:
    """Centred returns plus the gap of each teacher where it has a context."""
    if batch.centred is None:
        raise ValueError("opid needs the centred returns, which the batch does not hold")
    total = batch.centred
    if config.episode_coefficient:
        gap = teacher_gap(batch.old_logprobs, pair.teacher_logprobs, batch.distilled)
        total = total + config.episode_coefficient * gap
    if needs(config, step).step_skill and batch.step_distilled is not None:  # None: no turn has a skill of its own
        gap = teacher_gap(batch.old_logprobs, batch.step_teacher_logprobs, batch.step_distilled)
        total = total + config.step_coefficient * gap
    return total


METHOD = Method("opid", "OPID (arXiv 2606.26790)", "advantage", OpidConfig, needs, advantage=advantage)
