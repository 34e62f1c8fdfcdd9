"""Figure 1: what is written beside the picture, never its pixels."""

from __future__ import annotations

import hashlib
import json

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from analysis.reference import paper_values
from figures.fig_invisible_advantage import CLASSES, draw, write
from figures.style import CHANNELS, style

INPUTS = {"measurements/change": "0123abcd"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory, changes, thresholds, curves):
    """Written from tables that hold more than is drawn."""
    more = pd.concat([changes, changes.assign(channel="hidden_change_centred")], ignore_index=True)
    by_class = pd.concat([thresholds, thresholds.assign(token_class="think")], ignore_index=True)
    return write(tmp_path_factory.mktemp("figure"), INPUTS, {"changes": more, "thresholds": by_class, "curves": curves})


def test_data_beside_the_figure_is_what_is_drawn(saved, changes, thresholds, curves):
    back = {table: pd.read_csv(path) for table, path in saved.data.items()}
    drawn = changes[changes["context"] != "unrelated"].reset_index(drop=True)
    pd.testing.assert_frame_equal(back["changes"], drawn)
    pd.testing.assert_frame_equal(back["thresholds"], thresholds)
    pd.testing.assert_frame_equal(back["curves"], curves)
    paper = back["paper"].set_index(["quantity", "model"])["low"]
    assert paper["change/hidden", "Qwen3-1.7B"] == 0.933 and paper["change/output", "Qwen2.5-3B-Instruct"] == 0.237


def test_record_names_script_inputs_interval_and_references(saved):
    record = json.loads(saved.record.read_text())
    assert record["script"] == "figures.fig_invisible_advantage" and record["inputs"] == INPUTS
    assert "bootstrap over trajectories" in record["interval"]
    assert record["references"] == sorted(
        {*paper_values("change/")["source"], *paper_values("success/webshop/")["source"]}
    )
    assert len(record["sha256"]) == 6
    for name, digest in record["sha256"].items():
        assert hashlib.sha256((saved.png.parent / name).read_bytes()).hexdigest() == digest


def test_equal_tables_give_equal_bytes(saved, tmp_path, changes, thresholds, curves):
    tables = {"changes": changes, "thresholds": thresholds, "curves": curves}
    write(tmp_path / "again", INPUTS, tables)
    for path in saved.png.parent.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name
    other = write(tmp_path / "other", INPUTS, {**tables, "changes": changes.assign(share=changes["share"] / 2)})
    assert other.png.read_bytes() != saved.png.read_bytes()


def test_first_figure_needs_no_training(tmp_path, changes, thresholds):
    first = write(tmp_path, INPUTS, {"changes": changes, "thresholds": thresholds})
    assert set(first.data) == {"changes", "thresholds", "paper"}
    assert not pd.read_csv(first.data["paper"])["quantity"].str.startswith("success").any()
    assert len(draw(changes, thresholds, pd.DataFrame()).axes) == 4


def test_curves_of_an_ablation_are_not_this_study_s(tmp_path, changes, thresholds, curves):
    for other in (curves.assign(arm="rlsd"), curves.drop(columns=["low", "high"])):
        saved = write(tmp_path, INPUTS, {"changes": changes, "thresholds": thresholds, "curves": other})
        assert set(saved.data) == {"changes", "thresholds", "paper"}


def test_bars_and_curves_hold_the_numbers(changes, thresholds, curves):
    figure = draw(changes[changes["reader"] == "tiny"], thresholds, curves)
    a, b, c = figure.axes
    own = changes[(changes["reader"] == "tiny") & (changes["context"] == "own_skill")]
    own = own.set_index(["channel", "token_class"])["share"]
    heights = [bar.get_height() for bar in a.patches]
    assert heights == [own[channel, token_class] for channel in CHANNELS for token_class in CLASSES]
    assert a.get_ylim()[0] == 0 and c.get_ylim()[0] == 0
    assert b.get_xscale() == "log"
    grpo = curves[curves["arm"] == "grpo"]["success"].tolist()
    assert any(np.array_equal(line.get_ydata(), grpo) for line in c.lines)


def test_missing_class_and_single_trajectory_are_drawn(tmp_path, changes, thresholds):
    few = changes[(changes["reader"] == "tiny") & (changes["token_class"] != "think")].assign(
        low=np.nan, high=np.nan, n_trajectories=1
    )
    assert write(tmp_path, INPUTS, {"changes": few, "thresholds": thresholds}).png.stat().st_size > 0


def test_no_own_skill_is_refused(tmp_path, changes, thresholds):
    with pytest.raises(ValueError, match="needs change rates under own_skill"):
        write(tmp_path, INPUTS, {"changes": changes[changes["context"] == "floor"], "thresholds": thresholds})


def test_style_leaves_the_callers_settings_alone():
    before = dict(mpl.rcParams)
    with style():
        assert mpl.rcParams["font.size"] == 7
    assert dict(mpl.rcParams) == before
