"""SkillRL: Skill-GRPO with a library that grows from the policy's failures at training tasks.

    L = GRPO, on responses sampled and scored with the skill in the context

After each step the policy writes a skill for failed attempts at the task types it is weak at, and the library takes
some of them in. Differences from its nearest relative, Skill-GRPO: 1. the growth, see training/skills/growth.py.
Ours where the paper is silent, and what is left out: see docs/methods.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.method import Method, Needs, setting
from training.skills.growth import Growth


@dataclass(frozen=True)
class SkillRlConfig:
    threshold: float = setting(0.4, "code")  # success of a task type in a step under which its skills are added to
    per_step: int = setting(3, "code")  # skills added a step, at most
    keep: int = setting(5, "ours")  # grown skills of a task type, the newest


def needs(config: SkillRlConfig, step: int) -> Needs:
    return Needs("retrieved", seen_by="student", grow=Growth(config.threshold, config.per_step, config.keep))


METHOD = Method("skillrl", "SkillRL (arXiv 2602.08234)", "prompt", SkillRlConfig, needs)
