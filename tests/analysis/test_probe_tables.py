"""Tables of the probes, down to the number."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis import stats
from analysis.measured import measured_tables
from analysis.probe_tables import probe_table
from diagnostics.artifact import save_artifact, to_table
from diagnostics.probe_stream import CLASS_COLUMNS, PROBE_COLUMNS, TRAJECTORY_COLUMNS

READERS = [("hidden", "embed"), ("hidden", "0"), ("top64", "")]


def tables(seed: int = 0) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two sets of labels: `a` read by three readers from 8 trajectories in 4 groups, `b` not estimable."""
    rng = np.random.default_rng(seed)
    counts = []
    for features, layer in READERS:
        for t in range(8):
            n = 3 + t % 2
            right = 0.5 * n if layer == "embed" else float(rng.integers(n + 1))
            where = {"labels": "a", "features": features, "layer": layer}
            where |= {"trajectory": f"t{t}", "task": f"k{t}", "group": t // 2}
            counts.append({**where, "n": n, "correct": right, "control_correct": 0.5 * n})
    frame = pd.DataFrame(counts)
    probes = [
        {
            "labels": "a",
            "features": features,
            "layer": layer,
            "accuracy": group["correct"].sum() / group["n"].sum(),
            "control_accuracy": 0.5,
            "not_estimable": "",
        }
        for (features, layer), group in frame.groupby(["features", "layer"], sort=False)
    ]
    probes.append({"labels": "b", "features": "", "layer": "", "accuracy": np.nan, "not_estimable": "only one class"})
    return pd.DataFrame(probes), frame


def test_intervals_resample_groups_whole():
    probes, counts = tables()
    table = probe_table(probes, counts)
    assert table[["labels", "features", "layer"]].equals(probes[["labels", "features", "layer"]])
    for row in table[table["labels"] == "a"].itertuples():
        mine = counts[(counts["features"] == row.features) & (counts["layer"] == row.layer)]
        groups = mine.groupby("group")[["correct", "n"]].sum()
        expected = stats.bootstrap_ratio(groups["correct"], groups["n"], np.random.default_rng(1))
        assert row.accuracy == pytest.approx(expected.estimate)
        assert (row.low, row.high) == pytest.approx((expected.low, expected.high), abs=0.02)
        assert row.selectivity == pytest.approx(row.accuracy - row.control_accuracy)
        assert row.selectivity_low == pytest.approx(row.low - 0.5, abs=1e-12)  # this control is 0.5 in every group
        assert row.interval == "percentile bootstrap over 4 groups of tasks"
    embed = table.iloc[0]
    assert embed["low"] == embed["high"] == 0.5 and embed["selectivity"] == 0.0


def test_what_is_not_estimable_stays_a_reason():
    row = probe_table(*tables()).iloc[-1]
    assert row["not_estimable"] == "only one class" and row["interval"] == ""
    assert row[["accuracy", "low", "high", "selectivity"]].isna().all()


def test_no_probe_at_all_is_an_empty_table():
    probes, counts = tables()
    table = probe_table(probes[probes["labels"] == "b"], counts.iloc[:0])
    assert len(table) == 1 and table["low"].isna().all()


def test_rows_do_not_depend_on_other_labels():
    probes, counts = tables()
    twice = pd.concat([probes.assign(labels="z"), probes]), pd.concat([counts.assign(labels="z"), counts])
    again = probe_table(*twice)
    again = again[again["labels"] != "z"].reset_index(drop=True)
    pd.testing.assert_frame_equal(again, probe_table(probes, counts))


def test_tables_of_an_artifact(tmp_path):
    probes, counts = tables()
    classes = [{"labels": "a", "class": "own_skill", "n_samples": 28, "n_trajectories": 8, "n_tasks": 8}]
    columns = {"probe": PROBE_COLUMNS, "probe_trajectories": TRAJECTORY_COLUMNS, "probe_classes": CLASS_COLUMNS}
    rows = {"probe": probes.to_dict("records"), "probe_trajectories": counts.to_dict("records")}
    rows["probe_classes"] = classes
    stored = {name: to_table(rows[name], columns[name]) for name in columns}
    artifact = save_artifact(tmp_path / "m", "measurements", tables=stored)
    found, _ = measured_tables({"tiny": artifact.path})
    assert set(found["probes"]["reader"]) == {"tiny"} and found["probe_classes"]["n_samples"].tolist() == [28]
    kept = ["labels", "accuracy", "low", "high", "selectivity"]
    expected = probe_table(probes, counts)[kept]
    pd.testing.assert_frame_equal(found["probes"][kept], expected, check_dtype=False)
