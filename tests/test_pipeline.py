"""The whole chain at toy sizes: games, play, diagnosis, training, branches, tables, figure, report."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, ClassVar

import pytest

import analysis.study
import undertow
from analysis import invisible_advantage as study
from diagnostics.artifact import load_artifact, load_trajectories
from diagnostics.records import Skill, Trajectory
from tests.conftest import Say
from tests.diagnostics.tiny import chat_tokenizer, tiny_model
from training import session
from training.envs.base import Env, EnvError, Step, Task
from training.envs.folders import household_games
from training.method import available_methods, load_method
from training.monitor import read_metrics
from training.skills.hindsight import WriterCounts
from training.skills.step_level import StepCounts

SHORT = ("--env.max-turns", "3", "--sampler.max-new-tokens", "8", "--env.workers", "1")


class LocalPool:
    """The pool's interface with the real engine in this process; starting workers is what takes time."""

    def __init__(self, make_env: Callable[[], Env], workers: int, timeout: float) -> None:
        self.make_env, self.envs = make_env, dict[int, Env]()

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step | EnvError]:
        for slot in tasks:
            if slot not in self.envs:
                self.envs[slot] = self.make_env()
        return {slot: self.envs[slot].reset(task) for slot, task in tasks.items()}

    def step(self, actions: Mapping[int, str]) -> dict[int, Step | EnvError]:
        return {slot: self.envs[slot].step(action) for slot, action in actions.items()}

    def __enter__(self) -> LocalPool:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for env in self.envs.values():
            env.close()


def turn_skills(
    sampler: Any, trajectories: Sequence[Trajectory], **given: Any
) -> tuple[dict[str, dict[int, Skill]], StepCounts]:
    """A skill for the first turn of each."""
    made, counts = skills(sampler, trajectories)
    return {id: {0: skill} for id, skill in made.items()}, StepCounts(counts.written, 0, counts.written, 0)


def skills(sampler: Any, trajectories: Sequence[Trajectory], **given: Any) -> tuple[dict[str, Skill], WriterCounts]:
    """A policy with random weights writes none that can be read."""
    made = {t.id: Skill(f"Go to the shelf of {t.id[:9]} first.", "hindsight", t.task_id, t.id) for t in trajectories}
    return made, WriterCounts(len(made), 0, 0)


class ThisProcess(subprocess.Popen):
    """Stands for subprocess.Popen in a study: the stage runs here, which saves importing everything anew."""

    ran: ClassVar[list[list[str]]] = []

    def __init__(self, command: Sequence[str], env: Mapping[str, str], **given: Any) -> None:
        assert command[:3] == (sys.executable, "-m", "undertow")
        self.pid = os.getpid()
        self.ran.append(list(command[3:]))
        before, words = os.environ.get("UNDERTOW_PROGRESS"), sys.argv
        os.environ["UNDERTOW_PROGRESS"] = env["UNDERTOW_PROGRESS"]
        try:
            sys.argv = ["undertow", *command[3:]]
            self.returncode = undertow.main()
        finally:
            sys.argv = words
            os.environ.pop("UNDERTOW_PROGRESS") if before is None else os.environ.update(UNDERTOW_PROGRESS=before)

    def poll(self) -> int | None:
        return self.returncode


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with games, a player and a reader with another vocabulary."""
    folder = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNDERTOW_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        household_games(folder / "games", {"train": 4, "valid_seen": 3, "valid_unseen": 1}, workers=1)
        for name, merges in (("player", ()), ("reader", (("t", "h"), ("i", "n")))):
            tiny_model(layers=2, seed=len(merges)).save_pretrained(folder / name)
            chat_tokenizer(merges, tags=True).save_pretrained(folder / name)
        yield folder


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine in this process, and a policy that writes skills."""
    monkeypatch.setattr(session, "EnvPool", LocalPool)
    monkeypatch.setattr(session, "write_skills", skills)
    monkeypatch.setattr(session, "write_step_skills", turn_skills)


@pytest.fixture
def train(place: Path, say: Say) -> Callable[..., tuple[int, str, str]]:
    """Train the player a little on two tasks with two attempts each."""

    def run(out: str, *words: object) -> tuple[int, str, str]:
        sizes = ("--tasks-per-step", 2, "--group-size", 2, "--eval.size", 3, "--save-every", 1, *SHORT)
        return say(
            "train", "--model.name", place / "player", "--env.data", place / "games", "--out", out, *sizes, *words
        )

    return run


def refused(answer: tuple[int, str, str]) -> str:
    code, _, complaint = answer
    assert code == 2 and complaint.splitlines()[-1].startswith("undertow: "), answer
    return complaint.splitlines()[-1]


def test_the_study_from_games_to_report(place: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = study.Sizes(
        train_games=4, unseen_games=1, panel=3, stage1_steps=2, stage2_steps=1, tasks_per_step=2, group_size=2,
        eval_every=1, end_seeds=(0, 1), episodes=3, reader_episodes=2, reader_tokens=900, projector_updates=1,
        policy=str(place / "player"), reader=str(place / "reader"), extra=SHORT,
    )  # fmt: skip
    monkeypatch.setitem(study.PRESETS, "toy", toy)
    module = SimpleNamespace(Popen=ThisProcess, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(analysis.study, "subprocess", module)
    monkeypatch.setattr(ThisProcess, "ran", [])
    # The games stage would make the same games again, in workers.
    monkeypatch.setattr("training.envs.folders.household.generate", lambda folder, *_, **__: _copy(place, folder))
    words = ("reproduce", "invisible-advantage", "--recipe", "toy", "--out", "study")
    code, printed, complaint = say(*words)
    log = Path("study/study.json")
    assert code == 0, complaint + log.read_text()
    stages = json.loads(log.read_text())
    order = list(stages)
    assert order.index("first-figure") < order.index("stage1"), "the first figure comes before any training"
    assert {state["state"] for state in stages.values()} == {"done"}

    figures = Path("study/figures")
    for end in ("png", "pdf", "json"):
        assert (figures / f"fig1_invisible_advantage.{end}").stat().st_size > 1000
    assert "fig1_invisible_advantage.png" in printed and "report.html" in printed
    drawn = sorted(path.stem for path in figures.glob("*.png"))
    assert {"fig1_invisible_advantage", "fig4_controls", "fig_alignment", "fig_thresholds"} <= set(drawn)
    assert Path("study/report.html").read_text().count("<img") == len(drawn)
    assert Path("study/claims.json").is_file()

    tables, inputs = study.tabulate(Path("study"))
    curves = tables["curves"]
    steps = {arm: sorted(group["step"]) for arm, group in curves.groupby("arm")}
    assert steps == {"student": [0, 1, 2], "own_skill": [2], "grpo": [2, 3], "pr_opd": [2, 3], "alignment": [2, 3]}
    ends = curves.sort_values("step").groupby("arm").tail(1).set_index("arm")
    assert (ends["n_seeds"] == 2).all() and (curves["n_tasks"] == 3).all()
    assert set(tables["changes"]["reader"]) == {"player", "reader"}
    assert {"own_skill", "floor", "none"} <= set(tables["changes"]["context"])
    none = tables["changes"].query("context == 'none'")
    assert len(none) and (none["share"] == 0).all()  # no skill, nothing changes
    assert set(tables["gains"]["arm"]) == {"own_skill", *study.BRANCHES}
    assert {name.split()[0] for name in tables["skill_gains"]["episodes"]} == {"policy", "stage1"}
    assert len(inputs) == 2 + sum(len(rows) for rows in _episodes(curves))
    for title in ("success on the panel, at the end", "paired gains", "tokens changed by the own skill"):
        assert title in printed

    branch, parent = (
        Path("study") / run / "trajectories/household_valid_seen_step2_seed0" for run in ("grpo", "stage1")
    )
    assert load_artifact(branch).digest == load_artifact(parent).digest  # not played twice
    assert load_artifact(branch).manifest["inputs"][0]["digest"] == load_artifact(parent).digest
    assert all(read_metrics(f"study/{name}")[-1]["step"] == 1 for name in study.BRANCHES)
    aligned, continued = (read_metrics(f"study/{name}")[-1] for name in ("alignment", "grpo"))
    assert aligned["distill/tokens"] > 0 and "distill/tokens" not in continued

    count = len(ThisProcess.ran)
    assert say(*words)[0] == 0 and len(ThisProcess.ran) == count  # nothing is done twice
    shutil.rmtree("study/alignment")
    assert say(*words)[0] == 0
    assert [words[words.index("--out") + 1] for words in ThisProcess.ran[count:] if words[0] == "train"] == [
        "study/alignment"
    ]


def _copy(place: Path, folder: Path) -> Path:
    return Path(shutil.copytree(place / "games", folder))


def _episodes(curves: Any) -> Iterator[list[int]]:
    """Artifacts behind the curves: one a point and seed."""
    for _, row in curves.iterrows():
        yield [0] * int(row["n_seeds"])


def test_the_constant_of_the_earlier_attempts_is_one() -> None:
    assert study.EARLIER_SEED == session.EARLIER_SEED


def test_a_run_goes_on_bit_for_bit_and_refuses_other_settings(train: Say) -> None:
    assert train("a", "--steps", 2, "--eval.every", 1)[0] == 0
    assert train("b", "--steps", 1, "--eval.every", 1)[0] == 0
    assert train("b", "--steps", 2, "--eval.every", 1)[0] == 0
    for name in ("model.safetensors", "optimizer.safetensors"):
        straight, stopped = (Path(run, "checkpoints/step_2", name).read_bytes() for run in "ab")
        assert straight == stopped
    assert [row["step"] for row in read_metrics("b")] == [0, 1, 2]
    sentence = refused(train("b", "--steps", 2, "--eval.every", 1, "--optim.lr", "0.5"))
    assert "optim.lr" in sentence and "0.5" in sentence
    assert json.loads(Path("b/args.json").read_text())["words"][-4:] == ["--steps", "2", "--eval.every", "1"]
    assert Path("b/code.diff").is_file()


def test_another_seed_plays_other_episodes_of_other_tasks(train: Say, place: Path) -> None:
    quick = ("--steps", 1, "--eval.every", 0)
    assert train("a", *quick)[0] == train("c", *quick, "--seed", 1)[0] == 0
    first, second = (Path(run, "checkpoints/step_1/model.safetensors").read_bytes() for run in "ac")
    assert first != second


def test_a_truncated_checkpoint_is_refused_by_name(train: Say, say: Say) -> None:
    assert train("a", "--steps", 1, "--eval.every", 0)[0] == 0
    weights = Path("a/checkpoints/step_1/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:100])
    for command in (("eval", "a"), ("diagnose", "a"), ("eval", "a/checkpoints/step_1")):
        sentence = refused(say(*command))
        assert "model.safetensors" in sentence and "step_1" in sentence


def test_episodes_are_kept_until_something_else_is_asked(train: Say, say: Say, place: Path) -> None:
    assert train("a", "--steps", 1, "--eval.every", 1)[0] == 0
    path = Path("a/trajectories/household_valid_seen_step1_seed0")
    made = load_artifact(path).manifest
    code, printed, _ = say("eval", "a", "--seeds", "0,1")
    assert code == 0 and load_artifact(path).manifest == made  # what training played is not played again
    assert "all" in printed and str(path) in printed and "seed1" in printed
    first, second = (load_trajectories(path.with_name(f"{path.name[:-1]}{seed}")) for seed in (0, 1))
    assert [t.task_id for t in first] == [t.task_id for t in second] == sorted(t.task_id for t in first)
    assert [t.turns for t in first] != [t.turns for t in second]
    assert say("eval", "a", "--temperature", "1.5")[0] == 0
    changed = load_artifact(path)
    assert changed.digest != made["digest"] and changed.manifest["played"]["temperature"] == 1.5
    assert "panel" in refused(say("eval", "a", "--size", 99))
    assert "alfworld" in refused(say("eval", "a", "--env.kind", "alfworld"))
    assert "valid_sen" in refused(say("eval", "a", "--panel", "valid_sen"))


def test_own_skills_stand_in_the_players_prompt(place: Path, say: Say) -> None:
    words = ("--env.data", place / "games", "--size", 3, *SHORT)
    assert say("eval", place / "player", "--protocol", "own_skill", *words)[0] == 0
    folder = Path("runs/player/trajectories")
    played = load_trajectories(folder / "household_valid_seen_step0_seed0_own_skill")
    earlier = {t.task_id: t.id for t in load_trajectories(folder / "household_valid_seen_step0_seed100")}
    assert [t.skill for t in played] == [f"Go to the shelf of {earlier[t.task_id][:9]} first." for t in played]
    assert all(t.skill in t.segments[0].messages[0].content for t in played if t.skill)
    assert "another --out" in refused(say("eval", place / "reader", "--out", "runs/player", *words))


def test_a_policy_is_helped_in_other_ways(place: Path, say: Say) -> None:
    words = ("eval", place / "player", "--env.data", place / "games", "--size", 2, *SHORT)
    code, printed, _ = say(*words, "--protocol", "reflexion", "--trials", 2)
    assert code == 0 and "reflexion" in printed and "won so far" in printed
    played = load_trajectories("runs/player/trajectories/household_valid_seen_step0_seed0_reflexion")
    assert [(t.attempt, t.skill is None) for t in played] == [(0, True), (1, False)] * 2
    assert "training split and in the panel" in refused(say(*words, "--protocol", "expel", "--panel", "train"))


def test_any_model_reads_any_episodes(place: Path, say: Say) -> None:
    words = ("--env.data", place / "games", "--size", 3, *SHORT)
    assert say("eval", place / "player", *words)[0] == 0
    episodes = Path("runs/player/trajectories/household_valid_seen_step0_seed0")
    ask = ("--measures", "change", "--contexts", "own_skill,unrelated,none")
    code, printed, _ = say("diagnose", place / "reader", "--trajectories", episodes, "--out", "m", *ask)
    assert code == 0 and "hidden_change" in printed and "own_skill" in printed
    found = load_artifact("m", "measurements")
    assert found.manifest["inputs"][0]["digest"] == load_artifact(episodes).digest
    assert "'own_skil'" in refused(say("diagnose", "runs/player", "--contexts", "own_skil"))
    assert "'chnge'" in refused(say("diagnose", "runs/player", "--measures", "chnge"))
    assert say("diagnose", "runs/player", *ask, "--episodes", 2)[0] == 0
    assert say("figures", "runs/player")[0] == 0
    assert Path("runs/player/figures/fig1_invisible_advantage.png").is_file()


def test_diagnose_without_episodes_says_what_to_do(train: Say, say: Say) -> None:
    assert train("a", "--steps", 1, "--eval.every", 0)[0] == 0
    assert "undertow eval" in refused(say("diagnose", "a"))


def test_training_in_real_processes(place: Path, tmp_path: Path) -> None:
    words = ["train", "--model.name", "player", "--env.data", "games", "--out", str(tmp_path / "run"), "--steps", "1"]
    words += ["--tasks-per-step", "2", "--group-size", "1", "--eval.every", "0", *SHORT]
    answer = subprocess.run(
        [sys.executable, "-m", "undertow", *words], cwd=place, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert (tmp_path / "run/checkpoints/step_1/manifest.json").is_file()
    assert read_metrics(tmp_path / "run")[-1]["rollout/errors"] == 0


def test_games_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def count(folder: Path, *given: Any, **options: Any) -> Path:
        made.append(folder)
        folder.mkdir(parents=True)
        return folder

    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path))
    monkeypatch.setattr("training.envs.folders.household.generate", count)
    first = household_games(sizes={"train": 2})
    assert household_games(sizes={"train": 2}) == first and len(made) == 1
    assert household_games(sizes={"train": 3}) != first and household_games(sizes={"train": 2}, seed=1) != first
    with pytest.raises(ValueError, match="holds no household games of these sizes"):
        household_games(first, sizes={"train": 9})


@pytest.mark.parametrize("method", available_methods())
def test_every_method_trains_on_household_games(method: str, place: Path, train: Callable[..., Any]) -> None:
    own: Any = load_method(method).config()
    words: list[object] = ["--method", method, "--steps", 5, "--eval.every", 0]
    words += ["--method-config.skill", "hindsight"] if hasattr(own, "skill") else []
    if hasattr(own, "start_step"):
        own = replace(own, start_step=2)
        words += ["--method-config.start-step", 2]
    out = place / f"every-{method}"
    code, _, complaint = train(out, *words)
    assert code == 0, complaint
    rows = read_metrics(out)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    # null stands for a number that is not finite
    assert not [(row["step"], name) for row in rows for name, value in row.items() if value is None]
    teaches = load_method(method).needs(own, 4).teacher != "none"
    assert (rows[-1].get("distill/tokens", 0) > 0) == teaches
