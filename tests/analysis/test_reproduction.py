"""A paper as one graph: what is shared, what is not, and that every command of it can be understood."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis import reproduction
from analysis.ablation import Part, graph, plan
from analysis.arms import Arm, Study, find_study
from analysis.reproduction import PAPERS, PRESETS, finished, paper_stages, reproduce_paper, tabulate
from analysis.study import Stage
from diagnostics.artifact import save_trajectories
from training.arguments import check_training, data_words, parse
from training.options import Data, Diagnose, Eval, Train

OPTIONS = {"eval": Eval(), "diagnose": Diagnose(), "data": Data()}


def after(stage: Stage, key: str) -> str:
    return stage.command[stage.command.index(f"--{key}") + 1]


@pytest.mark.parametrize("paper", PAPERS)
@pytest.mark.parametrize("recipe", PRESETS)
def test_every_command_of_a_paper_is_understood(paper, recipe, tmp_path):
    stages = paper_stages(tmp_path, paper, PAPERS[paper].recipes[recipe])
    names = [stage.name for stage in stages]
    assert len(names) == len(set(names))
    for place, stage in enumerate(stages):
        assert set(stage.needs) <= set(names[:place]), f"{stage.name} needs what comes later"
    assert len({stage.command for stage in stages}) == len(stages)
    for stage in stages:
        command, words = stage.command[3], list(stage.command[4:])
        if command == "train":
            check_training(Train(), None, words)
        else:
            parse(OPTIONS[command], data_words(words) if command == "data" else words, f"undertow {command}")


@pytest.mark.parametrize("paper", PAPERS)
def test_stage_one_is_trained_once_a_seed(paper, tmp_path):
    recipe = PAPERS[paper].recipes["tiny"]
    stages = paper_stages(tmp_path, paper, recipe, [0, 1])
    outs = [after(stage, "out") for stage in stages if stage.command[3] == "train"]
    assert len(outs) == len(set(outs))
    assert [stage.name for stage in stages].count("games") == (paper != "pr-opd-webshop")  # a shop makes itself
    shared = [stage for stage in stages if stage.command[3] == "train" and "--init-from" not in stage.command]
    assert [after(stage, "out") for stage in shared] == [str(tmp_path / f"seed{seed}" / "stage1") for seed in (0, 1)]
    arms = sum(len(find_study(name).arms) for name in PAPERS[paper].studies)
    assert len(outs) == 2 * (arms + 1)
    starts = {after(stage, "init-from") for stage in stages if "--init-from" in stage.command}
    first = recipe.sizes.stage1_steps
    assert starts == {str(tmp_path / f"seed{seed}/stage1/checkpoints/step_{first}") for seed in (0, 1)}
    seeds = [after(stage, "seed") for stage in stages if stage.command[3] == "train"]
    assert seeds == sorted(seeds)  # one training seed is whole before the next begins


def test_the_papers_own_arm_is_diagnosed_where_it_ends(tmp_path):
    stages = {stage.name: stage for stage in paper_stages(tmp_path, "pcsd", PRESETS["tiny"])}
    run = tmp_path / "pcsd-main/seed0/pcsd"
    own = stages["diagnose-own"]
    assert own.command[4] == str(run) and own.needs == ("pcsd-main-seed0-pcsd",)
    played = after(own, "trajectories")
    assert played == str(run / "trajectories/household_valid_seen_step18_seed0")  # 10 of Stage I, 2 x 4 of its own
    assert after(stages["pcsd-main-seed0-pcsd"], "steps") == "8"
    expert = stages["diagnose-expert"]
    assert after(expert, "trajectories") == f"{played}_expert" == str(stages["expert"].output)
    assert {str(own.output), str(expert.output)} == {after(stage, "out") for stage in (own, expert)}


def test_webshop_is_read_on_its_own_panel_and_stage_one_plays_with_its_skill(tmp_path):
    recipe = PAPERS["pr-opd-webshop"].recipes["tiny"]
    stages = {stage.name: stage for stage in paper_stages(tmp_path, "pr-opd-webshop", recipe)}
    run, stage1 = tmp_path / "pr-opd-webshop/seed0/pr_opd", tmp_path / "seed0/stage1"
    assert after(stages["seed0-stage1"], "recipe") == "tiny-webshop-grpo"
    assert after(stages["diagnose-own"], "trajectories") == str(run / "trajectories/webshop_sdar_valid_step8_seed0")
    skill = stages["stage1-own-skill"]
    assert skill.command[4] == str(stage1) and skill.needs == ("seed0-stage1",)
    assert (after(skill, "protocol"), after(skill, "seeds")) == ("own_skill", "0,1")
    played = stage1 / "trajectories/webshop_sdar_valid_step4_seed0"
    assert after(stages["diagnose-stage1"], "trajectories") == str(played)
    assert stages["stage1-end"].output == played.with_name("webshop_sdar_valid_step4_seed1")
    assert skill.output == played.with_name("webshop_sdar_valid_step4_seed1_own_skill")
    arms = {arm.name: arm for arm in find_study("pr-opd-webshop").arms}
    assert list(arms) == ["grpo", "skill_sd", "opd", "pr_opd", "alignment"]
    assert arms["alignment"].settings == arms["pr_opd"].settings | {"method_config.reward_coefficient": 0}


def test_what_the_skill_brings_is_told_beside_what_was_measured(tmp_path, episode):
    """Fig. 1c by hand: of 8 tasks Stage I wins 3, with its skill 6; alignment wins 4."""
    study = find_study("pr-opd-webshop")
    main = tmp_path / study.name
    main.mkdir()
    (main / "ablation.json").write_text(json.dumps(plan(study, PRESETS["smoke"].sizes, [0], False)))

    def plays(run: Path, name: str, won: int, step: int, seed: int = 0) -> None:
        played = [episode(f"t{i}", i < won, step=step, seed=seed, env="webshop") for i in range(8)]
        save_trajectories(run / "trajectories" / f"webshop_sdar_valid_{name}", played)

    assert tabulate(tmp_path, study.name) == ({}, [])
    stage1 = tmp_path / "seed0/stage1"
    for name, won, step in (("step0_seed0", 1, 0), ("step2_seed0", 3, 2), ("step2_seed0_own_skill", 6, 2)):
        plays(stage1, name, won, step)
    plays(stage1, "step2_seed100", 2, 2, 100)
    plays(main / "seed0/alignment", "step3_seed0", 4, 3)
    tables, inputs = tabulate(tmp_path, study.name)
    gains = {(row.baseline, row.arm): row.difference for row in tables["gains"].itertuples()}
    assert gains == {
        ("student", "own_skill"): 3 / 8, ("student", "alignment"): 1 / 8, ("own_skill", "alignment"): -2 / 8
    }  # fmt: skip
    by_earlier = tables["skill_gains"].set_index("earlier_attempt")["difference"].to_dict()
    assert by_earlier == {"all": 3 / 8, "failed": pytest.approx(3 / 6), "succeeded": 0}
    assert set(tables["curves"]["arm"]) == {"student", "own_skill", "alignment"} and len(inputs) == 4
    assert (tmp_path / "tables" / study.name / "manifest.json").is_file()


def test_unseen_games_are_made_where_a_study_asks_for_them(tmp_path):
    for paper, asked in (("pcsd", "64"), ("sdar", "1")):
        stages = paper_stages(tmp_path, paper, PRESETS["tiny"])
        assert after(stages[0], "valid-unseen") == asked
        unseen = [stage.name for stage in stages if "valid_unseen" in stage.command]
        arms = [arm.name for arm in find_study("pcsd-main").arms] if paper == "pcsd" else []
        assert unseen == [f"pcsd-main-seed0-{arm}-unseen" for arm in arms]


def test_each_study_can_be_tabulated_in_its_own_folder(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(reproduction, "run_study", lambda stages, folder, jobs: seen.update(folder=folder) or 0)
    assert reproduce_paper(tmp_path, "sdar", PRESETS["smoke"], [3]) == 0 and seen["folder"] == tmp_path
    for name in PAPERS["sdar"].studies:
        plan = json.loads((tmp_path / name / "ablation.json").read_text())
        assert (plan["study"], plan["seeds"], plan["starred"]) == (name, [3], name == "sdar-main")
    assert finished(tmp_path, "sdar") == []  # nothing is evaluated yet
    assert not Path(tmp_path / "seed3").exists()


def test_studies_that_would_train_another_stage_one_are_refused(tmp_path):
    one = Study("one", (Arm("a", "grpo", base="a"),))
    other = Study("other", (Arm("a", "grpo", base="a"),), common={"env.max_turns": 9})
    with pytest.raises(ValueError, match="one and other cannot branch from one Stage I: their common settings differ"):
        graph(tmp_path, [Part(one, tmp_path), Part(other, tmp_path, "other-")], PRESETS["smoke"].sizes, [0])
