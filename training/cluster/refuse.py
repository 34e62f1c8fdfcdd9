"""What the cluster does not have. No verl here."""

from __future__ import annotations

from training.config import Config
from training.method import load_method


def refuse(config: Config) -> None:
    """Raises ValueError for what a method needs and the cluster does not have."""
    method = load_method(config.method)
    own = method.config() if config.method_config is None else config.method_config
    for step in range(config.steps):
        needs = method.needs(own, step)
        missing = {
            "skills for single turns": needs.step_skill,
            "a library that grows": needs.grow is not None,
            "a full distribution of weights that are not the student's": needs.divergence != "none"
            and needs.teacher != "current",
        }
        for what, asked in missing.items():
            if asked:
                raise ValueError(f"method {config.method!r} needs {what}, which only --engine local has")
