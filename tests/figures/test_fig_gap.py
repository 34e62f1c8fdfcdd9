"""SDAR's figures 2 and 3: what lies beside the pictures, where the marks stand, missing contexts, readers and arms."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from analysis.reference import paper_values
from figures import fig_gap, fig_turn_kl

INPUTS = {"measurements/tiny": "0123abcd"}
LEVELS = {"own_skill": -0.2, "unrelated": -0.05, "none": 0.0}
EDGES = [-np.inf, *np.arange(-20, 21) / 20, np.inf]


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    gaps, histogram = [], []
    for context, level in LEVELS.items():
        places = [("turn_bin", str(first), 1.0) for first in (1, 11)]
        places += [("turn", str(turn), turn) for turn in range(1, 13)]
        places += [("position", str((2 * k + 1) / 20), 1 - k / 10) for k in range(10)] + [("all", "", 1.0)]
        for by, at, factor in places:
            for quantity, value in (("gap", level), ("abs_gap", -level), ("negative_share", 0.6), ("kl", -10 * level)):
                if quantity == "kl" and by == "position":
                    continue
                value = value * factor
                gaps.append(
                    {"reader": "tiny", "context": context, "by": by, "at": at, "quantity": quantity, "value": value,
                     "low": value - 0.02, "high": value + 0.03, "n_tokens": 400, "n_turns": 40, "n_trajectories": 9}
                )  # fmt: skip
        share = np.exp(-np.abs(np.arange(42) - 20.5 - 10 * level))
        share = share / share.sum() if context != "none" else np.eye(42)[21]
        share[5] = 0.0
        for left, right, value in zip(EDGES[:-1], EDGES[1:], share, strict=True):
            histogram.append(
                {"reader": "tiny", "context": context, "token_class": "all", "left": left, "right": right,
                 "share": value, "low": value * 0.8, "high": value * 1.2, "n_tokens": 400, "n_trajectories": 9}
            )  # fmt: skip
    return {"gaps": pd.DataFrame(gaps), "gap_histogram": pd.DataFrame(histogram)}


def ydata(axes, count: int) -> list[list[float]]:
    found = [np.asarray(line.get_ydata(), float) for line in axes.lines if len(line.get_xdata()) == count]
    return [values.round(9).tolist() for values in found]


def test_what_lies_beside_the_gap_figure_is_what_is_drawn(tmp_path, tables):
    saved = fig_gap.write(tmp_path, INPUTS, tables)
    gaps, histogram, paper = (pd.read_csv(saved.data[name]) for name in ("gaps", "histogram", "paper"))
    assert set(zip(gaps["by"], gaps["quantity"], strict=True)) == {
        ("turn_bin", "abs_gap"), ("position", "gap"), ("all", "gap"), ("all", "abs_gap"), ("all", "negative_share")
    }  # fmt: skip
    assert set(histogram["context"]) == {"own_skill", "unrelated"} and not paper["quantity"].str.contains("step").any()
    record = json.loads(saved.record.read_text())
    assert record["inputs"] == INPUTS and "Fig. 3a" in "".join(record["references"])
    again = fig_gap.write(tmp_path / "again", INPUTS, tables)
    assert saved.png.read_bytes() == again.png.read_bytes() and saved.pdf.read_bytes() == again.pdf.read_bytes()


def test_panels_hold_every_context_and_open_marks_of_the_paper(tables):
    histogram = tables["gap_histogram"][tables["gap_histogram"]["context"] != "none"]
    paper = fig_gap._paper()
    a, b, c = fig_gap.draw(tables["gaps"], histogram, paper).axes
    assert a.get_yscale() == "log" and "mean −0.200 [−0.220, −0.170]" in a.get_xlabel()
    assert "below 0: 0.600" in a.get_xlabel() and "400 tokens, 9 episodes" in a.get_xlabel()
    assert ydata(b, 2)[:3] == [[0.2, 0.2], [0.05, 0.05], [0, 0]]
    assert [label.get_text() for label in b.get_xticklabels()] == ["1–10", "11–20", "21–30", "31–40", "41+"]
    assert ydata(c, 10) == [[round(level * (1 - k / 10), 9) for k in range(10)] for level in LEVELS.values()]
    for axes, quantity in ((b, "by_turn"), (c, "by_position")):
        hollow = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
        published = paper[paper["quantity"].str.endswith(quantity)]
        assert sorted(y for line in hollow for y in line.get_ydata()) == sorted(
            y for row in published.itertuples() for y in {row.low, row.high}
        )


@pytest.mark.parametrize("module", [fig_gap, fig_turn_kl])
def test_one_context_two_readers_and_no_own_skill(tmp_path, tables, module):
    alone = {name: table[table["context"] == "own_skill"] for name, table in tables.items()}
    assert module.write(tmp_path, INPUTS, alone).png.stat().st_size > 1000
    both = {name: pd.concat([table, table.assign(reader="larger")]) for name, table in tables.items()}
    assert module.write(tmp_path / "both", INPUTS, both).png.stat().st_size > 1000
    other = {name: table[table["context"] != "own_skill"] for name, table in tables.items()}
    with pytest.raises(ValueError, match="needs the gap under own_skill"):
        module.write(tmp_path / "none", INPUTS, other)


def test_the_kl_of_every_turn_is_drawn(tmp_path, tables):
    saved = fig_turn_kl.write(tmp_path, INPUTS, tables)
    turns, paper = (pd.read_csv(saved.data[name]) for name in ("turns", "paper"))
    assert set(turns["by"]) == {"turn"} and set(turns["quantity"]) == {"kl"}
    assert set(paper["quantity"]) == {"kl/by_turn"}
    (axes,) = fig_turn_kl.draw(turns, paper_values("kl/by_turn")).axes
    assert ydata(axes, 12) == [[round(-10 * level * turn, 9) for turn in range(1, 13)] for level in LEVELS.values()]
