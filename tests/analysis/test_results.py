"""Results of a folder: a run, a study, a paper with its studies; tables anew or as stored; claims over all of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from analysis.ablation import PRESETS, plan
from analysis.arms import find_study
from analysis.results import claims_of, results
from diagnostics.artifact import save_artifact, save_trajectories

SIZES = replace(PRESETS["smoke"], seeds=(0,))
WON = {"grpo": 3, "sdar": 5, "pcsd": 6}
N = 8


@pytest.fixture
def paper(tmp_path, episode) -> Path:
    """A paper's folder in which the main study has results and another was only planned."""
    for name in ("pcsd-main", "pcsd-lambda"):
        study = find_study(name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "ablation.json").write_text(json.dumps(plan(study, SIZES, [0], False)))
    arms = json.loads((tmp_path / "pcsd-main" / "ablation.json").read_text())["arms"]
    for arm in arms:
        if arm["arm"] not in WON:
            continue
        run = tmp_path / "pcsd-main" / "seed0" / arm["arm"]
        step = arm["start"] + arm["steps"]
        played = [episode(f"t{i}", i < WON[arm["arm"]], step=step) for i in range(N)]
        save_trajectories(run / "trajectories" / f"household_valid_seen_step{step}_seed0", played)
        (run / "config.json").write_text(json.dumps({"env": {"kind": "household"}, "eval": {"panel": "valid_seen"}}))
        (run / "metrics.jsonl").write_text(
            json.dumps({"step": 1, "eval/success": 0.5, "tokens/rollout": 9, "time/rollout": 2}) + "\n"
        )
    return tmp_path


@pytest.fixture
def measured(tmp_path) -> Path:
    place = {"trajectory": "a", "task": "t", "context": "own_skill"}
    rows = [
        {**place, "method": method, "weight_own": 0.5, "weight_perturbed": 0.4, "action_weight_own": 0.5,
         "action_weight_perturbed": 0.4, "quality_own": -1.0, "quality_perturbed": -2.0, "n_tokens": 3,
         "n_action_tokens": 2, "mate": "b", "undefined": ""}
        for method in ("sdar", "pcsd")
    ]  # fmt: skip
    return save_artifact(
        tmp_path / "policy" / "measurements" / "pcsd", "measurements", tables={"perturbation": rows}
    ).path


def test_a_paper_is_its_finished_studies_and_the_whole(paper, measured):
    main, whole = results(paper)
    assert main.folder == paper / "pcsd-main" and whole.folder == paper
    assert {"success", "differences"} <= set(main.tables) and "perturbation_units" not in main.tables
    assert {"success", "differences", "perturbation_units"} <= set(whole.tables)
    assert "policy/measurements/pcsd" in whole.inputs and all(not Path(path).is_absolute() for path in whole.inputs)
    inside = {path.removeprefix("pcsd-main/") for path in whole.inputs} - {"policy/measurements/pcsd"}
    assert inside == set(main.inputs)


def test_stored_tables_are_the_tables_that_were_made(paper, measured):
    made = results(paper)
    (paper / "pcsd-main" / "seed0").rename(paper / "elsewhere")  # the runs are gone, what was made of them is not
    for fresh, stored in zip(made, results(paper, stored=True), strict=True):
        assert set(fresh.tables) == set(stored.tables) and dict(fresh.inputs) == dict(stored.inputs)
        for name, table in fresh.tables.items():
            pd.testing.assert_frame_equal(stored.tables[name], table.reset_index(drop=True), check_dtype=False)


def test_claims_of_the_whole_are_read_from_all_studies(paper, measured):
    found = results(paper)
    path = claims_of(found[-1], found)
    rows = {(row["id"], row["study"]): row for row in json.loads(path.read_text())["claims"]}
    beats = rows["pcsd/beats-grpo", "pcsd-main"]
    assert path == paper / "claims.json" and beats["value"] == pytest.approx(3 / N)
    own = json.loads(claims_of(found[0], found).read_text())
    assert {row["study"] for row in own["claims"]} == {"", "pcsd-main"}


def test_a_folder_without_results_is_refused(tmp_path, paper):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="neither measurements nor episodes"):
        results(tmp_path / "nothing")
    (paper / "pcsd-main" / "seed0").rename(paper / "elsewhere")
    with pytest.raises(ValueError, match="no study of"):
        results(paper)
