"""From files to frames: the last attempt counts, errors are apart."""

from __future__ import annotations

import json

import numpy as np
import pytest

from analysis.frames import artifacts, episode_frame, metrics_frame, played
from diagnostics.artifact import save_artifact, save_trajectories


def log(run, *rows):
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_b71_resumed_log_has_every_step_once(tmp_path):
    first = [{"attempt": 0, "step": step, "loss": float(step)} for step in range(11)]
    second = [{"attempt": 1, "step": step, "loss": 100.0 + step} for step in range(5, 13)]
    log(tmp_path, *first, *second)
    frame = metrics_frame(tmp_path)
    assert frame["step"].tolist() == list(range(13))
    assert frame["value"].tolist() == [*range(5), *range(105, 113)]


def test_steps_beyond_a_resumed_branch_are_dropped(tmp_path):
    """Logged to 10, resumed at 5, killed at 6, resumed at 6: nothing of the first attempt after 4 stays."""
    log(
        tmp_path,
        *({"attempt": 0, "step": step, "loss": 0} for step in range(11)),
        *({"attempt": 1, "step": step, "loss": 1} for step in (5, 6)),
        {"attempt": 2, "step": 6, "loss": 2},
    )
    frame = metrics_frame(tmp_path)
    assert frame[["step", "value"]].to_numpy().tolist() == [[0, 0], [1, 0], [2, 0], [3, 0], [4, 0], [5, 1], [6, 2]]


def test_metrics_take_numbers_and_survive_a_cut_last_line(tmp_path):
    log(tmp_path, {"step": 1, "loss": 0.5, "note": "text", "flag": True, "update": 3})
    with open(tmp_path / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 2, "lo')
    frame = metrics_frame(tmp_path)
    assert dict(zip(frame["metric"], frame["value"], strict=True)) == {"loss": 0.5, "update": 3.0}


def test_broken_or_missing_log_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no metrics\.jsonl in"):
        metrics_frame(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*metrics\.jsonl is not JSON"):
        metrics_frame(tmp_path)


def test_episode_frame_counts(tmp_path, episode):
    saved = save_trajectories(
        tmp_path / "t",
        [
            episode("a", success=True, valid=(True, False, False)),
            episode("b", error="reset timed out", valid=()),
            episode("c", valid=(True, True), skill="look twice"),
        ],
    )
    frame = episode_frame(saved, arm="grpo")
    assert frame["n_turns"].tolist() == [3, 0, 2] and frame["n_invalid"].tolist() == [2, 0, 0]
    assert frame["error"].tolist() == [None, "reset timed out", None]
    assert frame["with_skill"].tolist() == [False, False, True] and set(frame["arm"]) == {"grpo"}
    assert played(frame)["task"].tolist() == ["a", "c"]
    assert frame["success"].dtype == np.bool_


def test_artifacts_of_a_kind(tmp_path, episode):
    save_trajectories(tmp_path / "trajectories" / "b", [episode("x")])
    save_trajectories(tmp_path / "trajectories" / "a", [episode("y")])
    save_artifact(tmp_path / "tables" / "c", "table", tables={"t": [{"x": 1}]})
    assert [artifact.path.name for artifact in artifacts(tmp_path, "trajectories")] == ["a", "b"]
