"""The main table: every cell has its number, its interval and the published values of that method."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from analysis.main_table import TASKS, published_table
from analysis.reference import paper_values
from figures.fig_main_table import draw, write

INPUTS = {"seed0/grpo": "0123abcd"}
ARMS = ("grpo", "opd", "alignment")
COLUMNS = (*TASKS.values(), "all")


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    rows = []
    for place, arm in enumerate(ARMS):
        for number, column in enumerate(COLUMNS):
            value, tasks = (0.5 + 0.1 * place, 128) if column == "all" else (0.2 + 0.1 * place + 0.05 * number, 20)
            row = {"arm": arm, "column": column, "value": value, "low": value - 0.1, "high": value + 0.15}
            rows.append({**row, "n_episodes": 2 * tasks, "n_tasks": tasks})
    published = published_table({"grpo": "grpo", "opd": "token_opd", "alignment": "alignment"}, "household", set(TASKS))
    return {"main": pd.DataFrame(rows), "main_paper": published}


def drawn(tables, tmp_path):
    return draw(**{name: pd.read_csv(path) for name, path in write(tmp_path, INPUTS, tables).data.items()})


def test_every_cell_has_its_number_interval_and_mark(tmp_path, tables):
    figure = drawn(tables, tmp_path)
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(COLUMNS)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(ARMS)
    for axes, column in zip(figure.axes, COLUMNS, strict=True):
        for row in tables["main"].query("column == @column").itertuples():
            text = f"{100 * row.value:.0f} [{100 * row.low:.0f}, {100 * row.high:.0f}]"
            assert text in [found.get_text() for found in axes.texts]
            bars = [list(line.get_xdata()) for line in axes.lines]
            assert [row.low, row.high] in bars and [row.value] in bars
        assert axes.get_xlabel() == ("128 tasks" if column == "all" else "20 tasks")


def test_published_values_stand_in_the_row_of_their_method(tmp_path, tables):
    figure = drawn(tables, tmp_path)

    def hollow(column: int, arm: str) -> list[float]:
        lines = [line for line in figure.axes[column].lines if line.get_markerfacecolor() == "white"]
        return sorted(line.get_xdata()[0] for line in lines if round(line.get_ydata()[0]) == ARMS.index(arm))

    published = paper_values("success/alfworld/grpo")
    published = published[published["quantity"] == "success/alfworld/grpo"].drop_duplicates(["model", "low"])
    assert hollow(6, "grpo") == sorted(published["low"]) and len(published) > 3  # of several papers and models
    assert hollow(6, "opd") == [0.578] and hollow(0, "opd") == []  # by the name that the study gives
    assert hollow(6, "alignment") == [] == hollow(0, "alignment")
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:2] == ["ours in %, 95 %", "papers: Qwen2.5-3B-Instruct"] and "paper: PR-OPD" in labels
    picks = paper_values("success_by_type/alfworld/grpo/pick")
    assert hollow(0, "grpo") == sorted(picks.loc[picks["quantity"].str.endswith("/pick"), "low"])


def test_what_lies_beside_the_figure_is_what_is_drawn(tmp_path, tables):
    saved = write(tmp_path, INPUTS, tables)
    back = {name: pd.read_csv(path) for name, path in saved.data.items()}
    pd.testing.assert_frame_equal(back["main"], tables["main"])
    assert set(back["paper"]["arm"]) == {"grpo", "opd"}
    record = json.loads(saved.record.read_text())
    assert any("SDAR" in source for source in record["references"]) and record["script"] == "figures.fig_main_table"
    again = write(tmp_path / "again", INPUTS, tables)
    assert saved.png.read_bytes() == again.png.read_bytes() and saved.pdf.read_bytes() == again.pdf.read_bytes()


def test_two_columns_and_nothing_published(tmp_path, tables):
    tables = {"main": tables["main"].query("column in ('pick', 'all')").replace("pick", "Score")}
    figure = drawn(tables, tmp_path)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Score", "all"]
    assert not [line for axes in figure.axes for line in axes.lines if line.get_markerfacecolor() == "white"]


def test_one_arm_and_a_missing_table(tmp_path, tables):
    assert write(tmp_path, INPUTS, {"main": tables["main"].query("arm == 'grpo'")}).png.stat().st_size > 1000
    with pytest.raises(ValueError, match="the main table needs the table main"):
        write(tmp_path, INPUTS, {})
