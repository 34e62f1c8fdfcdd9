"""The alignment curves: steps counted from the first of alignment, means over layers, the last step by layer."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from figures.fig_alignment import LOSS, PROJECTED, RANK, RAW, aligned, draw, write

INPUTS = {"seed0/pr_opd": "0123abcd"}
STEPS, LAYERS = range(101, 107), range(11)


@pytest.fixture
def signals() -> pd.DataFrame:
    """Two arms that align from step 101 on (rows of GRPO before), and one that does not."""
    rows = []
    for number, arm in enumerate(("pr_opd", "mine", "grpo")):
        rows += [(arm, "loss/policy", step, 0.1) for step in range(99, 107)]
        if arm == "grpo":
            continue
        for step in STEPS:
            rows.append((arm, LOSS, step, 2.0 / (step - 100) + number))
            for layer in LAYERS:
                rows.append((arm, f"{PROJECTED}{layer}", step, 1 - 0.01 * layer - 1 / (step - 99)))
                rows.append((arm, f"{RAW}{layer}", step, 0.99 - 0.001 * layer))
                rows.append((arm, f"{RANK}{layer}", step, 40.0 + layer - number))
    table = pd.DataFrame(rows, columns=["arm", "metric", "step", "value"])
    return table.assign(lowest=table["value"] - 0.02, highest=table["value"] + 0.03, n_training_seeds=3)


def test_means_over_layers_and_the_last_step(signals):
    steps, layers = aligned(signals)
    assert set(steps["arm"]) == {"pr_opd", "mine"} and sorted(set(steps["step_of_alignment"])) == [1, 2, 3, 4, 5, 6]
    for prefix in (PROJECTED, RAW, RANK):
        for step in STEPS:
            mine = signals[(signals["arm"] == "mine") & (signals["step"] == step)]
            mine = mine[mine["metric"].isin([f"{prefix}{layer}" for layer in LAYERS])]
            row = steps[(steps["arm"] == "mine") & (steps["step"] == step) & (steps["metric"] == prefix)].iloc[0]
            expected = [mine["value"].mean(), mine["lowest"].mean(), mine["highest"].mean()]
            np.testing.assert_allclose(row[["value", "low", "high"]].tolist(), expected)
    assert set(layers["step"]) == {106} and set(layers["metric"]) == {PROJECTED, RAW}
    assert layers.query("arm == 'mine' and metric == @RAW")["layer"].tolist() == list(LAYERS)  # as numbers


def test_what_lies_beside_the_figure_is_what_is_drawn(tmp_path, signals):
    saved = write(tmp_path, INPUTS, {"signals": signals})
    steps, layers = (pd.read_csv(saved.data[name]) for name in ("steps", "layers"))
    a, b, c, d = draw(steps, layers, pd.read_csv(saved.data["paper"])).axes
    for axes, metrics in ((a, [LOSS]), (b, [PROJECTED, RAW]), (d, [RANK])):
        curves = [line for line in axes.lines if len(line.get_xdata()) == len(STEPS)]
        shown = sorted(np.round(line.get_ydata(), 9).tolist() for line in curves)
        wanted = steps[steps["metric"].isin(metrics)].groupby(["arm", "metric"])["value"]
        assert shown == sorted(np.round(values, 9).tolist() for _, values in wanted)
        assert len(axes.collections) == len(shown)  # a band each
    assert len([line for line in c.lines if len(line.get_xdata()) == len(LAYERS)]) == 4
    record = json.loads(saved.record.read_text())
    assert record["script"] == "figures.fig_alignment" and "alignment curves" in record["references"][0]
    again = write(tmp_path / "again", INPUTS, {"signals": signals})
    assert saved.png.read_bytes() == again.png.read_bytes()


def test_published_ranges_are_hollow(tmp_path, signals):
    saved = write(tmp_path, INPUTS, {"signals": signals})
    a, b, *_ = draw(*(pd.read_csv(saved.data[name]) for name in ("steps", "layers", "paper"))).axes
    hollow = [[list(line.get_xdata()), list(line.get_ydata())] for line in a.lines if line.get_marker() == "s"
              and line.get_markerfacecolor() == "white"]  # fmt: skip
    assert sorted(hollow) == [[[1, 1], [1.22, 1.52]], [[4.0, 7.0], [0.5, 0.5]], [[11.0, 19.0], [0.3, 0.3]]]
    assert [0.913, 0.933] in [list(line.get_ydata()) for line in b.lines]


def test_one_arm_one_seed_one_step_without_states(tmp_path, signals):
    one = signals.query("arm == 'pr_opd' and step == 101 and metric == @LOSS")
    one = one.assign(lowest=one["value"], highest=one["value"], n_training_seeds=1)
    assert write(tmp_path, INPUTS, {"signals": one}).png.stat().st_size > 1000


def test_no_alignment_is_refused(tmp_path, signals):
    for given in ({}, {"signals": signals.query("arm == 'grpo'")}):
        with pytest.raises(ValueError, match="needs an arm that logs loss/pr_opd"):
            write(tmp_path, INPUTS, given)
