"""Ablations: what a study may say, the graph it becomes, and the tables of arms whose results are known."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save_file

from analysis import ablation, stats
from analysis.ablation import PRESETS, ablate_study, plan, stages, words
from analysis.ablation_tables import (
    evaluation_table,
    has_results,
    power_note,
    signal_ends,
    summary,
    tabulate,
)
from analysis.arms import Arm, Study, find_study, read_study, ready_studies
from analysis.compute import cost_frame, parameters
from analysis.differences import difference_table
from analysis.report import report_run
from analysis.study import Stage
from diagnostics.artifact import save_artifact, save_trajectories

TINY, SMOKE = PRESETS["tiny"], PRESETS["smoke"]
TWO = Study("two", (Arm("grpo", "grpo", base="grpo"), Arm("sdar", "sdar", {"method_config.beta": 7.5}, base="grpo")))


def study(tmp_path: Path, text: str) -> Study:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return read_study(path)


# What a study may say


def test_arms_are_read(tmp_path):
    text = """
    about: Which one?
    common: {env.max-turns: 9}
    arms:
      grpo: {method: grpo}
      early: {method: sdar, start: 1/3, length: end, base: grpo, method-config.beta: 1.5, paper: success/x}
    """
    found = study(tmp_path, text)
    assert found.name == "mine" and found.about == "Which one?" and found.common == {"env.max_turns": 9}
    assert found.arms[0] == Arm("grpo", "grpo", base="grpo")  # the first arm is the base unless the study says so
    early = {"method_config.beta": 1.5}
    assert found.arms[1] == Arm("early", "sdar", early, Fraction(1, 3), "end", base="grpo", paper="success/x")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("arms: {a: {method: grpo}}\nabuot: x", "unknown key 'abuot'.*'about'"),
        ("about: x", "no arms"),
        ("arms: []", "arms is \\[\\]"),
        ("- a", "expected the keys about"),
        ("arms: {a: {beta: 1}}", "arm 'a'.*no method"),
        ("arms: {a: {method: grpo}, a: {method: sdar}}", "has 'a' twice, line 1"),
        ("arms: {a: {method: grpo, base: aa}, ab: {method: grpo}}", "compared with 'aa'.*nearest: 'a"),
        ("arms: {a: {method: grpo, seed: 3}}", "sets seed: the study settles it"),
        ("arms: {a: {method: grpo, eval.every: 3}}", "sets eval.every: the study settles it"),
        ("arms: {a: {method: grpo, env.max-turns: 3}}", "sets env.max-turns: it must be equal in all arms"),
        ("arms: {a: {method: grpo, tasks_per_step: 3}}", "must be equal in all arms"),
        ("common: {method: sdar}\narms: {a: {method: grpo}}", "common settings.*sets method"),
        ("arms: {a: {method: grpo, method_config: {beta: 3}}}", "write 'method_config' with dots"),
        ("arms: {a: {method: grpo, start: 0}}", "start as a share"),
        ("arms: {a: {method: grpo, start: 3/2}}", "start as a share"),
        ("arms: {a: {method: grpo, length: -1}}", "length as a multiple"),
        ("arms: {a/b: {method: grpo}}", "needs another name"),
        ("arms: {stage1: {method: grpo}}", "needs another name"),
        ("arms: {a: {method: grpo}}\neval_seeds: many", "eval_seeds is 'many'"),
        ("arms: {a: {method: grpo}}\nunseen: 12", "unseen is 12, expected true or false"),
        ("arms: {a: [", "not YAML"),
        ("arms: !!python/object/apply:os.getcwd []", "not YAML"),
    ],
)
def test_what_is_no_study_is_refused(tmp_path, text, complaint):
    with pytest.raises(ValueError, match=complaint) as refusal:
        study(tmp_path, text)
    assert "\n" not in str(refusal.value)


def test_unknown_study_names_the_nearest():
    with pytest.raises(ValueError, match=r"no study 'chanels' \(nearest: 'channels'\)"):
        find_study("chanels")


WHOLE = {"pr-opd-webshop", "table1"}  # of a reproduction


def test_the_ready_studies_are_there():
    asked = "channels baselines pcsd-components pcsd-lambda sdar-gates sdar-beta sdar-lambda objective retrieval warmup"
    assert set(ready_studies()) == {*asked.split(), "layers", "horizon", "pcsd-main", "sdar-main", *WHOLE}
    arms = {name: {arm.name: arm for arm in find_study(name).arms} for name in ready_studies()}
    assert {arm.settings["method_config.coefficient"] for arm in arms["pcsd-lambda"].values()} == {0, 0.005, 0.01, 0.05}
    assert {arm.settings["method_config.beta"] for arm in arms["sdar-beta"].values()} == {0, 1, 5, 10}
    assert {arm.settings["method_config.coefficient"] for arm in arms["sdar-lambda"].values()} == {0.001, 0.01, 0.1}
    assert {arm.length for arm in arms["horizon"].values()} == {"2"}
    assert arms["channels"]["alignment"].settings["method_config.reward_coefficient"] == 0
    assert arms["channels"]["pr_opd_no_projector"].settings["method_config.projector"] is False


@pytest.mark.parametrize("name", sorted(ready_studies()))
def test_every_ready_study_is_one_that_can_be_trained(name, tmp_path):
    from training.arguments import check_training
    from training.options import Train

    graph = stages(tmp_path, find_study(name), TINY, [0])
    trained = [stage.command[4:] for stage in graph if stage.command[3] == "train"]
    assert len(trained) == 1 + len(find_study(name).arms)
    for command in trained:
        check_training(Train(), None, command)


def test_every_method_is_a_baseline():
    from training.method import available_methods

    assert {arm.method for arm in find_study("baselines").arms} == set(available_methods())


# The graph


def by_name(graph: list[Stage]) -> dict[str, Stage]:
    return {stage.name: stage for stage in graph}


def setting(stage: Stage, key: str) -> str:
    assert stage.command.count(f"--{key}") == 1, f"{key} stands there once, for the later would win without a word"
    return stage.command[stage.command.index(f"--{key}") + 1]


def test_settings_become_words():
    settings = {"method_config.projector": False, "flag": True, "a_b.c_d": 0.5, "layers": [0, 1], "none": []}
    expected = ["--method-config.no-projector", "--flag", "--a-b.c-d", "0.5", "--layers", "0", "1", "--none"]
    assert words(settings) == expected


def test_arms_of_a_seed_differ_in_nothing_else(tmp_path):
    graph = stages(tmp_path, TWO, TINY, [0, 1])
    found = by_name(graph)
    assert [stage.name for stage in graph] == ["games"] + [
        f"seed{seed}-{name}" for seed in (0, 1) for name in ("stage1", "grpo", "grpo-end", "sdar", "sdar-end")
    ]
    for seed in (0, 1):
        arms = [found[f"seed{seed}-{name}"] for name in ("grpo", "sdar")]
        checkpoint = str(tmp_path / f"seed{seed}/stage1/checkpoints/step_30")
        assert {setting(arm, "init-from") for arm in arms} == {checkpoint}
        assert {arm.needs for arm in arms} == {(f"seed{seed}-stage1",)}
        changed = set(arms[1].command) - set(arms[0].command)
        run = tmp_path / f"seed{seed}"
        assert changed == {"sdar", "--method-config.beta", "7.5", str(run / "sdar")}
    same = ("env.data", "eval.size", "eval.seed", "tasks-per-step", "group-size")
    trained = [stage for stage in graph if stage.command[3] == "train"]
    for key in same:
        assert len({setting(stage, key) for stage in trained}) == 1
    assert setting(found["seed1-sdar"], "seed") == setting(found["seed1-stage1"], "seed") == "1"
    assert setting(found["seed0-sdar-end"], "seeds") == "0,1"


def test_lengths_and_starts_are_in_steps_of_the_recipe(tmp_path):
    warmup = by_name(stages(tmp_path, find_study("warmup"), TINY, [0]))
    assert setting(warmup["seed0-stage1"], "save-every") == "2"  # a divisor of every start, so that each is saved
    assert setting(warmup["seed0-stage1"], "eval.every") == "10"  # every start is evaluated
    for name, start, steps in (("early", 10, 5), ("middle", 20, 5), ("late", 30, 5), ("early_to_end", 10, 25)):
        stage = warmup[f"seed0-pr_opd_{name}"]
        assert setting(stage, "init-from").endswith(f"stage1/checkpoints/step_{start}")
        assert setting(stage, "steps") == str(steps) and stage.output.name == f"step_{steps}"
    assert setting(warmup["seed0-grpo_late-end"], "seeds") == "0,1,2,3,4,5"
    horizon = by_name(stages(tmp_path, find_study("horizon"), TINY, [0]))
    assert {setting(horizon[f"seed0-{arm.name}"], "steps") for arm in find_study("horizon").arms} == {"10"}
    early = plan(find_study("warmup"), TINY, [0], False)["arms"][0]
    assert (early["start"], early["steps"]) == (10, 5)


def test_smoke_plays_nothing_twice_and_stars_are_asked_for(tmp_path):
    names = [stage.name for stage in stages(tmp_path, TWO, SMOKE, [0])]
    assert names == ["games", "seed0-stage1", "seed0-grpo", "seed0-sdar"]
    graph = stages(tmp_path, TWO, SMOKE, [0], starred=True)
    starred = [stage for stage in graph if stage.name.endswith("-starred")]
    assert len(starred) == 2 and all(setting(stage, "protocol") == "skill_prompt" for stage in starred)


def test_the_unseen_split_is_generated_and_played_where_a_study_asks(tmp_path):
    assert setting(stages(tmp_path, TWO, TINY, [0])[0], "valid-unseen") == "1"
    found = by_name(stages(tmp_path, replace(TWO, unseen=True), TINY, [0]))
    assert setting(found["games"], "valid-unseen") == "128" == setting(found["games"], "valid-seen")
    for arm in ("grpo", "sdar"):
        played = found[f"seed0-{arm}-unseen"]
        assert setting(played, "panel") == "valid_unseen" and setting(played, "seeds") == "0,1"
        assert played.command[4] == str(tmp_path / "seed0" / arm) and played.needs == (f"seed0-{arm}",)


def test_own_games_and_shared_settings_hold_everywhere(tmp_path):
    common = {"env.kind": "alfworld", "eval.size": 134, "model.device": "cuda"}
    graph = stages(tmp_path, replace(TWO, common=common), TINY, [0], starred=True)
    assert "games" not in by_name(graph) and graph[0].needs == ()
    for stage in graph:
        if stage.command[3] == "train":
            assert setting(stage, "env.kind") == "alfworld" and setting(stage, "eval.size") == "134"
        else:
            assert setting(stage, "device") == "cuda"


def test_a_wrong_setting_is_refused_before_any_work(tmp_path):
    from training.arguments import check_training
    from training.options import Train

    check = partial(check_training, Train(), None)
    bad = replace(TWO, arms=(TWO.arms[0], Arm("x", "sdar", {"method_config.bta": 1}, base="grpo")))
    with pytest.raises(ValueError, match=r"two, x: unknown key 'method-config.bta'.*'method-config.beta'"):
        ablate_study(tmp_path / "out", bad, SMOKE, check=check)
    bad = replace(TWO, arms=(TWO.arms[0], Arm("x", "sdr", base="grpo")))
    with pytest.raises(ValueError, match=r"two, x: unknown method 'sdr'; did you mean 'sdar'"):
        ablate_study(tmp_path / "out", bad, SMOKE, check=check)
    assert not (tmp_path / "out").exists()


METHOD = """
import pathlib
from dataclasses import dataclass
from training.method import Method, Needs
pathlib.Path(__file__ + ".ran").write_text("")
@dataclass(frozen=True)
class Config:
    x: float = 1.0
METHOD = Method("mine", "", "reward", Config, lambda config, step: Needs())
"""


def test_a_study_runs_no_file_that_the_user_did_not_name(tmp_path):
    from training.arguments import check_training
    from training.options import Train

    mine = tmp_path / "mine.py"
    mine.write_text(METHOD)
    own = replace(TWO, arms=(TWO.arms[0], Arm("x", str(mine), {"method_config.x": 2}, base="grpo")))
    command = by_name(stages(tmp_path, own, SMOKE, [0]))["seed0-x"].command[4:]
    with pytest.raises(ValueError, match=f"cannot name code to run; if you trust {mine}, say --method {mine}"):
        check_training(Train(), None, command)
    assert not Path(f"{mine}.ran").exists()
    check_training(Train(), str(mine), command)
    assert Path(f"{mine}.ran").exists()


def test_a_crashed_arm_leaves_the_others(tmp_path, monkeypatch, capfd):
    code = "import sys, pathlib; p = pathlib.Path(sys.argv[1]); {}; p.parent.mkdir(parents=True); p.write_text('x')"

    def fake(folder: Path, *_: object) -> list[Stage]:
        def stage(name: str, crash: str = "0", needs: tuple[str, ...] = ()) -> Stage:
            out = folder / name / "out"
            return Stage(name, (sys.executable, "-c", code.format(crash), str(out)), out, needs)

        first = stage("seed0-stage1")
        arms = [stage("seed0-grpo", "1 / 0", ("seed0-stage1",)), stage("seed0-sdar", needs=("seed0-stage1",))]
        return [first, *arms, stage("seed0-grpo-end", needs=("seed0-grpo",))]

    monkeypatch.setattr(ablation, "stages", fake)
    assert ablate_study(tmp_path, TWO, SMOKE) == 1
    assert (tmp_path / "seed0-sdar/out").exists() and not (tmp_path / "seed0-grpo-end/out").exists()
    assert "stage seed0-grpo failed" in capfd.readouterr().err
    assert [arm["arm"] for arm in json.loads((tmp_path / "ablation.json").read_text())["arms"]] == ["grpo", "sdar"]


# The tables

SIZES = replace(SMOKE, stage1_steps=4, stage2_steps=2, panel=8, eval_seeds=2, seeds=(0, 1))
N = 8  # tasks
P = 60  # parameters
#        grpo: tasks 0..3 are won; sdar: 0..5, but in training seed 1 only 0..4
WON = {("grpo", 0): 4, ("grpo", 1): 4, ("sdar", 0): 6, ("sdar", 1): 5}


@pytest.fixture
def folder(tmp_path, episode) -> Path:
    """A study of two arms, two training seeds and two evaluation seeds, as the commands would leave it."""
    study = replace(
        TWO, paper="SDAR", about="Which?", arms=(TWO.arms[0], replace(TWO.arms[1], paper="success/alfworld/sdar"))
    )
    (tmp_path / "ablation.json").write_text(json.dumps(plan(study, SIZES, [0, 1], True)))
    for (arm, seed), won in WON.items():
        run = tmp_path / f"seed{seed}" / arm
        for eval_seed in (0, 1):
            for suffix, extra in (("", 0), ("_skill_prompt", 1)):
                played = [
                    episode(f"t{i}", i < won + extra, seed=eval_seed, step=6, task_type="heat" if i % 2 else "pick")
                    for i in range(N)
                ]
                save_trajectories(run / "trajectories" / f"household_valid_seen_step6_seed{eval_seed}{suffix}", played)
        (run / "config.json").write_text(json.dumps({"env": {"kind": "household"}, "eval": {"panel": "valid_seen"}}))
        log = [
            {"step": 0, "attempt": 0, "eval/success": 0.25},
            {"step": 1, "eval/success": 0.75, **_step(arm, seed, 1.0)},
            {"step": 2, "eval/success": won / N, **_step(arm, seed, 0.5)},
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
        save_artifact(run / "checkpoints" / "step_2", "checkpoint", write=_weights)
    return tmp_path


def _step(arm: str, seed: int, loss: float) -> dict[str, float]:
    step = {"tokens/rollout": 100, "tokens/train": 80, "time/rollout": 2, "time/train": 3, "time/eval": 9}
    step |= {"kl/rollout_train": 0.5 + seed, "eval/turns": 9, "reward/success": 0.25}
    if arm == "sdar":
        step |= {"distill/tokens": 50, "time/skills": 5, "loss/sdar": loss + seed, "weight/sdar/mean": 0.5}
    return step


def _weights(path: Path) -> None:
    save_file({"a": np.zeros((5, 10), np.float32), "b": np.zeros(10, np.float32)}, path / "model.safetensors")
    save_file({"momentum": np.zeros(1000, np.float32)}, path / "optimizer.safetensors")


def test_success_and_differences_of_known_arms(folder):
    tables, inputs = tabulate(folder)
    assert len(inputs) == 2 * 2 * 2 * 2  # arms, training seeds, evaluation seeds, with and without skills
    success = tables["success"].set_index("arm")
    assert success["success"].to_dict() == {"grpo": 0.5, "sdar": 11 / 16}
    assert success.loc["sdar", ["lowest_seed", "highest_seed"]].tolist() == [5 / 8, 6 / 8]
    assert success.loc["sdar", ["n_episodes", "n_tasks", "n_training_seeds", "steps"]].tolist() == [32, 8, 2, 6]
    assert success.loc["sdar", "wilson_low"] == stats.wilson(22, 32).low
    row = tables["differences"].iloc[0]
    assert len(tables["differences"]) == 1 and (row["base"], row["arm"]) == ("grpo", "sdar")
    assert row["difference"] == pytest.approx(3 / 16) and row["low"] <= 3 / 16 <= row["high"]
    assert (row["wins"], row["losses"], row["p"]) == (2, 0, stats.mcnemar(2, 0))
    assert (row["seeds_better"], row["n_training_seeds"], row["n_tasks"]) == (2, 2, 8)
    types = tables["types"].set_index(["arm", "type"])["success"]
    assert types["sdar", "pick"] == 3 / 4 and types["sdar", "heat"] == 5 / 8
    starred = tables["starred"].set_index("arm")
    assert starred.loc["grpo", ["success", "without"]].tolist() == [5 / 8, 1 / 2]
    assert starred.loc["grpo", "difference"] == pytest.approx(1 / 8)


def test_unseen_tables_are_read_from_the_unseen_split(folder, episode):
    path = folder / "ablation.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "unseen": True}))
    assert not any(name.startswith("unseen") for name in tabulate(folder)[0])  # nothing is played there yet
    for arm, won in (("grpo", 2), ("sdar", 3)):
        for seed in (0, 1):
            played = [
                episode(
                    f"u{i}", i < won, seed=seed, step=6, split="valid_unseen", task_type="heat" if i % 2 else "pick"
                )
                for i in range(4)
            ]
            run = folder / "seed0" / arm  # one training seed is enough
            save_trajectories(run / "trajectories" / f"household_valid_unseen_step6_seed{seed}", played)
    tables, inputs = tabulate(folder)
    assert len(inputs) == 16 + 4
    types = tables["unseen_types"].set_index(["arm", "type"])
    assert types["success"].to_dict() == {
        ("grpo", "heat"): 1 / 2, ("grpo", "pick"): 1 / 2, ("grpo", "all"): 1 / 2,
        ("sdar", "heat"): 1 / 2, ("sdar", "pick"): 1.0, ("sdar", "all"): 3 / 4,
    }  # fmt: skip
    assert types.loc[("sdar", "all"), ["n_episodes", "n_tasks"]].tolist() == [8, 4]
    row = tables["unseen_differences"].iloc[0]
    assert (row["base"], row["arm"], row["difference"], row["wins"], row["losses"]) == ("grpo", "sdar", 0.25, 1, 0)
    assert list(tables["unseen_types"]) == list(tables["types"])
    assert list(tables["unseen_differences"]) == list(tables["differences"])
    assert tables["success"].set_index("arm")["success"].to_dict() == {"grpo": 0.5, "sdar": 11 / 16}  # as before
    assert "paired differences on the unseen split" in summary(tables)


def test_scores_and_their_differences_of_a_shop(folder, episode):
    """The same arms in a shop: whoever does not win has score 1/4, of SDAR 1/2."""
    for (arm, seed), won in WON.items():
        run = folder / f"seed{seed}" / arm
        half = 0.5 if arm == "sdar" else 0.25
        for eval_seed in (0, 1):
            played = [
                episode(f"t{i}", i < won, seed=eval_seed, step=6, env="webshop", split="sdar_valid",
                        task_type="shoes", score=1.0 if i < won else half)
                for i in range(N)
            ]  # fmt: skip
            save_trajectories(run / "trajectories" / f"webshop_sdar_valid_step6_seed{eval_seed}", played)
        (run / "config.json").write_text(json.dumps({"env": {"kind": "webshop"}, "eval": {"panel": "sdar_valid"}}))
    path = folder / "ablation.json"
    told = json.loads(path.read_text())
    told["paper"], told["arms"][0]["paper"], told["arms"][1]["paper"] = "PR-OPD", "accuracy/webshop/grpo", ""
    path.write_text(json.dumps(told))
    tables, _ = tabulate(folder)
    scores = tables["scores"].set_index(["arm", "type"])
    grpo, sdar = (4 + 4 / 4) / N, ((6 + 2 / 2) + (5 + 3 / 2)) / 2 / N
    assert scores.loc[("grpo", "all"), "score"] == grpo and scores.loc[("sdar", "mean"), "score"] == sdar
    row = tables["score_differences"].iloc[0]
    assert (row["base"], row["arm"], row["wins"], row["losses"]) == ("grpo", "sdar", 4, 0)
    assert row["difference"] == pytest.approx(sdar - grpo) and row["low"] <= sdar - grpo <= row["high"]
    assert tables["differences"].iloc[0]["wins"] == 2  # success says less
    main = tables["main"].set_index(["arm", "column"])["value"]
    assert main.to_dict() == {
        ("grpo", "Score"): grpo, ("grpo", "Success"): 0.5, ("sdar", "Score"): sdar, ("sdar", "Success"): 11 / 16
    }  # fmt: skip
    assert set(tables["paper"]["quantity"]) == {"accuracy/webshop/grpo", "score/webshop/grpo"}
    assert {"Score", "Success"} == set(tables["main_paper"]["column"])
    printed = summary(tables)
    assert {"score of the last weights", "paired differences of the score"} <= set(printed)


def test_final_best_and_mean_stand_apart(folder):
    table = tabulate(folder)[0]["evaluations"].set_index(["arm", "training_seed"])
    assert table.loc[("sdar", "1"), ["final", "best", "best_step", "mean_last_3", "n_last"]].tolist() == [
        5 / 8, 6 / 8, 1, 11 / 16, 2,
    ]  # fmt: skip
    assert table.loc[("grpo", "mean"), "final"] == 0.5 and table.loc[("grpo", "mean"), "best"] == 0.75
    long = pd.DataFrame({"step": range(6), "metric": "eval/success", "value": [0.9, 0.8, 0.1, 0.2, 0.3, 0.4]})
    row = evaluation_table({("a", 0): long}).iloc[0]
    assert (row["final"], row["best"], row["n_last"]) == (0.4, 0.8, 3)  # the shared start, 0.9, is no result
    assert row["mean_last_3"] == pytest.approx(0.3)


def test_cost_is_what_was_counted(folder):
    tables = tabulate(folder)[0]
    cost = tables["cost"].set_index("arm")
    flops = {"grpo": 2 * P * (2 * 100 + 6 * 80), "sdar": 2 * P * (2 * 150 + 6 * 80)}
    assert parameters(folder / "seed0/grpo/checkpoints/step_2") == P
    assert cost["flops"].to_dict() == flops
    assert cost["seconds"].to_dict() == {"grpo": 10, "sdar": 20} and set(cost["eval_seconds"]) == {18}
    assert cost.loc["sdar", "seconds_over_base"] == 2
    equal = tables["equal"].set_index(["budget", "arm"])
    assert equal.loc[("step", "sdar"), ["step", "success"]].tolist() == [2, 11 / 16]
    # with GRPO's FLOPs or seconds, SDAR gets only through its first step
    assert equal.loc[("flops", "sdar"), ["limit", "step", "success"]].tolist() == [flops["grpo"], 1, 0.75]
    assert equal.loc[("seconds", "sdar"), ["limit", "spent", "success"]].tolist() == [10, 10, 0.75]
    assert equal.loc[("flops", "grpo"), "step"] == 2


def test_tokens_of_any_other_name_are_read_forward():
    rows = {"tokens/rollout": 10.0, "tokens/skills": 3.0, "tokens/teacher": 4.0, "tokens/train": 5.0}
    log = pd.DataFrame([{"step": 1, "metric": name, "value": value} for name, value in rows.items()])
    cost = cost_frame(log, 7).loc[1]
    assert (cost["tokens_read"], cost["flops"]) == (7, 7 * (2 * 17 + 6 * 5))


def test_signals_are_means_over_seeds(folder):
    signals = tabulate(folder)[0]["signals"]
    loss = signals[signals["metric"] == "loss/sdar"].set_index("step")
    assert loss["value"].to_dict() == {1: 1.5, 2: 1.0}
    assert loss.loc[1, ["lowest", "highest", "n_training_seeds"]].tolist() == [1, 2, 2]
    both = {"kl/rollout_train", "reward/success"}
    assert set(signals["metric"]) == {"loss/sdar", "weight/sdar/mean", "distill/tokens", *both}
    assert set(signals.loc[signals["metric"].isin(both), "arm"]) == {"grpo", "sdar"}
    assert set(signals.loc[signals["metric"] == "kl/rollout_train", "value"]) == {1.0}  # mean of 0.5 and 1.5
    ends = signal_ends(signals).set_index("metric").loc["loss/sdar"]
    assert (ends["first"], ends["last"], ends["mean"]) == (1.5, 1.0, 1.25)


def test_paper_values_of_the_named_source_only(folder):
    paper = tabulate(folder)[0]["paper"]
    assert set(paper["arm"]) == {"sdar"} and paper["source"].str.startswith("SDAR").all()
    assert "scores" not in tabulate(folder)[0]  # games are won or lost
    assert set(paper["model"]) == {"Qwen2.5-3B-Instruct", "Qwen2.5-7B-Instruct", "Qwen3-1.7B"}


def test_an_arm_without_results_is_left_out(folder):
    for seed in (0, 1):
        for path in (folder / f"seed{seed}/sdar/trajectories").glob("*/manifest.json"):
            path.unlink()
    tables, _ = tabulate(folder)
    assert tables["success"]["arm"].tolist() == ["grpo"] and "differences" not in tables
    assert "success of the last weights" in summary(tables)


def test_a_study_without_results_says_so(tmp_path):
    (tmp_path / "ablation.json").write_text(json.dumps(plan(TWO, SMOKE, [0], False)))
    assert not has_results(tmp_path)
    with pytest.raises(ValueError, match="no arm of .* has been evaluated yet"):
        tabulate(tmp_path)


def test_report_shows_tables_and_says_what_to_mind(folder):
    tabulate(folder)
    page = report_run(folder).read_text()
    for said in (
        "ablation: success",
        "FLOPs count response tokens",
        "2 training seeds",
        "cannot show",
        "differences",
        "power",
    ):
        assert said in page
    assert "One training seed" not in page and "Which?" in page


# The statistics


def test_b72_power_note():
    note = power_note(85 / 128, 128, 91 / 128 - 85 / 128)
    assert note.startswith("128 episodes an arm cannot show less than 15.")
    needed = int(re.search(r"4.7 points need ([\d,]+) episodes", note)[1].replace(",", ""))
    assert needed == pytest.approx(1526, rel=0.01)  # of the unrounded rates
    assert "1,526 episodes" in power_note(0.664, 128, 0.047)
    assert stats.fisher(91, 128, 85, 128) == pytest.approx(0.50, abs=0.005)


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.5, 0.66, 0.97])
def test_detectable_difference_inverts_episodes_per_arm(rate):
    limit = stats.detectable_difference(rate, 200)
    needed = [stats.episodes_per_arm(rate, end) for end in (rate + limit, rate - limit) if 0 <= end <= 1]
    assert min(needed) == pytest.approx(200, rel=1e-6)
    assert stats.detectable_difference(rate, 400) < limit
    assert np.isnan(stats.detectable_difference(0.5, 2))


def test_crossed_bootstrap_of_one_seed_is_that_of_its_tasks():
    rng = np.random.default_rng
    values = rng(1).normal(0.2, 1, 60)
    one, tasks = stats.crossed_bootstrap(values[None], rng(0)), stats.bootstrap_mean(values, rng(0))
    assert one.estimate == pytest.approx(tasks.estimate)
    assert one.low == pytest.approx(tasks.low, abs=0.02) and one.high == pytest.approx(tasks.high, abs=0.02)


def test_crossed_bootstrap_sees_seeds_and_tasks():
    """Where seeds differ, as many tasks as you like do not narrow the interval; equal seeds add nothing."""
    rng = np.random.default_rng
    apart = np.repeat([[-1.0], [0.0], [1.0]], 500, axis=1)
    wide = stats.crossed_bootstrap(apart, rng(0))
    assert wide.estimate == 0 and wide.high - wide.low > 1.2
    tasks = rng(1).normal(0, 1, 100)
    once, thrice = (stats.crossed_bootstrap(np.tile(tasks, (n, 1)), rng(0)) for n in (1, 3))
    assert thrice.high - thrice.low == pytest.approx(once.high - once.low, rel=0.05)
    holes = np.array([[1.0, np.nan], [1.0, 0.0]])
    assert stats.crossed_bootstrap(holes, rng(0)).estimate == pytest.approx(2 / 3)


def test_only_shared_seeds_and_tasks_are_compared():
    def played(arm: str, success: list[int], training_seed: int = 0, seed: int = 0) -> pd.DataFrame:
        tasks = [f"t{i}" for i in range(len(success))]
        rows = {"arm": arm, "task": tasks, "success": success, "seed": seed, "training_seed": training_seed}
        return pd.DataFrame(rows).assign(error=None)

    frame = pd.concat([played("a", [0, 0, 1]), played("b", [1, 0, 1]), played("b", [1, 1, 1], training_seed=1)])
    row = difference_table(frame, [("a", "b"), ("a", "a")]).iloc[0]
    assert row["difference"] == pytest.approx(1 / 3) and row["n_training_seeds"] == 1
    assert len(difference_table(frame, [("a", "a"), ("a", "c")])) == 0
    equal = difference_table(pd.concat([played("a", [0, 1, 1]), played("b", [0, 1, 1])]), [("a", "b")]).iloc[0]
    assert (equal["difference"], equal["low"], equal["high"], equal["p"]) == (0, 0, 0, 1)


# The command


def test_the_command_refuses_in_one_sentence(say, tmp_path):
    def refused(*given: object) -> str:
        code, _, complaint = say("ablate", *given)
        assert code == 2 and complaint.count("\n") == 1, complaint
        return complaint

    assert "'channels'" in refused("chanels")
    assert "'smoke'" in refused("channels", "--recipe", "smok")
    assert "0,1,2" in refused("channels", "--seeds", "0,x")
    Path("mine.yaml").write_text("arms: {a: {method: grpo}, b: {method: sdar, method_config.bta: 1}}")
    assert "mine, b: unknown key 'method-config.bta'" in refused("mine.yaml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml"]


def test_the_figure_of_a_finished_study_is_drawn_again(say, folder):
    code, printed, complaint = say("figures", folder)
    assert code == 0, complaint
    assert (folder / "figures/ablation_two.png").is_file() and "report.html" in printed
    assert (folder / "report.html").read_text().count("<img") == len(list((folder / "figures").glob("*.png")))
