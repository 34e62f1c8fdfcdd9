"""The token weights of the methods that have one, as functions of the gap: what diagnostics hold against each other."""

from __future__ import annotations

import torch
from torch import Tensor

from diagnostics.measure import WeightFn
from training.distillation import gate, response_normalised
from training.methods.pcsd import PcsdConfig, token_weights
from training.methods.sdar import SdarConfig
from training.methods.sod import SodConfig, turn_weights


def method_weights() -> dict[str, WeightFn]:
    """Weight of each method at its default settings, by name.

    w(gap, turn, row): gap [M] nats (teacher minus student log-prob of the sampled token); turn, row [M], the tokens of
    a response share both. sdar: sigmoid(beta gap); sdar_normalised: the same over its mean in the response; sdar_hard:
    gap > 0; pcsd: see methods/pcsd.py; sod: one weight a turn; constant: 1, what a method without weights gives.
    """
    return {
        "sdar": _sdar,
        "sdar_normalised": lambda gap, turn, row: response_normalised(_sdar(gap, turn, row), _all(gap), row, turn),
        "sdar_hard": lambda gap, turn, row: gate("hard", gap, SdarConfig().beta),
        "pcsd": lambda gap, turn, row: token_weights(gap, _all(gap), row, turn, PcsdConfig()).weight,
        "sod": lambda gap, turn, row: turn_weights(gap.detach().abs(), row, turn, _all(gap), SodConfig().cap),
        "constant": lambda gap, turn, row: torch.ones_like(gap),
    }


def _sdar(gap: Tensor, turn: Tensor, row: Tensor) -> Tensor:
    return gate("gap", gap, SdarConfig().beta)


def _all(gap: Tensor) -> Tensor:
    return torch.ones_like(gap, dtype=torch.bool)
