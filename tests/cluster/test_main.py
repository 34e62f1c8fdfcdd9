"""The printed command says what is run, and the end of a cluster is told in one sentence."""

import importlib.util
from pathlib import Path

import pytest

from training.cluster.layout import ClusterConfig, Layout
from training.cluster.verl_config import command, overrides
from training.config import RECIPES

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl is not installed here; `make test-cluster` runs this"
)


def test_the_printed_command_holds_every_setting() -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    layout = Layout("none", 1, 4096, 0.5)
    values = overrides(RECIPES["tiny-pr-opd"], Path("runs/it's"), ClusterConfig(), layout, model="tiny", reference=True)
    python, dash_m, module, *words = command(values)
    assert (python, dash_m, module) == ("python", "-m", "training.cluster.main")
    parsed = {word.key_or_group: word.value() for word in OverridesParser.create().parse_overrides(words)}
    assert parsed == values


def test_an_error_of_ours_comes_out_of_however_many_processes() -> None:
    import ray.exceptions

    from training.cluster.main import _cause

    first = ValueError("unknown task")
    inner = ray.exceptions.RayTaskError("play", "trace", first)
    assert _cause(ray.exceptions.RayTaskError("run", "trace", inner.as_instanceof_cause())) is first


def test_what_died_and_where_the_run_goes_on(tmp_path: Path) -> None:
    import ray.exceptions

    from training.cluster.main import _sentence

    assert _sentence(ray.exceptions.ActorDiedError(), tmp_path) == (
        "a worker of the cluster died (killed, or out of memory); the same command starts anew"
    )
    assert _sentence(RuntimeError("2 of 4 episodes were lost"), tmp_path) == (
        "the cluster stopped: 2 of 4 episodes were lost; the same command starts anew"
    )
