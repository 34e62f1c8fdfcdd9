"""What the cluster does not have. No verl here."""

from __future__ import annotations

from training.config import Config
from training.method import load_method


def refuse(config: Config) -> None:
    """Raises ValueError for a method that reads the full distribution of weights that are not the student's.

    Their head would have to be gathered beside the student's.
    """
    method = load_method(config.method)
    own = method.config() if config.method_config is None else config.method_config
    for step in range(config.steps):
        needs = method.needs(own, step)
        if needs.divergence != "none" and needs.teacher != "current":
            raise ValueError(
                f"method {config.method!r} needs a full distribution of weights that are not the student's, which only "
                "--engine local has"
            )
