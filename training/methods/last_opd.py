"""LastOPD: states of the last block for a few steps, then over to token OPD before they can collapse.

    L = GRPO + coefficient [a |h_s - sg(h_T)|^2 / D  -  (1 - a) sg(q - s) s],   a = 1 - (step - start_step) / fade_steps

`a` falls from 1 to 0 and stays there. Before `start_step` GRPO alone.
Differences from its nearest relative, OPRD: 1. the last block only; 2. the cross-fade into token OPD; 3. `start_step`.
Ours where the source is silent: see docs/methods.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from diagnostics.paired import PairedPass
from training.batch import Batch
from training.distillation import branches, policy_gradient
from training.method import LossTerm, Method, Needs, setting
from training.methods.oprd import state_distance


@dataclass(frozen=True)
class LastOpdConfig:
    coefficient: float = setting(1.0, "ours")  # 0: plain GRPO
    start_step: int = setting(0, "ours")  # steps of GRPO alone
    fade_steps: int = setting(10, "paper")  # steps from states alone to tokens alone
    normalise: bool = setting(False, "ours")  # states divided by their lengths first
    teacher: Literal["initial", "current"] = setting("initial", "paper")  # fixed, or the policy itself
    skill: Literal["retrieved", "hindsight"] = setting("hindsight", "ours")


def needs(config: LastOpdConfig, step: int) -> Needs:
    if step < config.start_step or not config.coefficient:
        return Needs()
    share = state_share(config, step)
    states: Literal["none", "at"] = "at" if share else "none"
    return Needs(config.skill, teacher=config.teacher, teacher_logprobs=share < 1, states=states)


def state_share(config: LastOpdConfig, step: int) -> float:
    """`a`, the share of the state term: 1 at `start_step`, 0 from `fade_steps` later on. Returns: in [0, 1]."""
    done = step - config.start_step
    return 1 - done / config.fade_steps if done < config.fade_steps else 0.0


def loss(batch: Batch, pair: PairedPass, config: LastOpdConfig, step: int, modules: nn.Module | None) -> list[LossTerm]:
    """The terms whose share of this step is not 0: states of the last block, sampled tokens."""
    share, terms = state_share(config, step), []
    if share:
        value = state_distance(pair, "last", config.normalise, batch.distilled, "last_opd")
        terms.append(LossTerm("last_opd/states", value, batch.distilled, config.coefficient * share))
    if share < 1:
        value = policy_gradient(*branches(pair, batch.distilled))
        terms.append(LossTerm("last_opd/tokens", value, batch.distilled, config.coefficient * (1 - share)))
    return terms


METHOD = Method("last_opd", "LastOPD (arXiv 2609.28845)", "hidden states", LastOpdConfig, needs, loss=loss)
