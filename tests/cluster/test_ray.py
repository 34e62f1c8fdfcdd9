"""Three steps of each method on real Ray: agent loop, FSDP, weight transfer, checkpoint; a worker that is killed."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
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

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl is not installed here; `make test-cluster` runs this"
)
PATIENCE = 900  # seconds, on a machine that does other things too


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("games") / "household"
    return household_games(folder, {"train": 2, "valid_seen": 2, "valid_unseen": 2}, 0, 1)


def start(method: str, games: Path, run: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.cluster.ray_run", method, str(games), str(run)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("method", ["grpo", "sdar", "pcsd"])
def test_three_steps(games: Path, tmp_path: Path, method: str) -> None:
    run = start(method, games, tmp_path / method)
    _, said = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0, said[-2000:]
    check(method, games, tmp_path / method)


def test_a_killed_worker_is_told_in_one_sentence_and_the_run_goes_on(games: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pr_opd"
    run = start("pr_opd", games, folder)
    until = time.monotonic() + PATIENCE
    while not (folder / "checkpoints/step_1/manifest.json").is_file():
        assert run.poll() is None and time.monotonic() < until, run.communicate()[1][-2000:]
        time.sleep(0.5)
    workers = [
        p for p in psutil.Process(run.pid).children(recursive=True) if "ray::WorkerDict" in " ".join(p.cmdline())
    ]
    assert len(workers) == 1
    os.kill(workers[0].pid, signal.SIGKILL)
    _, said = run.communicate(timeout=PATIENCE)
    assert run.returncode == 1
    last = said.strip().splitlines()[-1]
    kept = latest_complete(folder)
    assert kept is not None
    assert last.endswith(
        f"a worker of the cluster died (killed, or out of memory); the same command goes on from {kept.name}"
    )
    again = start("pr_opd", games, folder)
    _, said = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, said[-2000:]
    check("pr_opd", games, folder)
    assert {row["attempt"] for row in read_metrics(folder)} == {0, 1}


def check(method: str, games: Path, run: Path) -> None:
    """Losses are finite, weights have moved, and the local engine plays the exported policy as the cluster did."""
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for row in rows[1:]:
        losses = {name: value for name, value in row.items() if name.startswith("loss/")}
        assert {"loss/policy", "loss/kl"} <= losses.keys()
        assert method == "grpo" or f"loss/{method}" in losses
        assert all(value is not None and math.isfinite(value) for value in losses.values()), losses
        assert row["tokens/train"] > 0 and row["kl/rollout_train"] < 1e-4  # one policy plays and learns
    checkpoint = run / f"checkpoints/step_{STEPS}"
    before, after = load_file(TINY / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert before.keys() == after.keys()
    assert any((before[name].float() - after[name]).abs().max() > 1e-5 for name in before)
    assert (method == "pr_opd") == (checkpoint / "modules.safetensors").is_file()
    assert json.loads((checkpoint / "config.json").read_text())["dtype"] == "float32"

    config = config_of(method, str(games))
    model, tokenizer = load_policy(checkpoint)
    with Session(replace(config, env=replace(config.env, data=str(games))), model, tokenizer, STEPS) as session:
        here = session.evaluate(config.eval.seed)
    there = load_trajectories(run / f"trajectories/household_valid_seen_step{STEPS}_seed{config.eval.seed}")
    assert tokens(here) == tokens(there)
    assert np.isclose(rows[-1]["eval/success"], np.mean([t.success for t in here]))


def tokens(episodes: list[Trajectory]) -> dict[str, list[list[int]]]:
    return {episode.id: [segment.ids.tolist() for segment in episode.segments] for episode in episodes}
