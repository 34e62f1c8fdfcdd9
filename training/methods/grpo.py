"""GRPO: the reward objective alone, the base that every other method adds to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from training.method import Method, Needs


@dataclass(frozen=True)
class GrpoConfig:
    """Nothing of its own: see ObjectiveConfig."""


def needs(config: Any, step: int) -> Needs:
    return Needs()


METHOD = Method(
    "grpo", "GRPO (Shao et al. 2024), as run on agents by the released SDAR code", "reward", GrpoConfig, needs
)
