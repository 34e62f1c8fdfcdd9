"""Mean scores by data set, over all episodes and over data sets, by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.frames import episode_frame
from analysis.scores import score_table
from diagnostics.artifact import save_trajectories
from tests.analysis.conftest import _episode


def frame(folder: Path, episodes: list, **labels: str):
    return episode_frame(save_trajectories(folder, episodes), **labels)


def graded(task: str, dataset: str, f1: float | None, **more):
    return _episode(task, success=f1 == 1.0, task_type=dataset, score=f1, **more)


EPISODES = [
    graded("a", "nq", 1.0),
    graded("b", "nq", 0.5),
    graded("c", "nq", 0.0),
    graded("d", "popqa", 1.0),
    graded("e", "popqa", 0.2),
    graded("f", "popqa", None, error="a server"),  # counts nowhere
]


def test_by_hand(tmp_path: Path) -> None:
    table = score_table(frame(tmp_path / "a", EPISODES)).set_index("type")
    assert list(table.index) == ["nq", "popqa", "all", "mean"]
    assert table["success"].tolist() == pytest.approx([1 / 3, 1 / 2, 2 / 5, (1 / 3 + 1 / 2) / 2])
    assert table["score"].tolist() == pytest.approx([0.5, 0.6, 2.7 / 5, 0.55])
    assert table["n_episodes"].tolist() == [3, 2, 5, 5] and table["n_errors"].tolist() == [0, 1, 1, 1]
    half = 1.96 * np.sqrt(0.25 / 3 + 0.32 / 2) / 2  # variances 0.25 and 0.32 of the F1s
    assert 0.55 - half > 0 and 0.55 + half > 1  # where it is cut
    assert (table.loc["mean", "score_low"], table.loc["mean", "score_high"]) == pytest.approx((0.55 - half, 1.0))
    for name in ("nq", "popqa", "all"):
        for column in ("success", "score"):
            low, middle, high = table.loc[name, [f"{column}_low", column, f"{column}_high"]]
            assert 0 <= low < middle < high <= 1


def test_seeds_of_a_task_are_no_tasks_of_their_own(tmp_path: Path) -> None:
    once = score_table(frame(tmp_path / "a", EPISODES)).set_index("type")
    twice = [graded(e.task_id, e.task_type, e.score, seed=s, error=e.error) for e in EPISODES for s in (0, 1)]
    again = score_table(frame(tmp_path / "b", twice)).set_index("type")
    same = ["success", "score", "score_low", "score_high", "n_tasks"]
    assert np.allclose(once[same], again[same])
    assert (again["n_episodes"] == 2 * once["n_episodes"]).all()


def test_groups_and_one_task(tmp_path: Path) -> None:
    both = [frame(tmp_path / arm, EPISODES[n : n + 1], arm=arm) for n, arm in enumerate(("x", "y"))]
    table = score_table(pd.concat(both), ("arm",))
    assert table[["arm", "type"]].agg(" ".join, axis=1).tolist() == [
        "x nq",
        "x all",
        "x mean",
        "y nq",
        "y all",
        "y mean",
    ]
    assert table["score"].tolist() == [1.0] * 3 + [0.5] * 3 and table["score_low"].isna().all()


def test_an_environment_that_tells_success_alone(tmp_path: Path) -> None:
    episodes = frame(tmp_path / "a", [_episode("a", success=True)])
    assert episodes["score"].isna().all()
    with pytest.raises(ValueError, match="no episode has a score"):
        score_table(episodes)


def test_no_interval_is_made_of_tasks_that_came_out_alike(tmp_path: Path) -> None:
    lost = [graded(name, kind, 0.0) for kind in ("nq", "popqa") for name in (f"{kind}1", f"{kind}2", f"{kind}3")]
    table = score_table(frame(tmp_path / "a", lost)).set_index("type")
    assert table.loc["all", ["success_low", "success_high"]].tolist() == pytest.approx([0, 0.3903], abs=1e-4)
    assert table.loc["nq", "success_high"] == pytest.approx(0.5615, abs=1e-4)  # Wilson of 0 in 6, and of 0 in 3
    assert table.loc["mean", ["success", "score"]].tolist() == [0, 0]
    assert table.loc["mean", ["success_low", "success_high", "score_low", "score_high"]].isna().all()
