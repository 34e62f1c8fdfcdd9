"""Skill-GRPO: GRPO of a player with the retrieved skill in its own prompt; evaluated with it (`*`) and without.

    L = GRPO, on responses sampled and scored with the skill in the context

Differences from its nearest relative, GRPO: 1. the skill in the player's prompt. Nobody teaches, and nothing is added.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.method import Method, Needs


@dataclass(frozen=True)
class SkillGrpoConfig:
    """Nothing of its own: see ObjectiveConfig and SkillsConfig."""


def needs(config: SkillGrpoConfig, step: int) -> Needs:
    return Needs("retrieved", seen_by="student")


METHOD = Method("skill_grpo", "Skill-GRPO, a baseline of SDAR (arXiv 2605.15155)", "prompt", SkillGrpoConfig, needs)
