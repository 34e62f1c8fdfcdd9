"""What the cluster does not have is said before any work."""

from dataclasses import replace

import pytest

from training.cluster.refuse import refuse
from training.config import Config
from training.method import available_methods
from training.methods.sdar import SdarConfig
from training.settings import with_method


@pytest.mark.parametrize("method", available_methods())
def test_every_method_runs_as_it_is(method: str) -> None:
    refuse(with_method(replace(Config(), steps=3), method))


def test_a_distribution_of_other_weights_is_refused() -> None:
    config = replace(Config(), steps=1, method="sdar", method_config=SdarConfig(objective="reverse_kl"))
    with pytest.raises(ValueError, match="full distribution"):
        refuse(config)
