"""One stored batch on both engines, with one worker and with two: the same loss, terms, gradient and weights."""

import importlib.util
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diagnostics.artifact import load_skills, load_trajectories, save_skills, save_trajectories
from diagnostics.records import Trajectory
from tests.cluster.parity import config_of, skills_of
from training.envs.folders import household_games
from training.models.load import load_policy
from training.monitor import read_metrics
from training.session import Session
from training.skills.source import SkillSource
from training.train import train

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl is not installed here; `make test-cluster` runs this"
)
CASES = ("grpo", "sdar", "pcsd", "pr_opd", "branch", "resumed", "alone")
COMPARED = ("loss/", "policy/", "kl/", "weight/", "gap/", "reward/", "distill/", "optim/", "states/cosine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes, skills, and what the local engine makes of them."""
    folder = tmp_path_factory.mktemp("parity")
    household_games(folder / "games", {"train": 2, "valid_seen": 2, "valid_unseen": 2}, 0, 1)
    config = config_of("grpo", str(folder / "games"))
    model, tokenizer = load_policy("tiny")
    with Session(config, model, tokenizer) as session:
        played = session.rollout(0)
        # rewards that differ inside a group: else every advantage is zero and the surrogate says nothing
        played = [t if i % 2 else _won(t) for i, t in enumerate(played)]
        save_trajectories(folder / "episodes", played, config=config, seeds=[0])
        save_skills(folder / "skills", session.write_skills(played, 0), config=config)
    for case in CASES:
        config = config_of(case, str(folder / "games"))
        model, tokenizer = load_policy("tiny")
        train(
            config,
            folder / "local" / case,
            model=model,
            tokenizer=tokenizer,
            rollout_fn=lambda step: load_trajectories(folder / "episodes"),
            write_skills_fn=lambda *_, case=case: skills_of(case, load_skills(folder / "skills")),
            skill_source=SkillSource(config.skills, "household", config.seed),
        )
    return folder


@pytest.fixture(scope="module", params=[1, 2])
def world(request: pytest.FixtureRequest, folder: Path) -> int:
    """Runs all methods in so many workers."""
    count: int = request.param
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.cluster.parity"]
    said = [folder / f"worker{rank}of{count}.txt" for rank in range(count)]  # a pipe that nobody empties would stop it
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(count), str(port), str(folder), *CASES],
            stdout=path.open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, path in enumerate(said)
    ]
    try:
        codes = [worker.wait(timeout=600) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert codes == [0] * count, said[0].read_text()[-2000:]
    return count


@pytest.mark.parametrize("case", CASES)
def test_the_cluster_learns_what_one_machine_learns(folder: Path, world: int, case: str) -> None:
    ours, theirs = folder / "local" / case, folder / f"world{world}" / case
    rows = list(zip(read_metrics(ours), read_metrics(theirs), strict=True))
    config = config_of(case, str(folder / "games"))
    steps = config.steps
    assert [row["step"] for row, _ in rows] == list(range(1, steps + 1))
    for here, there in rows:
        assert set(here) == set(there)
        names = [name for name in here if name.startswith(COMPARED)]
        if world > 1:  # quartiles are those of a micro-batch, and two workers have smaller ones
            names = [name for name in names if not name.startswith("loss/pcsd/variance_q")]
        assert any(name.startswith("loss/") for name in names)
        for name in names:
            assert there[name] == pytest.approx(here[name], rel=1e-4, abs=1e-6), name
    for file in ("optimizer", "model", *(["modules"] if config.method == "pr_opd" else [])):
        a = load_file(ours / f"checkpoints/step_{steps}" / f"{file}.safetensors")
        b = load_file(theirs / f"checkpoints/step_{steps}" / f"{file}.safetensors")
        # with several workers a weight that no loss reaches has a gradient of zeros, not none: FSDP walks through all
        assert a.keys() <= b.keys() and (world > 1 or a.keys() == b.keys())
        for name in a:
            if name.endswith("exp_avg_sq"):  # a square: twice the relative error
                continue
            error = torch.linalg.vector_norm(a[name].double() - b[name].double())
            assert error <= 1e-4 * torch.linalg.vector_norm(a[name].double()) + 1e-9, (file, name)


def _won(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, reward=10.0, success=True, stop_reason="won")
