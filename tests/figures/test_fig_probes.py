"""Figure 5: what is written beside the picture, where its marks stand, and what cannot be estimated."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from figures.fig_probes import LABELS, OUTPUTS, draw, write

INPUTS = {"measurements/tiny": "0123abcd"}
LAYERS = ["embed", *map(str, range(4)), "final_norm"]


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    """Layers 2 and 3 above chance after correction; the third of the episode cannot be estimated."""
    rows = []
    for labels in ("own_skill", "success", "task_type"):
        readers = [("hidden", layer) for layer in LAYERS] + [(name, "") for name in OUTPUTS]
        for place, (features, layer) in enumerate(readers):
            accuracy = 0.5 + 0.05 * place if features == "hidden" else 0.52
            rows.append(
                {"reader": "tiny", "labels": labels, "features": features, "layer": layer, "accuracy": accuracy,
                 "low": accuracy - 0.03, "high": accuracy + 0.04, "majority": 0.5, "control_accuracy": 0.49,
                 "selectivity": accuracy - 0.49, "selectivity_low": accuracy - 0.55, "selectivity_high": accuracy - 0.4,
                 "p_max": 0.005 if layer in ("2", "3") else 0.4, "n_samples": 800, "not_estimable": ""}
            )  # fmt: skip
    reason = {"labels": "turn_third", "features": "", "layer": "", "not_estimable": "every sample is 'first'"}
    rows.append({"reader": "tiny", **reason, "n_samples": 20})
    return {"probes": pd.DataFrame(rows)}


def drawn(tables: dict[str, pd.DataFrame], tmp_path):
    back = {name: pd.read_csv(path) for name, path in write(tmp_path, INPUTS, tables).data.items()}
    for column in ("layer", "features", "not_estimable"):
        back["probes"][column] = back["probes"][column].astype(object).fillna("")
    return draw(**back)


def test_what_lies_beside_the_figure_is_what_is_drawn(tmp_path, tables):
    saved = write(tmp_path, INPUTS, tables)
    back = pd.read_csv(saved.data["probes"])
    assert len(back) == 3 * len(LAYERS) + len(OUTPUTS) + 1  # output features of the own skill alone
    assert set(back.loc[back["features"] == "top64", "labels"]) == {"own_skill"}
    record = json.loads(saved.record.read_text())
    assert record["script"] == "figures.fig_probes" and "Fig. 5" in record["references"][0]
    again = write(tmp_path / "again", INPUTS, tables)
    assert saved.png.read_bytes() == again.png.read_bytes() and saved.pdf.read_bytes() == again.pdf.read_bytes()


def test_lines_bands_and_marks_stand_at_the_numbers(tmp_path, tables):
    axes = drawn(tables, tmp_path).axes
    assert len(axes) == 5
    probes = tables["probes"][tables["probes"]["features"] == "hidden"]
    for panel, labels in ((axes[0], "own_skill"), (axes[2], "success"), (axes[3], "task_type")):
        mine, colour = probes[probes["labels"] == labels], LABELS[labels][1]
        lines = [line for line in panel.lines if line.get_color() == colour and len(line.get_xdata()) == len(LAYERS)]
        accuracy, control = lines
        np.testing.assert_allclose(accuracy.get_ydata(), mine["accuracy"])
        np.testing.assert_allclose(control.get_ydata(), mine["control_accuracy"])
        assert list(accuracy.get_xdata()) == [-1, 0, 1, 2, 3, 4]
        assert len(panel.collections) == 1  # its interval
        (above,) = [line for line in panel.lines if line.get_marker() == "|"]
        assert list(above.get_xdata()) == [2, 3]
        low, high = panel.get_ylim()
        assert low < mine["low"].min() and high > mine["high"].max()
    assert "selectivity +0.26 [+0.20, +0.35]" in axes[0].get_xlabel() and "0.400" in axes[0].get_xlabel()
    points = [line for line in axes[1].lines if line.get_marker() == "o"]
    assert [line.get_ydata()[0] for line in points] == [0.52] * len(OUTPUTS)


def test_published_values_are_hollow_and_where_they_belong(tmp_path, tables):
    a, b, *_ = drawn(tables, tmp_path).axes

    def hollow(axes):
        return sorted(y for line in axes.lines if line.get_markerfacecolor() == "white" for y in line.get_ydata())

    assert hollow(a) == [0.654, 0.654, 0.701, 0.794, 0.983] and hollow(b) == [0.502, 0.54]
    (last,) = [line.get_xdata()[0] for line in a.lines if list(line.get_ydata()) == [0.701]]
    assert last == 3


def test_what_cannot_be_estimated_is_named(tmp_path, tables):
    third = drawn(tables, tmp_path).axes[4]
    (text,) = [text.get_text() for text in third.texts if len(text.get_text()) > 1]  # not the panel's letter
    assert " ".join(text.split()) == "not estimable: every sample is 'first'" and not third.lines
    none = tables["probes"].query("labels == 'turn_third'").assign(labels="own_skill", majority=np.nan)
    for column in ("accuracy", "low", "control_accuracy"):
        none[column] = np.nan
    for axes in drawn({"probes": none}, tmp_path / "none").axes:
        assert any("not estimable" in text.get_text() for text in axes.texts)


def test_readers_stand_in_rows_and_no_probe_is_refused(tmp_path, tables):
    both = {"probes": pd.concat([tables["probes"], tables["probes"].assign(reader="larger")])}
    assert len(drawn(both, tmp_path / "both").axes) == 10
    own = {"probes": tables["probes"].query("labels == 'own_skill'")}
    assert len(drawn(own, tmp_path / "own").axes) == 2
    for given in ({}, {"probes": tables["probes"].query("labels == 'success'")}):
        with pytest.raises(ValueError, match="figure 5 needs probes for own_skill"):
            write(tmp_path, INPUTS, given)
