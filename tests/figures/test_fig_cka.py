"""The figure of CKA: what is written beside the picture, where its marks stand, gaps and missing parts."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from figures.fig_cka import CONTEXTS, draw, write

INPUTS = {"measurements/tiny": "0123abcd"}
LAYERS = [str(layer) for layer in range(12)]
LEVELS = {"own_skill": 4e-3, "unrelated": 7e-4, "none": 0.0}
UNDEFINED = "4"


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    """Twelve layers; the own skill above both controls from layer 6 on; layer 4 is undefined."""
    cka, contrasts = [], []
    for context, level in LEVELS.items():
        for coordinates in ("all", "trimmed"):
            values = level * (1 + np.arange(12) / 12) - (1e-3 if context == "own_skill" else 0) * (np.arange(12) < 6)
            values[int(UNDEFINED)] = np.nan
            for layer, value in zip([*LAYERS, "mean"], [*values, np.nanmean(values)], strict=True):
                cka.append(
                    {"reader": "tiny", "context": context, "coordinates": coordinates, "layer": layer,
                     "dissimilarity": value, "low": value * 0.8 - 1e-6, "high": value * 1.2 + 1e-6,
                     "n": 5000.0, "n_sampled": 1280.0, "d": 160.0 - (coordinates == "trimmed")}
                )  # fmt: skip
                if context != "own_skill":
                    low = 1e-4 if layer in LAYERS[6:] else -1e-4
                    place = {"reader": "tiny", "control": context, "coordinates": coordinates, "layer": layer}
                    contrasts.append({**place, "difference": 1e-3, "low": low, "high": 2e-3})
    pairs = [
        {"reader": "tiny", "context": context, "coordinates": coordinates, "student_layer": i, "teacher_layer": j,
         "debiased": np.nan if UNDEFINED in (i, j) else 1 - 0.05 * abs(int(i) - int(j)) - 0.001 * int(i)}
        for context in LEVELS for coordinates in ("all", "trimmed") for i in LAYERS for j in LAYERS
    ]  # fmt: skip
    frames = {"cka": cka, "cka_contrasts": contrasts, "cka_map": pairs}
    return {name: pd.DataFrame(rows) for name, rows in frames.items()}


def drawn(tables: dict[str, pd.DataFrame], tmp_path):
    back = {name: pd.read_csv(path) for name, path in write(tmp_path, INPUTS, tables).data.items()}
    for name, columns in (("cka", ["layer"]), ("pairs", ["student_layer", "teacher_layer"]), ("contrasts", ["layer"])):
        back[name] = back[name].astype({column: str for column in columns})
    return draw(**back)


def test_what_lies_beside_the_figure_is_what_is_drawn(tmp_path, tables):
    saved = write(tmp_path, INPUTS, tables)
    back = {name: pd.read_csv(path) for name, path in saved.data.items()}
    pd.testing.assert_frame_equal(back["cka"].astype({"layer": str}), tables["cka"])
    assert len(back["pairs"]) == 144 and set(back["pairs"]["context"]) == {"own_skill"}
    assert set(back["paper"]["quantity"]) == {"cka/dissimilarity/own_skill", "cka/dissimilarity/unrelated"}
    record = json.loads(saved.record.read_text())
    assert record["inputs"] == INPUTS and record["script"] == "figures.fig_cka" and "Fig. 6" in record["references"][0]
    again = write(tmp_path / "again", INPUTS, tables)
    assert saved.png.read_bytes() == again.png.read_bytes() and saved.pdf.read_bytes() == again.pdf.read_bytes()


def test_marks_stand_at_the_numbers(tmp_path, tables):
    a, b, c = drawn(tables, tmp_path).axes[:3]
    shown = np.ma.filled(a.images[0].get_array(), np.nan)
    expected = tables["cka_map"].query("context == 'own_skill' and coordinates == 'all'")["debiased"].to_numpy()
    np.testing.assert_array_equal(shown, expected.reshape(12, 12))  # a row a student layer, in their order as numbers
    cka = tables["cka"].set_index(["context", "coordinates", "layer"]).sort_index()
    for axes, coordinates in ((b, "all"), (c, "trimmed")):
        for context in LEVELS:
            _, colour, marker = CONTEXTS[context]
            lines = [line for line in axes.lines if line.get_color() == colour]
            (curve,) = [line for line in lines if len(line.get_xdata()) == 12 and line.get_marker() == marker]
            values = cka.loc[(context, coordinates)]["dissimilarity"]
            np.testing.assert_array_equal(curve.get_ydata(), values[LAYERS])  # NaN at the undefined layer: a gap
            (mean,) = [line for line in lines if len(line.get_xdata()) == 1 and line.get_markerfacecolor() == colour]
            assert mean.get_ydata()[0] == values["mean"] and mean.get_xdata()[0] > 11
        hollow = [line.get_ydata()[0] for line in axes.lines if line.get_markerfacecolor() == "white"]
        assert sorted(hollow) == [0.00067, 0.00406]
        (ticks,) = [line for line in axes.lines if line.get_marker() == "|"]
        assert list(ticks.get_xdata()) == [6, 7, 8, 9, 10, 11]
    assert b.get_title(loc="left") == "d = 160, n = 5000 tokens"
    assert c.get_title(loc="left") == "≤ 1 massive coordinates dropped"


def test_every_interval_is_drawn(tmp_path, tables):
    _, b, _ = drawn(tables, tmp_path).axes[:3]
    assert len(b.collections) == len(LEVELS)  # a band each
    low, high = b.get_ylim()
    mine = tables["cka"][tables["cka"]["coordinates"] == "all"]
    assert low <= mine["low"].min() < 0 and high >= mine["high"].max()


def test_without_controls_and_with_two_readers(tmp_path, tables):
    own = {name: frame[frame["context"] == "own_skill"] for name, frame in tables.items() if name != "cka_contrasts"}
    assert write(tmp_path / "own", INPUTS, own).png.stat().st_size > 1000
    two = {name: pd.concat([frame, frame.assign(reader="smollm2-135m")]) for name, frame in tables.items()}
    assert len([axes for axes in drawn(two, tmp_path / "two").axes if axes.get_xlabel()]) == 6


def test_no_own_skill_is_refused(tmp_path, tables):
    without = {name: frame[frame["context"] != "own_skill"] for name, frame in tables.items() if "context" in frame}
    with pytest.raises(ValueError, match="figure 6 needs CKA under own_skill"):
        write(tmp_path, INPUTS, without)
