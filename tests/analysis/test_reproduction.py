"""A paper as one graph: what is shared, what is not, and that every command of it can be understood."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis import reproduction
from analysis.ablation import Part, graph
from analysis.arms import Arm, Study, find_study
from analysis.reproduction import PAPERS, PRESETS, finished, paper_stages, reproduce_paper
from analysis.study import Stage
from training.arguments import check_training, data_words, parse
from training.options import Data, Diagnose, Eval, Train

OPTIONS = {"eval": Eval(), "diagnose": Diagnose(), "data": Data()}


def after(stage: Stage, key: str) -> str:
    return stage.command[stage.command.index(f"--{key}") + 1]


@pytest.mark.parametrize("paper", PAPERS)
@pytest.mark.parametrize("recipe", PRESETS)
def test_every_command_of_a_paper_is_understood(paper, recipe, tmp_path):
    stages = paper_stages(tmp_path, paper, PRESETS[recipe])
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
    stages = paper_stages(tmp_path, paper, PRESETS["tiny"], [0, 1])
    outs = [after(stage, "out") for stage in stages if stage.command[3] == "train"]
    assert len(outs) == len(set(outs))
    assert [stage.name for stage in stages].count("games") == 1
    shared = [stage for stage in stages if stage.command[3] == "train" and "--init-from" not in stage.command]
    assert [after(stage, "out") for stage in shared] == [str(tmp_path / f"seed{seed}" / "stage1") for seed in (0, 1)]
    arms = sum(len(find_study(name).arms) for name in PAPERS[paper])
    assert len(outs) == 2 * (arms + 1)
    starts = {after(stage, "init-from") for stage in stages if "--init-from" in stage.command}
    assert starts == {str(tmp_path / f"seed{seed}/stage1/checkpoints/step_10") for seed in (0, 1)}
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
    for name in PAPERS["sdar"]:
        plan = json.loads((tmp_path / name / "ablation.json").read_text())
        assert (plan["study"], plan["seeds"], plan["starred"]) == (name, [3], name == "sdar-main")
    assert finished(tmp_path, "sdar") == []  # nothing is evaluated yet
    assert not Path(tmp_path / "seed3").exists()


def test_studies_that_would_train_another_stage_one_are_refused(tmp_path):
    one = Study("one", (Arm("a", "grpo", base="a"),))
    other = Study("other", (Arm("a", "grpo", base="a"),), common={"env.max_turns": 9})
    with pytest.raises(ValueError, match="one and other cannot branch from one Stage I: their common settings differ"):
        graph(tmp_path, [Part(one, tmp_path), Part(other, tmp_path, "other-")], PRESETS["smoke"].sizes, [0])
