"""Real Ray, verl and gloo: three steps of each method through the agent loop, two workers, killed processes."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from diagnostics.artifact import load_trajectories
from diagnostics.records import Trajectory
from tests.cluster.ray_run import STEPS, config_of
from training.checkpoint import latest_complete
from training.envs.folders import household_games
from training.models.load import TINY, load_policy
from training.monitor import read_metrics
from training.session import Session
from training.start import start

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl is not installed here; `make test-cluster` runs this"
)
PATIENCE = 900  # seconds, on a machine that does other things too
CASES = ("grpo", "sdar", "pcsd", "pr_opd", "opid", "skillrl", "windowed", "own")
TERM = {"windowed": ["pr_opd"], "grpo": [], "opid": [], "skillrl": []}
OTHERWISE = ("time/", "eval/", "attempt")  # what is not computed, or not in a run of one step
OWN = '''"""A distribution taught by the same weights with a hindsight skill."""

from __future__ import annotations

from dataclasses import dataclass

from training.method import LossTerm, Method, Needs, setting


@dataclass(frozen=True)
class OwnConfig:
    coefficient: float = setting(0.5, "ours")


def needs(config, step):
    return Needs("hindsight", teacher="current", teacher_logprobs=True, divergence="reverse_kl")


def loss(batch, pair, config, step, modules):
    return [LossTerm("own", pair.divergence, batch.distilled, config.coefficient)]


METHOD = Method("own", "none", "full distribution", OwnConfig, needs, loss=loss)
'''


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("games") / "household"
    return household_games(folder, {"train": 2, "valid_seen": 2, "valid_unseen": 2}, 0, 1)


@pytest.fixture(scope="module")
def runs(games: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a run of each case."""
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "own.py").write_text(OWN)
    said = folder / "said.txt"
    run = begin(said, "tests.cluster.ray_run", games, folder, *(method(folder, case) for case in CASES))
    assert run.wait(PATIENCE) == 0, said.read_text()[-2000:]
    return folder


def method(folder: Path, case: str) -> str:
    return str(folder / "own.py") if case == "own" else case


def begin(said: Path, module: str, *words: Any) -> subprocess.Popen[bytes]:
    """Args: said, where its complaints go: a pipe that nobody empties would stop it."""
    command = [sys.executable, "-m", module, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said.open("w"))


@pytest.mark.parametrize("case", CASES)
def test_three_steps(games: Path, runs: Path, case: str) -> None:
    """Losses are finite, weights have moved, and the local engine plays the exported policy as the cluster did."""
    run, config = runs / case, config_of(method(runs, case), str(games))
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for row in rows[1:]:
        losses = {name: value for name, value in row.items() if name.startswith("loss/")}
        assert {"loss/policy", "loss/kl", *(f"loss/{term}" for term in TERM.get(case, [case]))} <= losses.keys()
        assert all(value is not None and math.isfinite(value) for value in losses.values()), losses
        assert row["tokens/train"] > 0 and row["kl/rollout_train"] < 1e-4  # one policy plays and learns
    checkpoint = run / f"checkpoints/step_{STEPS}"
    before, after = load_file(TINY / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert before.keys() == after.keys()
    assert any((before[name].float() - after[name]).abs().max() > 1e-5 for name in before)
    assert (config.method == "pr_opd") == (checkpoint / "modules.safetensors").is_file()
    assert json.loads((checkpoint / "config.json").read_text())["dtype"] == "float32"
    assert json.loads((run / "method.json").read_text())["name"] == Path(config.method).stem
    for step, source in ((0, TINY), (STEPS, checkpoint)):  # the panel before and after
        model, tokenizer = load_policy(source)
        with Session(config, model, tokenizer, step) as session:
            here = session.evaluate(config.eval.seed)
        there = load_trajectories(run / f"trajectories/household_valid_seen_step{step}_seed{config.eval.seed}")
        assert tokens(here) == tokens(there) and len(here) == 2
        assert rows[step]["eval/success"] == pytest.approx(sum(t.success for t in here) / len(here))


@pytest.mark.parametrize("case", CASES)
def test_the_first_step_is_that_of_one_machine(games: Path, runs: Path, tmp_path: Path, case: str) -> None:
    """The same episodes, skills, rows and losses, under the same names: a draw depends on its key alone."""
    config = config_of(method(runs, case), str(games))
    start(replace(config, steps=1, eval=replace(config.eval, every=0)), tmp_path, {})
    same(read_metrics(tmp_path)[0], read_metrics(runs / case)[1])
    sample = Path("samples/step_0.json")  # teacher's contexts, with the skills in them
    taught = case not in ("grpo", "skillrl")
    assert (tmp_path / sample).is_file() == (runs / case / sample).is_file() == taught
    if taught:
        assert (tmp_path / sample).read_text() == (runs / case / sample).read_text()


def test_two_workers_and_what_is_killed(games: Path, runs: Path, tmp_path: Path) -> None:
    """A trainer's worker dies, then the process that plays; the third start, with one worker, ends the run."""
    config = config_of("pr_opd", str(games))
    asked, run, said = tmp_path / "asked.json", tmp_path / "run", tmp_path / "said.txt"
    asked.write_text(json.dumps(asdict(config)))
    words = ["train", "--engine", "cluster", "--config", asked, "--out", run, "--steps", STEPS + 1]
    done = 0
    for name in ("ray::WorkerDict", "ray::AgentLoopWorker"):
        goes = begin(said, "undertow", *words, "--cluster.gpus", 2)
        wait_for(goes, said, run / f"checkpoints/step_{done + 1}/manifest.json")
        assert len(named(goes, "ray::WorkerDict")) == 2
        os.kill(named(goes, name)[0].pid, signal.SIGKILL)
        assert goes.wait(PATIENCE) == 2, said.read_text()[-2000:]
        kept = latest_complete(run)
        assert kept is not None
        done = int(kept.name.removeprefix("step_"))
        assert done <= STEPS
        assert said.read_text().strip().splitlines()[-1] == (
            "undertow: a worker of the cluster died (killed, or out of memory); the same command goes on from "
            f"{kept.name}"
        )
    same(read_metrics(run)[1], read_metrics(runs / "pr_opd")[1], but=("states/effective_rank",))
    goes = begin(said, "undertow", *words, "--cluster.gpus", 1)
    assert goes.wait(PATIENCE) == 0, said.read_text()[-2000:]
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(STEPS + 2))
    assert {row["attempt"] for row in rows} == {0, 1, 2}
    assert (run / f"checkpoints/step_{STEPS + 1}/modules.safetensors").is_file()


def wait_for(run: subprocess.Popen[bytes], said: Path, file: Path) -> None:
    until = time.monotonic() + PATIENCE
    while not file.is_file():
        assert run.poll() is None and time.monotonic() < until, said.read_text()[-2000:]
        time.sleep(0.2)


def named(run: subprocess.Popen[bytes], name: str) -> list[psutil.Process]:
    return [p for p in psutil.Process(run.pid).children(recursive=True) if name in " ".join(p.cmdline())]


def same(here: dict[str, Any], there: dict[str, Any], but: tuple[str, ...] = ()) -> None:
    """Args: but, what is a mean over micro-batches, of which two workers have smaller ones."""
    ours, theirs = ({n: v for n, v in row.items() if not n.startswith((*OTHERWISE, *but))} for row in (here, there))
    assert ours.keys() == theirs.keys()
    assert theirs == {name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in ours.items()}


def tokens(episodes: Sequence[Trajectory]) -> dict[str, list[list[int]]]:
    return {episode.id: [segment.ids.tolist() for segment in episode.segments] for episode in episodes}
