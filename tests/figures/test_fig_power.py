"""The power curve: what is written beside the picture, and where the published differences stand."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from analysis.power import limit_curves, power_curves, published_gaps
from figures.fig_power import NAME, draw, write


@pytest.fixture(scope="module")
def tables() -> dict[str, pd.DataFrame]:
    episodes = (64, 128, 1526, 4096)
    curves = power_curves(0.664, (0.047, 0.1), episodes)
    return {"curves": curves, "limits": limit_curves(0.664, episodes), "paper": published_gaps()}


def lines(axes, colour: str) -> list:
    return [line for line in axes.lines if line.get_color() == colour and len(line.get_xdata()) == 4]


def test_lines_and_marks_stand_at_the_numbers(tables):
    a, b = draw(**tables, rate=0.664, asked=0.047).axes
    (asked,) = lines(a, "#D55E00")
    assert dict(zip(asked.get_xdata(), asked.get_ydata(), strict=True))[1526] == pytest.approx(0.8, abs=0.001)
    hollow = [line for line in a.lines if line.get_markerfacecolor() == "white"]
    drawn = {(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in hollow}
    assert drawn == {(128.0, power) for power in tables["paper"]["power"]}
    assert all(line.get_linestyle() == "None" for line in hollow)  # never joined
    assert len(lines(b, "#222222")) == 4


def test_what_lies_beside_the_figure_is_what_is_drawn(tmp_path):
    saved = write(tmp_path, {}, 0.711, 0.664)  # the order of the arms does not matter
    back = {name: pd.read_csv(path) for name, path in saved.data.items()}
    assert set(back) == {"curves", "limits", "paper"}
    assert back["curves"]["gain"].drop_duplicates().tolist() == pytest.approx([0.02, 0.047, 0.1, 0.2])
    record = json.loads(saved.record.read_text())
    assert record["figure"] == NAME and record["script"] == "figures.fig_power" and "none" in record["interval"]
    assert record["references"] == sorted(set(back["paper"]["source"]))
    again = write(tmp_path / "again", {}, 0.664, 0.711)
    assert saved.png.read_bytes() == again.png.read_bytes()
