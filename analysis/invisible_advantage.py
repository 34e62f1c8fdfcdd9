"""The study "invisible advantage": Figure 1 of PR-OPD as a graph of stages, from generated games to the report.

<study>/games      household games              <study>/policy   what the shipped policy plays, and what reads it
<study>/stage1     GRPO                         <study>/grpo, pr_opd, alignment   its continuations
<study>/tables, figures, report.html
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.ablation_tables import signal_table
from analysis.frames import episode_frame, metrics_frame
from analysis.measured import measured_tables
from analysis.study import Stage, run_study
from analysis.tables import arm_tables, save_tables, skill_gain_table
from diagnostics.artifact import Artifact, load_artifact

NAME = "invisible-advantage"
EARLIER_SEED = 100  # of the attempts that skills are written from, see training.session
Words = list[object]  # of a command line
BRANCHES = ("grpo", "pr_opd", "alignment")
PANEL = "household_valid_seen"


@dataclass(frozen=True)
class Sizes:
    """How large each stage is; numbers of steps, games, tasks, episodes and tokens."""

    train_games: int = 320
    unseen_games: int = 16
    panel: int = 128
    stage1_steps: int = 30
    stage2_steps: int = 5
    tasks_per_step: int = 8
    group_size: int = 8
    eval_every: int = 10  # of Stage I; Stage II is evaluated at its start and end
    end_seeds: tuple[int, ...] = (0, 1, 2)
    episodes: int = 48  # that the policy reads again
    reader_episodes: int = 24  # that the pretrained reader reads
    reader_tokens: int = 512
    projector_lr: float = 3e-3  # few updates: at the paper's 1e-4 the projector would stay random
    projector_updates: int = 60
    policy: str = "tiny"
    reader: str = "smollm2-135m"
    extra: tuple[str, ...] = ()  # further words of every command that plays


PRESETS: dict[str, Sizes] = {"tiny": Sizes()}


def stages(folder: Path, sizes: Sizes, seed: int) -> list[Stage]:
    """The graph, in the order it runs: the first figure comes before any training."""
    policy, stage1, games = folder / "policy", folder / "stage1", folder / "games"
    earlier = policy / "trajectories" / f"{PANEL}_step0_seed{EARLIER_SEED}"
    checkpoint = stage1 / "checkpoints" / f"step_{sizes.stage1_steps}"
    ends = ",".join(map(str, sizes.end_seeds))
    found: Words = ["--env.data", games, *sizes.extra]
    plays: Words = ["--size", sizes.panel, *found]
    trains: Words = ["--tasks-per-step", sizes.tasks_per_step, "--group-size", sizes.group_size]
    trains += ["--eval.size", sizes.panel, "--eval.seed", sizes.end_seeds[0], "--save-every", 4]
    trains += ["--seed", seed, "--model.name", sizes.policy, *found]
    splits: Words = ["--train", sizes.train_games, "--valid-seen", sizes.panel]
    splits += ["--valid-unseen", sizes.unseen_games]
    reads: Words = ["--model", sizes.reader, "--contexts", "own_skill,unrelated"]
    reads += ["--episodes", sizes.reader_episodes, "--max-tokens", sizes.reader_tokens]
    steps: Words = ["--steps", sizes.stage1_steps, "--eval.every", sizes.eval_every]
    graph = [
        Stage(
            "games",
            _undertow("data", "--generate", "household", "--out", games, *splits),
            games,
            weight=90,
        ),
        Stage(
            "play",
            _undertow("eval", sizes.policy, "--out", policy, "--seeds", EARLIER_SEED, *plays),
            earlier,
            ("games",),
            weight=40,
        ),
        Stage(
            "change-policy",
            _undertow("diagnose", policy, "--trajectories", earlier, "--episodes", sizes.episodes, "--seed", seed),
            policy / "measurements" / _name(sizes.policy),
            ("play",),
            weight=40,
        ),
        Stage("first-figure", _undertow("figures", folder), folder / "figures", ("change-policy",), weight=15),
        Stage(
            "change-reader",
            _undertow("diagnose", policy, "--trajectories", earlier, "--seed", seed, *reads),
            policy / "measurements" / _name(sizes.reader),
            ("change-policy",),
            weight=80,
        ),
        Stage(
            "stage1",
            _undertow("train", "--out", stage1, *steps, *trains),
            checkpoint,
            ("games",),
            weight=20 * sizes.stage1_steps,
        ),
        Stage(
            "skill-policy",
            _undertow(
                "eval", sizes.policy, "--out", policy, "--seeds", sizes.end_seeds[0], "--protocol", "own_skill", *plays
            ),
            policy / "trajectories" / f"{PANEL}_step0_seed{sizes.end_seeds[0]}_own_skill",
            ("play",),
            weight=40,
        ),
        Stage(
            "skill-stage1",
            _undertow("eval", stage1, "--seeds", ends, "--protocol", "own_skill", *plays),
            _episodes(stage1, sizes.stage1_steps, sizes.end_seeds[-1], "_own_skill"),
            ("stage1",),
            weight=120,
        ),
        _end("stage1", stage1, sizes.stage1_steps, sizes, plays),
    ]
    aligns: Words = ["--method", "pr_opd", "--method-config.start-step", 0]
    aligns += ["--method-config.projector-lr", sizes.projector_lr]
    aligns += ["--method-config.projector-updates", sizes.projector_updates]
    own: dict[str, Words] = {
        "grpo": [],
        "pr_opd": aligns,
        "alignment": [*aligns, "--method-config.reward-coefficient", 0],
    }
    for branch in BRANCHES:
        run = folder / branch
        steps = ["--steps", sizes.stage2_steps, "--eval.every", sizes.stage2_steps]
        words = [*steps, *trains, "--init-from", checkpoint, *own[branch]]
        output = run / "checkpoints" / f"step_{sizes.stage2_steps}"
        graph.append(Stage(branch, _undertow("train", "--out", run, *words), output, ("stage1",), weight=240))
        graph.append(_end(branch, run, sizes.stage1_steps + sizes.stage2_steps, sizes, plays))
    return graph


def reproduce_study(folder: Path, sizes: Sizes, seed: int) -> int:
    """Run the study; returns run_study's exit code.

    One torch process works at a time, with two cores; environment workers use one thread each.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(min(os.cpu_count() or 1, 2)))
    return run_study(stages(folder, sizes, seed), folder)


def tabulate(folder: Path) -> tuple[dict[str, pd.DataFrame], list[Artifact]]:
    """All tables of a study, or of a single run, as a table artifact under <folder>/tables; and their inputs.

    Raises: ValueError when the folder holds neither measurements nor episodes.
    """
    study = (folder / "study.json").is_file()
    readers, arms = (_study_inputs if study else _run_inputs)(folder)
    if not readers and not any(arms.values()):
        raise ValueError(
            f"{folder} holds neither measurements nor episodes; run `undertow eval` or `undertow diagnose`"
        )
    measured, read = measured_tables(readers)
    played, inputs = arm_tables(arms)
    tables = {**measured, **played}
    gains = [gain for run in (("policy", "stage1") if study else (".",)) for gain in skill_gains(folder / run, folder)]
    if gains:
        tables["skill_gains"] = pd.concat(gains, ignore_index=True)
    logs = _logs(folder, study)
    if len(signals := signal_table(logs)):
        tables["signals"] = signals
    inputs = [*read, *inputs]
    if tables:
        save_tables(folder / "tables" / NAME, tables, inputs)
    return tables, inputs


def _study_inputs(folder: Path) -> tuple[Mapping[str, Path], Mapping[str, list[Path]]]:
    arms = {"student": plain_episodes(folder / "stage1"), "own_skill": episodes_with_skill(folder / "stage1")}
    arms |= {branch: plain_episodes(folder / branch) for branch in BRANCHES}
    return _readers(folder / "policy"), arms


def _run_inputs(folder: Path) -> tuple[Mapping[str, Path], Mapping[str, list[Path]]]:
    return _readers(folder), {"student": plain_episodes(folder), "own_skill": episodes_with_skill(folder)}


def _readers(run: Path) -> dict[str, Path]:
    return {path.parent.name: path.parent for path in sorted((run / "measurements").glob("*/manifest.json"))}


def plain_episodes(run: Path) -> list[Path]:
    """Episodes without a skill, but for those that skills were written from: no baseline may hold them."""
    found = sorted((run / "trajectories").glob("*_seed*/manifest.json"))
    seeds = [path.parent.name.rpartition("_seed")[2] for path in found]
    return [p.parent for p, seed in zip(found, seeds, strict=True) if seed.isdigit() and seed != str(EARLIER_SEED)]


def episodes_with_skill(run: Path) -> list[Path]:
    return [path.parent for path in sorted((run / "trajectories").glob("*_own_skill/manifest.json"))]


def _logs(folder: Path, study: bool) -> dict[tuple[str, int], pd.DataFrame]:
    """metrics.jsonl of the study's branches, or of the run, whose arm is its method; by arm and training seed."""
    runs = {branch: folder / branch for branch in BRANCHES} if study else {"": folder}
    found = {arm: run for arm, run in runs.items() if (run / "metrics.jsonl").is_file()}
    configs = {arm: json.loads((run / "config.json").read_text(encoding="utf-8")) for arm, run in found.items()}
    return {(arm or configs[arm]["method"], configs[arm]["seed"]): metrics_frame(run) for arm, run in found.items()}


def skill_gains(run: Path, folder: Path) -> list[pd.DataFrame]:
    """What the own skill of an earlier attempt brings, for each set of weights that played with and without."""
    found = []
    for path in episodes_with_skill(run):
        step = path.name.rpartition("_seed")[0]
        base = path.with_name(path.name.removesuffix("_own_skill"))
        earlier = path.with_name(f"{step}_seed{EARLIER_SEED}")
        if not (base / "manifest.json").is_file():  # the shipped policy's baseline is the evaluation before Stage I
            base = folder / "stage1" / "trajectories" / base.name
        if all((p / "manifest.json").is_file() for p in (base, earlier)):
            frames = [episode_frame(load_artifact(p, "trajectories")) for p in (base, path, earlier)]
            found.append((step, frames))
    gains = []
    for step in dict.fromkeys(step for step, _ in found):
        without, with_skill, earlier = (
            pd.concat([frames[i] for name, frames in found if name == step]) for i in range(3)
        )
        table = skill_gain_table(without, with_skill, earlier.drop_duplicates("trajectory"))
        table.insert(0, "episodes", f"{run.name} {step}" if run.name else step)
        gains.append(table)
    return gains


def summary(tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """The tables that are printed at the end, with the columns that matter."""
    chosen = {}
    if "changes" in tables:
        rows = tables["changes"]
        rows = rows[(rows["context"] == "own_skill") & (rows["token_class"] == "all")]
        rows = rows[rows["channel"].isin(("hidden_change", "output_change"))]
        chosen["tokens changed by the own skill"] = rows[["reader", "channel", "share", "low", "high", "n_tokens"]]
    if "curves" in tables:
        last = tables["curves"].sort_values("step").groupby("arm").tail(1)
        chosen["success on the panel, at the end"] = last[["arm", "step", "success", "low", "high", "n_seeds"]]
    columns = ["a", "b", "difference", "low", "high", "p", "n_tasks"]
    if "gains" in tables:
        chosen["paired gains"] = tables["gains"][["baseline", "arm", *columns]]
    if "skill_gains" in tables:
        chosen["gain of the own skill, by how the earlier attempt ended"] = tables["skill_gains"][
            ["episodes", "earlier_attempt", *columns]
        ]
    return chosen


def _end(name: str, run: Path, step: int, sizes: Sizes, plays: Sequence[object]) -> Stage:
    ends = ",".join(map(str, sizes.end_seeds))
    command = _undertow("eval", run, "--seeds", ends, *plays)
    return Stage(f"end-{name}", command, _episodes(run, step, sizes.end_seeds[-1]), (name,), weight=60)


def _episodes(run: Path, step: int, seed: int, suffix: str = "") -> Path:
    return run / "trajectories" / f"{PANEL}_step{step}_seed{seed}{suffix}"


def _undertow(*words: object) -> tuple[str, ...]:
    return (sys.executable, "-m", "undertow", *(str(word) for word in words))


def _name(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]
