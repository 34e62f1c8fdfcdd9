"""Table 1: the graph of its three environments, and the papers' layouts filled from small known runs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from analysis import table1
from analysis.ablation import plan
from analysis.arms import find_study
from analysis.layout import layout, write_layouts
from analysis.reproduce import chosen_studies, reproduce_study
from analysis.results import results
from analysis.table1 import PAPERS, PRESETS, WORLDS, stages, summary
from diagnostics.artifact import save_trajectories
from training.arguments import check_training, data_words, parse
from training.options import Data, Eval, Train, played_as

SMOKE = PRESETS["smoke"]
N = 4  # tasks


def test_every_command_is_understood_and_its_results_are_where_the_tables_look(tmp_path):
    found = stages(tmp_path, SMOKE, [0, 1])
    names = [stage.name for stage in found]
    assert len(set(names)) == len(names)
    for place, stage in enumerate(found):
        assert set(stage.needs) <= set(names[:place])
        command, given = stage.command[3], list(stage.command[4:])
        if command == "train":
            check_training(Train(), None, given)
        elif command == "eval":
            parse(Eval(), given, "undertow eval")
        else:
            parse(Data(), data_words(given), "undertow data")
    arms = len(find_study("table1").arms)
    kinds = Counter(stage.command[3] for stage in found)
    assert kinds["train"] == len(WORLDS) * 2 * (arms + 1) and kinds["data"] == 1  # only household games are made
    assert all(str(tmp_path / stage.name.partition("-")[0]) in map(str, stage.output.parents) for stage in found)


def test_a_worlds_panel_and_policy_are_those_of_its_recipe(tmp_path):
    for world in WORLDS.values():
        config = played_as(world.policy)
        assert world.panel == f"{config.env.kind}_{config.eval.panel}" and config.model.name == world.policy
        assert world.common.get("recipe", "tiny-grpo") == config.recipe
    own = {stage.name: stage for stage in stages(tmp_path, SMOKE, [0])}
    shop, home = own["webshop-skill_prompt"], own["household-vanilla"]
    policy = tmp_path / "webshop/policy/trajectories"
    assert shop.output == policy / "webshop_sdar_valid_step0_seed0_skill_prompt" and not shop.needs
    assert home.needs == ("household-games",) and str(tmp_path / "household/games") in home.command
    starred = own["search-seed0-skill_grpo-starred"]
    assert starred.output.name == "searchqa_valid_seen_step2_seed0_skill_prompt"
    assert starred.needs == ("search-seed0-skill_grpo",)


def test_the_methods_are_arms_or_train_nothing():
    arms = {arm.name: arm.method for arm in find_study("table1").arms}
    assert all(name == method for name, method in arms.items())  # found among the published values by name
    rows = {method for _, methods in PAPERS.values() for method in methods}
    assert rows - set(arms) == {"vanilla", "skill_prompt*", "skill_grpo*"} and set(arms) <= rows


@pytest.fixture
def folder(tmp_path, episode) -> Path:
    """WebShop whole, household without a policy of its own, and no Search-QA."""

    def plays(run: Path, name: str, won: int, world: str, step: int) -> None:
        env, split = WORLDS[world].panel.split("_", 1)
        kind, half = ("shoes", 0.5) if env == "webshop" else ("pick_and_place_simple", None)
        score = [1.0 if i < won else half for i in range(N)] if half else [None] * N
        played = [
            episode(f"t{i}", i < won, env=env, split=split, step=step, task_type=kind, score=score[i]) for i in range(N)
        ]
        save_trajectories(run / "trajectories" / name, played)
        if step:
            (run / "config.json").write_text(json.dumps({"env": {"kind": env}, "eval": {"panel": split}}))
            (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "eval/success": 0.5, "time/rollout": 1}) + "\n")

    for name, wins in (("household", {"grpo": 1, "pcsd": 3}), ("webshop", {"grpo": 2, "skill_grpo": 3, "pr_opd": 4})):
        path = tmp_path / name
        path.mkdir()
        (path / "ablation.json").write_text(json.dumps(plan(find_study("table1"), SMOKE, [0], False)))
        panel = WORLDS[name].panel
        for arm, won in wins.items():
            plays(path / "seed0" / arm, f"{panel}_step2_seed0", won, name, 2)
    run = tmp_path / "webshop"
    plays(run / "seed0/skill_grpo", "webshop_sdar_valid_step2_seed0_skill_prompt", 4, "webshop", 2)
    plays(run / "policy", "webshop_sdar_valid_step0_seed0", 1, "webshop", 0)
    plays(run / "policy", "webshop_sdar_valid_step0_seed0_skill_prompt", 2, "webshop", 0)
    return tmp_path


def test_ours_and_what_is_published_stand_in_one_row(folder):
    *parts, whole = results(folder)
    assert [part.folder.name for part in parts] == ["household", "webshop"] and whole.folder == folder
    table = whole.tables["table1"]
    ours = table.drop_duplicates(["paper", "environment", "method", "column"])
    ours = ours.set_index(["paper", "environment", "method", "column"])["value"].dropna().to_dict()
    assert ours["SDAR", "webshop", "vanilla", "Success"] == 1 / 4
    assert ours["SDAR", "webshop", "vanilla", "Score"] == (1 + 3 * 0.5) / 4
    assert ours["SDAR", "webshop", "skill_prompt*", "Success"] == 2 / 4
    assert (
        ours["SDAR", "webshop", "skill_grpo", "Success"] == 3 / 4
        and ours["PCSD", "webshop", "skill_grpo*", "Success"] == 1.0
    )
    assert ours["PR-OPD", "webshop", "pr_opd", "Score"] == 1.0
    assert ours["PCSD", "household", "pcsd", "all"] == ours["PCSD", "household", "pcsd", "pick"] == 3 / 4
    assert ("SDAR", "household", "vanilla", "all") not in ours and "search" not in set(table["environment"])
    row = table.query("paper == 'PR-OPD' and environment == 'webshop' and method == 'grpo' and column == 'Success'")
    printed = dict(zip(row["model"], row["published"], strict=True))
    assert printed == {"Qwen2.5-3B-Instruct": 0.555, "Qwen3-1.7B": 0.43}  # of this paper, not of SDAR
    assert set(row["value"]) == {0.5} and (row["low"] < 0.5).all() and (row["high"] > 0.5).all()
    assert row["source"].str.startswith("PR-OPD").all() and set(row["n_tasks"]) == {N}
    assert "webshop/tables/ablation" in whole.inputs and any("policy" in path for path in whole.inputs)


def test_the_layouts_can_be_pasted(folder):
    results(folder)
    text = (folder / "tables/table1_pr_opd.md").read_text()
    assert "## ALFWorld, 4 tasks" in text and "## WebShop, 4 tasks" in text and "Search-QA" not in text
    lines = text.splitlines()
    at = next(place for place, line in enumerate(lines) if line.startswith("| GRPO |") and "50.0" in line)
    assert lines[at].startswith("| GRPO | ours | 75.0 [")
    assert lines[at + 1] == "|  | *Qwen2.5-3B-Instruct* | *70.4* | *55.5* |"
    assert lines[at + 2] == "|  | *Qwen3-1.7B* |  | *43.0* |"
    assert lines.index("| method | weights | Score | Success |") < at
    sdar = (folder / "tables/table1_sdar.md").read_text()
    assert r"| Skill-GRPO\* | ours | 100.0 [" in sdar and r"| SkillPrompt\* | ours |" in sdar
    tex = (folder / "tables/table1_sdar.tex").read_text()
    assert (
        r"\begin{tabular}{llcc}" in tex and r" & \textit{Qwen2.5-3B-Instruct} & \textit{79.8} & \textit{63.3} \\" in tex
    )
    assert tex.count(r"\begin{tabular}") == tex.count(r"\end{tabular}") == 2
    csv = pd.read_csv(folder / "tables/table1_pcsd.csv")
    assert set(csv["paper"]) == {"PCSD"} and {"value", "low", "high", "published", "model", "source"} <= set(csv)


def test_columns_keep_the_papers_order_where_a_method_has_only_some(tmp_path):
    rows = [("vanilla", "pick", None, None, ""), ("vanilla", "all", None, 0.2, "3B"), ("grpo", "pick", 0.5, None, ""),
            ("grpo", "all", 0.4, 0.6, "")]  # fmt: skip
    table = pd.DataFrame(rows, columns=["method", "column", "value", "published", "model"]).astype({"value": float})
    told = layout(table.assign(low=0.1, high=0.9))
    assert list(told) == ["method", "weights", "pick", "all"]
    assert told.to_numpy().tolist() == [
        ["Vanilla", "3B", "", "20.0"],
        ["GRPO", "ours", "50.0 [10.0, 90.0]", "40.0 [10.0, 90.0]"],
        ["GRPO", "not named", "", "60.0"],
    ]
    one = table.assign(low=0.1, high=0.9, paper="SDAR", environment="household", n_tasks=float("nan"))
    assert [path.name for path in write_layouts(tmp_path, one)] == [
        f"table1_sdar.{kind}" for kind in ("md", "tex", "csv")
    ]
    assert "## ALFWorld\n" in (tmp_path / "table1_sdar.md").read_text()


def test_it_is_drawn_again_from_what_was_stored(folder):
    made = results(folder)[-1]
    for name in WORLDS:
        if (folder / name).is_dir():
            (folder / name / "seed0").rename(folder / name / "elsewhere")
    again = results(folder, stored=True)[-1]
    pd.testing.assert_frame_equal(again.tables["table1"], made.tables["table1"], check_dtype=False)
    assert list(summary(made.tables)) == ["table 1, ALFWorld, in per cent", "table 1, WebShop, in per cent"]
    printed = summary(made.tables)["table 1, WebShop, in per cent"].set_index("method")
    assert list(printed.index) == ["Vanilla", "SkillPrompt*", "GRPO", "Skill-GRPO", "Skill-GRPO*", "PR-OPD"]
    assert printed.loc["PR-OPD", "Score"] == "100.0 [100.0, 100.0]"


def test_a_folder_without_results_is_refused(tmp_path, folder):
    (folder / "household/seed0").rename(folder / "one")
    (folder / "webshop/seed0").rename(folder / "two")
    with pytest.raises(ValueError, match="no study of .* has results yet"):
        results(folder)


def test_the_plans_are_written_and_the_recipe_is_checked_before_any_work(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(table1, "run_study", lambda found, folder, jobs: seen.update(found=found, jobs=jobs) or 0)
    assert reproduce_study("table1", tmp_path, "smoke", [3], 2) == 0 and seen["jobs"] == 2
    plans = {name: json.loads((tmp_path / name / "ablation.json").read_text()) for name in WORLDS}
    assert [plans[name]["seeds"] for name in WORLDS] == [[3]] * 3
    assert plans["search"]["common"] == {"recipe": "tiny-search-grpo"}
    assert chosen_studies("table1", "smoke", [0, 1]) == ("table1",)
    with pytest.raises(ValueError, match="no recipe 'smok' of table1; did you mean 'smoke'"):
        chosen_studies("table1", "smok", [0])
