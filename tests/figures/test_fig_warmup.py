"""The warm-up figure: which differences are gains from one checkpoint, where they stand, and studies without them."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from analysis.arms import find_study
from figures.fig_warmup import draw, warmup_gains, write

INPUTS = {"seed0/pr_opd_early": "0123abcd"}


@pytest.fixture
def differences() -> pd.DataFrame:
    """One row for each arm of the ready study that is compared with another."""
    arms = [arm for arm in find_study("warmup").arms if arm.base != arm.name]
    return pd.DataFrame(
        [
            {"base": arm.base, "arm": arm.name, "difference": 0.01 * place, "low": 0.01 * place - 0.03,
             "high": 0.01 * place + 0.04, "n_tasks": 128, "n_training_seeds": 3}
            for place, arm in enumerate(arms)
        ]
    )  # fmt: skip


def test_gains_of_the_ready_study(differences):
    gains = warmup_gains(differences).set_index(["to", "method", "checkpoint"])
    value = differences.set_index("arm")["difference"]
    expected = {("same steps", m, c): f"{m}_{c}" for m in ("alignment", "pr_opd") for c in ("early", "middle", "late")}
    expected |= {("end", "pr_opd", c): f"pr_opd_{c}_to_end" for c in ("early", "middle")}
    expected["end", "pr_opd", "late"] = "pr_opd_late"
    assert gains["difference"].to_dict() == {place: value[arm] for place, arm in expected.items()}


def test_what_lies_beside_the_figure_is_what_is_drawn(tmp_path, differences):
    saved = write(tmp_path, INPUTS, {"differences": differences})
    gains, paper = (pd.read_csv(saved.data[name]) for name in ("gains", "paper"))
    panels = draw(gains, paper).axes
    for axes, to in zip(panels, ("same steps", "end"), strict=True):
        mine = gains[gains["to"] == to]
        solid = [line for line in axes.lines if len(line.get_xdata()) == 1 and line.get_markerfacecolor() != "white"]
        assert sorted(line.get_ydata()[0] for line in solid) == sorted(mine["difference"])
        bars = [list(line.get_ydata()) for line in axes.lines]
        assert all([row.low, row.high] in bars for row in mine.itertuples())
    hollow = [line for line in panels[0].lines if line.get_markerfacecolor() == "white"]
    assert sorted(line.get_ydata()[0] for line in hollow) == [0.0315, 0.0363, 0.0822, 0.0962]
    assert {text.get_text() for text in panels[0].texts} >= {"100+30", "120+30", "120+10", "140+10"}
    assert json.loads(saved.record.read_text())["references"] == ["PR-OPD (arXiv 2609.36642), warm-up"]
    again = write(tmp_path / "again", INPUTS, {"differences": differences})
    assert saved.png.read_bytes() == again.png.read_bytes()


def test_one_checkpoint_without_its_end_is_one_panel(tmp_path, differences):
    one = differences[differences["arm"] == "pr_opd_early"]
    saved = write(tmp_path, INPUTS, {"differences": one})
    assert len(draw(*(pd.read_csv(saved.data[name]) for name in ("gains", "paper"))).axes) == 1


def test_another_study_is_refused(tmp_path, differences):
    other = differences.assign(base="grpo", arm=[f"arm{index}" for index in range(len(differences))])
    for given in ({}, {"differences": other}, {"differences": differences.assign(base="grpo")}):
        with pytest.raises(ValueError, match="needs arms named <x>_early"):
            write(tmp_path, INPUTS, given)
