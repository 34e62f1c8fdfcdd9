"""Tables from episodes and measurements, down to the number."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis import stats
from analysis.measured import measured_tables
from analysis.tables import (
    arm_tables,
    change_table,
    curve_table,
    gain_table,
    save_tables,
    skill_gain_table,
    success_table,
    threshold_table,
)
from diagnostics.artifact import load_artifact, save_trajectories


def episodes(successes, arm="a", step=0, seed=0, errors=(), types="pick", first_id=0) -> pd.DataFrame:
    n = len(successes)
    return pd.DataFrame(
        {
            "trajectory": [f"{arm}-{step}-{seed}-{first_id + i}" for i in range(n)],
            "task": [f"t{i}" for i in range(n)],
            "type": types if isinstance(types, list) else [types] * n,
            "seed": seed,
            "step": step,
            "success": [bool(s) for s in successes],
            "n_turns": 4,
            "n_invalid": 1,
            "error": ["crashed" if i in errors else None for i in range(n)],
            "arm": arm,
        }
    )


def test_success_by_type_with_errors_apart():
    table = success_table(episodes([1, 0, 1, 0, 0], types=["heat", "heat", "pick", "pick", "pick"], errors=(4,)))
    table = table.set_index("type")
    assert table.index.tolist() == ["heat", "pick", "all"]
    assert table["success"].tolist() == [0.5, 0.5, 0.5]  # the crashed episode is no loss
    assert table["n_episodes"].tolist() == [2, 2, 4] and table["n_errors"].tolist() == [0, 1, 1]
    assert table.loc["all", "low"] == stats.wilson(2, 4).low and table.loc["all", "interval"] == "wilson"
    assert table.loc["all", "invalid_share"] == 0.25 and table.loc["all", "turns"] == 4


def test_only_errors_is_no_zero():
    row = success_table(episodes([0, 0], errors=(0, 1))).iloc[-1]
    assert row["n_errors"] == 2 and np.isnan(row["success"]) and np.isnan(row["low"])


def test_seeds_are_resampled_by_task():
    """Three equal evaluations hold no more information than one: Wilson over 3 x n would be too narrow."""
    draw = np.random.default_rng(0).random(100) < 0.5
    thrice = pd.concat([episodes(draw, seed=seed) for seed in range(3)])
    row = success_table(thrice).iloc[-1]
    assert (row["n_episodes"], row["n_tasks"], row["n_seeds"]) == (300, 100, 3)
    single, pooled = stats.wilson(int(draw.sum()), 100), stats.wilson(3 * int(draw.sum()), 300)
    width = row["high"] - row["low"]
    assert width == pytest.approx(single.high - single.low, rel=0.1) and width > 1.5 * (pooled.high - pooled.low)


def test_curve_refuses_another_panel():
    table = curve_table(pd.concat([episodes([1, 0], step=0), episodes([1, 1], step=5)]))
    assert table[["arm", "step", "success"]].to_numpy().tolist() == [["a", 0, 0.5], ["a", 5, 1.0]]
    with pytest.raises(ValueError, match="arm 'b' at step 5 was played on other tasks"):
        curve_table(pd.concat([episodes([1, 0]), episodes([1, 0, 1], arm="b", step=5)]))


def test_gain_is_paired_at_the_last_step():
    frame = pd.concat(
        [
            episodes([0, 0, 0, 0], arm="grpo", step=0),
            episodes([1, 0, 0, 0], arm="grpo", step=9),
            episodes([1, 1, 1, 0], arm="pr_opd", step=9, errors=(3,)),
        ]
    )
    row = gain_table(frame, [("grpo", "pr_opd")]).iloc[0]
    assert (row["wins"], row["losses"], row["n_tasks"], row["left_out"]) == (2, 0, 3, 1)
    assert row["difference"] == pytest.approx(2 / 3) and row["p"] == 0.5
    with pytest.raises(ValueError, match="no episode of arm 'sdar'; arms are grpo, pr_opd"):
        gain_table(frame, [("grpo", "sdar")])


def test_skill_gain_apart_by_earlier_outcome():
    earlier = episodes([1, 1, 0, 0], arm="earlier", seed=7)
    without, with_skill = episodes([1, 0, 0, 0]), episodes([1, 1, 1, 0], arm="b")
    table = skill_gain_table(without, with_skill, earlier).set_index("earlier_attempt")
    assert table["difference"].to_dict() == {"all": 0.5, "failed": 0.5, "succeeded": 0.5}
    assert table["n_tasks"].to_dict() == {"all": 4, "failed": 2, "succeeded": 2}
    with pytest.raises(ValueError, match="is both baseline and source of a skill"):
        skill_gain_table(earlier, with_skill, earlier)


def test_change_rates_of_known_tokens(measured):
    table = change_table(measured.table("measurements").to_pandas().assign(reader="tiny"))
    own = table[(table["context"] == "own_skill") & (table["channel"] == "output_change")].set_index("token_class")
    assert own["share"].to_dict() == {"think": pytest.approx(0.5), "action": 0.5, "all": 0.5}
    assert own["n_tokens"].to_dict() == {"think": 4, "action": 2, "all": 6}
    assert own["n_trajectories"].to_dict() == {"think": 2, "action": 1, "all": 2}
    assert own.loc["all", ["low", "high"]].tolist() == [0.0, 0.75]  # the two trajectories themselves
    assert own.loc["all", "threshold"] == pytest.approx(0.01, rel=0.01) and own.loc["all", "unit"] == "probability"
    hidden = table[(table["channel"] == "hidden_change") & (table["context"] == "own_skill")]
    assert (hidden["share"] == 0).all()
    null = table[(table["context"] == "unrelated") & (table["token_class"] == "all")]
    assert (null["share"] <= 0.01).all()


def test_threshold_curve_of_known_tokens(measured):
    table = threshold_table(measured.table("thresholds").to_pandas().assign(reader="tiny"))
    assert set(table["token_class"]) == {"all"} and set(table["reader"]) == {"tiny"}
    curve = table[(table["channel"] == "output_change") & (table["context"] == "own_skill")]
    share = np.array([np.mean(np.array([0.1, 0.3, 0.6, 0.001, 0.001, 0.002]) > t) for t in curve["threshold"]])
    near = np.isclose(curve["threshold"].to_numpy()[:, None], [0.1, 0.3, 0.6, 0.001, 0.002], rtol=1e-6).any(axis=1)
    np.testing.assert_allclose(curve["share"].to_numpy()[~near], share[~near])
    assert (curve["low"] <= curve["share"]).all() and (curve["share"] <= curve["high"]).all()


def test_tables_are_an_artifact_that_names_its_inputs(measured, tmp_path):
    table = change_table(measured.table("measurements").to_pandas().assign(reader="tiny"))
    saved = save_tables(tmp_path / "tables", {"changes": table}, inputs=[measured])
    back = load_artifact(saved.path, "table")
    pd.testing.assert_frame_equal(back.table("changes").to_pandas(), table, check_dtype=False)
    assert [entry["digest"] for entry in back.manifest["inputs"]] == [measured.digest]


def test_tables_of_the_figure_take_what_is_ready(measured, tmp_path, episode):
    """Tasks a, b: the student wins none, GRPO wins a at step 0 and both at step 9, with two evaluation seeds."""
    for name, step, seed, wins in (
        ("student", 0, 0, ""),
        ("grpo_0", 0, 0, "a"),
        ("grpo_9_0", 9, 0, "ab"),
        ("grpo_9_1", 9, 1, "ab"),
    ):
        rows = [episode(task, success=task in wins, step=step, seed=seed) for task in "ab"]
        save_trajectories(tmp_path / name, rows)
    arms = {"student": ["student"], "grpo": ["grpo_0", "grpo_9_0", "grpo_9_1"], "pr_opd": ["not_there_yet"]}
    paths = {arm: [tmp_path / name for name in names] for arm, names in arms.items()}
    tables, inputs = arm_tables(paths)
    assert len(inputs) == 4 and arm_tables({}) == ({}, [])
    curves = tables["curves"].set_index(["arm", "step"])
    assert curves["success"].to_dict() == {("student", 0): 0, ("grpo", 0): 0.5, ("grpo", 9): 1}
    assert curves["n_seeds"].to_dict() == {("student", 0): 1, ("grpo", 0): 1, ("grpo", 9): 2}
    gain = tables["gains"].set_index(["baseline", "arm"]).loc[("student", "grpo")]
    assert (gain["difference"], gain["wins"], gain["n_tasks"], gain["p"]) == (1, 2, 2, 0.5)
    assert len(tables["gains"]) == 1 and set(tables["success_by_type"]["step"]) == {0, 9}


def test_measured_tables_take_what_is_ready(measured, tmp_path):
    readers = {"tiny": measured.path, "smollm2-135m": tmp_path / "not_there_yet"}
    tables, inputs = measured_tables(readers)
    assert set(tables) == {"changes", "thresholds", "layer_changes"} and [i.path for i in inputs] == [measured.path]
    assert set(tables["changes"]["reader"]) == {"tiny"}
    assert measured_tables({"later": tmp_path / "not_there_yet"}) == ({}, [])
