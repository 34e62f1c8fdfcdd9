"""The figure of an ablation: what is written beside the picture, and where its marks stand."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from figures.fig_ablation import draw, write

INPUTS = {"seed0/grpo": "0123abcd"}
ARMS = ("grpo", "sdar", "pr_opd")


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    levels = dict(zip(ARMS, (0.6, 0.55, 0.66), strict=True))
    success = [
        {"arm": arm, "success": level, "low": level - 0.05, "high": level + 0.05, "lowest_seed": level - 0.02,
         "highest_seed": level + 0.03, "n_training_seeds": 3, "n_episodes": 768, "n_tasks": 128}
        for arm, level in levels.items()
    ]  # fmt: skip
    differences = [
        {
            "base": "grpo",
            "arm": arm,
            "difference": levels[arm] - 0.6,
            "low": levels[arm] - 0.65,
            "high": levels[arm] - 0.55,
        }
        for arm in ARMS[1:]
    ]
    paper = [
        {"arm": "pr_opd", "quantity": "success/x", "model": "3B", "low": 0.711, "high": 0.711, "source": "PR-OPD"},
        {"arm": "pr_opd", "quantity": "gain/x", "model": "3B", "low": 0.047, "high": 0.047, "source": "PR-OPD"},
        {"arm": "left out", "quantity": "success/x", "model": "3B", "low": 0.5, "high": 0.5, "source": "another"},
    ]
    starred = [{"arm": arm, "success": level + 0.04} for arm, level in levels.items()]
    return {
        "success": pd.DataFrame(success),
        "differences": pd.DataFrame(differences),
        "paper": pd.DataFrame(paper),
        "starred": pd.DataFrame(starred),
    }


def points(axes, marker: str) -> dict[float, float]:
    lines = [line for line in axes.lines if line.get_marker() == marker]
    return {float(y): float(x) for line in lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)}


def test_what_lies_beside_the_figure_is_what_is_drawn(tmp_path, tables):
    saved = write(tmp_path, INPUTS, tables)
    assert set(saved.data) == set(tables)
    back = {name: pd.read_csv(path) for name, path in saved.data.items()}
    pd.testing.assert_frame_equal(back["success"], tables["success"])
    assert back["paper"]["arm"].tolist() == ["pr_opd", "pr_opd"]  # the arm that is not drawn has no mark
    record = json.loads(saved.record.read_text())
    assert (
        record["inputs"] == INPUTS and record["references"] == ["PR-OPD"] and record["script"] == "figures.fig_ablation"
    )
    assert "training seeds and tasks" in record["interval"]
    again = write(tmp_path / "again", INPUTS, tables)
    assert saved.png.read_bytes() == again.png.read_bytes() and saved.pdf.read_bytes() == again.pdf.read_bytes()


def test_the_figure_is_called_after_its_study(tmp_path, tables):
    named = {**tables, "study": pd.DataFrame([{"study": "channels", "paper": "PR-OPD", "about": "Which?"}])}
    saved = write(tmp_path, INPUTS, named)
    assert saved.name == "ablation_channels" and saved.png.name == "ablation_channels.png"
    figure = draw(tables["success"], tables["differences"], tables["paper"][:2], study="channels")
    assert figure.get_suptitle() == "channels"


def test_marks_stand_at_the_numbers(tables):
    paper = tables["paper"][:2]
    a, b = draw(tables["success"], tables["differences"], paper, tables["starred"]).axes
    assert points(a, "o") == {2: 0.6, 1: 0.55, 0: 0.66}  # the first arm on top
    assert points(b, "o") == pytest.approx({1: -0.05, 0: 0.06})
    assert points(a, "*") == pytest.approx({2: 0.64, 1: 0.59, 0: 0.7})
    assert points(a, "D") == pytest.approx({-0.24: 0.711}) and points(b, "D") == pytest.approx({-0.24: 0.047})
    assert [label.get_text() for label in a.get_yticklabels()] == list(ARMS)


def test_several_bases_are_named(tables):
    differences = tables["differences"].assign(base=["grpo", "sdar"])
    a, b = draw(tables["success"], differences, tables["paper"][:0]).axes
    assert [label.get_text() for label in a.get_yticklabels()] == ["grpo", "sdar\n– grpo", "pr_opd\n– sdar"]
    assert b.get_title(loc="left") == "paired difference to its base"


def test_one_arm_alone_is_drawn(tmp_path, tables):
    alone = tables["success"][:1].assign(n_training_seeds=1)
    assert write(tmp_path, INPUTS, {"success": alone}).png.stat().st_size > 1000


def test_the_score_has_a_row_of_its_own(tmp_path, tables):
    score = [
        {"arm": arm, "type": kind, "score": 0.7 + place / 50, "score_low": 0.6, "score_high": 0.9, "success": 0.1}
        for place, arm in enumerate(ARMS)
        for kind in ("shoes", "all", "mean")
    ]
    tables["scores"] = pd.DataFrame(score)
    tables["score_differences"] = tables["differences"].assign(difference=0.04, low=0.01, high=0.08)
    published = [
        {"arm": "grpo", "quantity": quantity, "model": "3B", "low": low, "high": low, "source": "PR-OPD"}
        for quantity, low in (("accuracy/x", 0.55), ("score/x", 0.704), ("score_gain/x", 0.03))
    ]
    tables["paper"] = pd.concat([tables["paper"], pd.DataFrame(published)])
    saved = write(tmp_path, INPUTS, tables)
    back = {name: pd.read_csv(path) for name, path in saved.data.items()}
    assert list(back["scores"]) == ["arm", "score", "low", "high"] and len(back["scores"]) == len(ARMS)
    a, b, c, d = draw(**back).axes
    assert c.get_title(loc="left") == "score on the fixed panel"
    assert d.get_title(loc="left") == "paired difference of the score to grpo"
    rows = {arm: len(ARMS) - 1 - place for place, arm in enumerate(ARMS)}
    assert points(c, "o") == pytest.approx({rows[arm]: 0.7 + place / 50 for place, arm in enumerate(ARMS)})
    assert set(points(d, "o").values()) == {0.04}
    below = rows["grpo"] - 0.24
    assert [points(axes, "D").get(below) for axes in (a, b, c, d)] == [0.55, None, 0.704, 0.03]
