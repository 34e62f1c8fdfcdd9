"""What the cluster does not have is said before any work."""

from dataclasses import replace

import pytest

from training.cluster.refuse import refuse
from training.config import Config
from training.methods.sdar import SdarConfig
from training.settings import with_method


@pytest.mark.parametrize("method", ["grpo", "sdar", "pcsd", "pr_opd", "rlsd", "skill_sd"])
def test_most_methods_run(method: str) -> None:
    refuse(with_method(replace(Config(), steps=3), method))


@pytest.mark.parametrize(("method", "what"), [("opid", "single turns"), ("skillrl", "library that grows")])
def test_two_do_not(method: str, what: str) -> None:
    with pytest.raises(ValueError, match=f"{method!r} needs .*{what}.*--engine local"):
        refuse(with_method(replace(Config(), steps=3), method))


def test_a_distribution_of_other_weights_is_refused() -> None:
    config = replace(Config(), steps=1, method="sdar", method_config=SdarConfig(objective="reverse_kl"))
    with pytest.raises(ValueError, match="full distribution"):
        refuse(config)
