"""Figure 4: what is written beside the picture, where its marks stand, and missing parts."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from figures.fig_cka import CONTEXTS
from figures.fig_controls import CHANNELS, draw, write

INPUTS = {"measurements/tiny": "0123abcd"}
LAYERS = [str(layer) for layer in range(12)]
LEVELS = {"own_skill": 2e-2, "unrelated": 4e-3, "none": 0.0, "floor": 1e-15}


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    rows = []
    for context, level in LEVELS.items():
        for channel in (*CHANNELS, "hidden_norm_change"):
            for place, layer in enumerate([*LAYERS, "mean"]):
                value = level * (1 + place / 12)
                ratio = value / (LEVELS["unrelated"] * (1 + place / 12))
                rows.append(
                    {"reader": "tiny", "context": context, "channel": channel, "layer": layer, "mean": value,
                     "low": value * 0.8, "high": value * 1.2, "ratio_to_unrelated": ratio, "ratio_low": ratio * 0.7,
                     "ratio_high": ratio * 1.4, "n_tokens": 900, "n_trajectories": 24}
                )  # fmt: skip
    return {"layer_changes": pd.DataFrame(rows)}


def drawn(tables: dict[str, pd.DataFrame], tmp_path):
    back = {name: pd.read_csv(path) for name, path in write(tmp_path, INPUTS, tables).data.items()}
    back["changes"] = back["changes"].astype({"layer": str})
    return draw(**back)


def test_what_lies_beside_the_figure_is_what_is_drawn(tmp_path, tables):
    saved = write(tmp_path, INPUTS, tables)
    back = {name: pd.read_csv(path) for name, path in saved.data.items()}
    expected = tables["layer_changes"].query("channel != 'hidden_norm_change'").reset_index(drop=True)
    pd.testing.assert_frame_equal(back["changes"].astype({"layer": str}), expected)
    assert back["paper"]["low"].tolist() == [9, 7]
    record = json.loads(saved.record.read_text())
    assert (
        record["inputs"] == INPUTS
        and record["script"] == "figures.fig_controls"
        and "Fig. 4" in record["references"][0]
    )
    assert saved.png.name == "fig4_controls.png" and saved.pdf.stat().st_size > 1000
    again = write(tmp_path / "again", INPUTS, tables)
    assert saved.png.read_bytes() == again.png.read_bytes()


def test_marks_and_bands_stand_at_the_numbers(tmp_path, tables):
    raw, centred, ratio = drawn(tables, tmp_path).axes
    table = tables["layer_changes"].set_index(["channel", "context", "layer"]).sort_index()
    for axes, channel in ((raw, "hidden_change"), (centred, "hidden_change_centred")):
        assert len(axes.collections) == len(LEVELS)  # a band each
        for context in LEVELS:
            colour = CONTEXTS[context][1]
            (line,) = [
                line for line in axes.lines if line.get_color() == colour and len(line.get_xdata()) == len(LAYERS)
            ]
            np.testing.assert_array_equal(line.get_ydata(), table.loc[(channel, context), "mean"][LAYERS])
            ends = [list(line.get_ydata()) for line in axes.lines if line.get_color() == colour]
            assert table.loc[(channel, context, "mean"), ["low", "high"]].tolist() in ends
        low, high = axes.get_ylim()
        assert low < 0 and high > table["high"].max()
    assert "raw 5.00 [3.50, 7.00]" in ratio.get_xlabel() and "centred 5.00 [3.50, 7.00]" in ratio.get_xlabel()
    hollow = [line.get_ydata()[0] for line in ratio.lines if line.get_markerfacecolor() == "white"]
    assert sorted(hollow) == [7, 9]


def test_two_readers_and_a_reader_without_controls(tmp_path, tables):
    table = tables["layer_changes"]
    alone = table[table["context"] == "own_skill"].assign(reader="larger")
    alone[["ratio_to_unrelated", "ratio_low", "ratio_high"]] = np.nan
    figure = drawn({"layer_changes": pd.concat([table, alone])}, tmp_path)
    assert len(figure.axes) == 6 and "unrelated text was not read" in figure.axes[5].get_xlabel()
    assert len(figure.axes[3].collections) == 1


def test_no_own_skill_is_refused(tmp_path, tables):
    table = tables["layer_changes"]
    for given in ({}, {"layer_changes": table[table["context"] != "own_skill"]}):
        with pytest.raises(ValueError, match="figure 4 needs the change by layer under own_skill"):
            write(tmp_path, INPUTS, given)
