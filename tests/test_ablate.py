"""The smallest matched ablation from the command line to its table, figure and report; stopped, it goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from analysis.arms import find_study
from analysis.frames import episode_frame
from diagnostics.artifact import load_artifact

ROOT = Path(__file__).parents[1]
ARMS = [arm.name for arm in find_study("channels").arms]


def ablate(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "undertow", "ablate", "channels", "--recipe", "smoke", "--out", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("ablation") / "channels"
    ended = ablate(folder)
    assert ended.returncode == 0, ended.stderr
    return folder, ended.stdout


def test_the_smoke_study_compares_every_channel(study: tuple[Path, str]) -> None:
    folder, said = study
    tables = load_artifact(folder / "tables" / "ablation", "table")
    success = tables.table("success").to_pandas()
    assert sorted(success["arm"]) == sorted(ARMS) and set(success["n_episodes"]) == {8}
    differences = tables.table("differences").to_pandas()
    assert sorted(differences["arm"]) == sorted(set(ARMS) - {"grpo"})
    by_arm = success.set_index("arm")["success"]
    for row in differences.itertuples():
        assert row.difference == pytest.approx(by_arm[row.arm] - by_arm["grpo"])
        assert row.low <= row.difference <= row.high
    assert "success of the last weights" in said and f"report: {folder / 'report.html'}" in said
    record = json.loads((folder / "figures" / "ablation_channels.json").read_text())
    published = pd.read_csv(folder / "figures" / record["drawn"]["paper"]["file"])
    assert set(published["arm"]) == set(ARMS) - {"alignment"}  # published values beside ours, where there are any
    page = (folder / "report.html").read_text()
    assert "8 episodes" in page and "data:image/png;base64" in page


def test_arms_start_from_one_checkpoint_and_play_one_panel(study: tuple[Path, str]) -> None:
    folder, _ = study
    played = [episode_frame(load_artifact(path.parent)) for path in folder.glob("seed0/*/trajectories/*/manifest.json")]
    panels = {frozenset(frame["task"]) for frame in played}
    assert len(panels) == 1 and len(played) >= len(ARMS)
    starts = set()
    for arm in ARMS:
        config = json.loads((folder / "seed0" / arm / "config.json").read_text())
        starts.add((config["init_from"], config["seed"], config["env"]["data"], config["steps"]))
    assert starts == {(str(folder / "seed0" / "stage1" / "checkpoints" / "step_2"), 0, str(folder / "games"), 1)}


def test_the_same_command_keeps_what_is_done_and_makes_what_is_lost(study: tuple[Path, str]) -> None:
    folder, _ = study
    before = json.loads((folder / "study.json").read_text())
    lost = folder / "seed0" / "alignment" / "checkpoints" / "step_1" / "manifest.json"
    weights = lost.with_name("model.safetensors").read_bytes()
    for file in lost.parent.iterdir():
        file.unlink()
    again = ablate(folder)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("kept") == len(before) - 1
    assert lost.with_name("model.safetensors").read_bytes() == weights
