"""A paper's training figures as one graph: its ablations, all branching from the same games and the same Stage I.

<out>/games, <out>/seed<s>/stage1   made once for all studies of the paper
<out>/<study>/...                   each ablation as `undertow ablate` would leave it, for its tables and figures
<out>/policy/measurements/...       what the skill changes for the paper's own arm: its episodes, and an expert's
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from analysis import ablation_tables
from analysis.ablation import PRESETS as ABLATION_PRESETS
from analysis.ablation import Part, Sizes, first_step, graph, own_steps, share_cores, undertow, write_plan
from analysis.arms import PLAN, Study, find_study
from analysis.invisible_advantage import BRANCHES, episodes_with_skill, plain_episodes, skill_gains
from analysis.measured import measured_tables
from analysis.study import Stage, run_study
from analysis.tables import arm_tables, save_tables
from diagnostics.artifact import MANIFEST, Artifact


@dataclass(frozen=True)
class Recipe:
    """How large each stage is."""

    sizes: Sizes
    episodes: int  # that the diagnoses read: of the arm, and as many of an expert


PRESETS: dict[str, Recipe] = {
    # Both papers train without a Stage I: here it is short, and the main comparison twice as long as an ablation.
    "tiny": Recipe(Sizes(panel=64, stage1_steps=10, stage2_steps=4, eval_every=2, seeds=(0,)), episodes=32),
    "smoke": Recipe(ABLATION_PRESETS["smoke"], episodes=4),
}
# PR-OPD spends four fifths on Stage I. Here GRPO has won what it can within ten steps, and where all attempts of a
# group end alike no channel has anything to learn from: Stage I ends while the skill still helps.
WEBSHOP = {
    **PRESETS,
    "tiny": Recipe(Sizes(panel=128, stage1_steps=4, stage2_steps=4, eval_every=2, seeds=(0, 1, 2)), episodes=32),
}


@dataclass(frozen=True)
class Paper:
    """What is reproduced of a paper."""

    studies: tuple[str, ...]  # the first has the arm that is diagnosed
    arm: str
    panel: str = "household_valid_seen"  # environment and split, as its evaluations are named
    own_skill: bool = False  # whether Stage I also plays with the skill it wrote itself and is diagnosed, as in Fig. 1
    recipes: Mapping[str, Recipe] = field(default_factory=lambda: PRESETS)


PAPERS: dict[str, Paper] = {
    "pcsd": Paper(("pcsd-main", "pcsd-components", "pcsd-lambda"), "pcsd"),
    "sdar": Paper(("sdar-main", "sdar-gates", "sdar-beta", "sdar-lambda", "objective", "retrieval"), "sdar"),
    "pr-opd-webshop": Paper(("pr-opd-webshop",), "pr_opd", "webshop_sdar_valid", True, WEBSHOP),
}
STARRED = ("sdar-main",)  # studies whose arms also play with a library's skills in the prompt


def reproduce_paper(folder: Path, paper: str, recipe: Recipe, seeds: Sequence[int] | None = None, jobs: int = 1) -> int:
    """Run all studies of a paper and return run_study's exit code; each study's plan is written first.

    Args: paper, of PAPERS; seeds, training seeds (None: those of the recipe); jobs, stages at once.
    """
    share_cores(jobs)
    stages = paper_stages(folder, paper, recipe, seeds)
    for part in _parts(folder, paper):
        write_plan(part.folder, part.study, recipe.sizes, seeds or recipe.sizes.seeds, part.starred)
    return run_study(stages, folder, jobs)


def paper_stages(folder: Path, paper: str, recipe: Recipe, seeds: Sequence[int] | None = None) -> list[Stage]:
    """The graph of a paper: games and Stage I once, the arms of every study from there, and the diagnoses.

    Raises: ValueError for studies that cannot share Stage I.
    """
    seeds = seeds or recipe.sizes.seeds
    parts = _parts(folder, paper)
    found = graph(folder, parts, recipe.sizes, seeds)
    return found + _diagnoses(folder, PAPERS[paper], parts[0].study, recipe, seeds[0])


def finished(folder: Path, paper: str) -> list[Path]:
    """The folders of the paper's studies that have results, in order: what ablation_tables.tabulate can read."""
    folders = [folder / name for name in PAPERS[paper].studies]
    return [path for path in folders if (path / PLAN).is_file() and ablation_tables.has_results(path)]


def tabulate(folder: Path, paper: str) -> tuple[dict[str, pd.DataFrame], list[Artifact]]:
    """What was measured of the paper's arm, as a table artifact under <folder>/tables/<paper>; and the inputs.

    Where Stage I played with its own skill, also Fig. 1c of PR-OPD: curves and gains of student, own skill and arms,
    and what the skill brings by how the attempt it was written from ended (skill_gains).
    """
    found = sorted((folder / "policy" / "measurements").glob(f"*/{MANIFEST}"))
    tables, inputs = measured_tables({path.parent.name: path.parent for path in found})
    if PAPERS[paper].own_skill:
        main = folder / PAPERS[paper].studies[0]
        seed = f"seed{json.loads((main / PLAN).read_text(encoding='utf-8'))['seeds'][0]}"
        stage1 = folder / seed / "stage1"
        arms = {"student": plain_episodes(stage1), "own_skill": episodes_with_skill(stage1)}
        arms |= {branch: plain_episodes(main / seed / branch) for branch in BRANCHES}
        played, more = arm_tables({arm: paths for arm, paths in arms.items() if paths})
        gains = skill_gains(stage1, folder)
        tables |= played | ({"skill_gains": pd.concat(gains, ignore_index=True)} if gains else {})
        inputs += more
    if tables:
        save_tables(folder / "tables" / paper, tables, inputs)
    return tables, inputs


def _parts(folder: Path, paper: str) -> list[Part]:
    return [Part(find_study(name), folder / name, f"{name}-", name in STARRED) for name in PAPERS[paper].studies]


def _diagnoses(folder: Path, paper: Paper, main: Study, recipe: Recipe, seed: int) -> list[Stage]:
    """Everything that is measured, of the paper's arm on its own episodes and on an expert's; of Stage I the change.

    Its own tokens show the gap as training meets it; the expert plays every task twice, so that a weight has a
    successful attempt at the same task to be judged by.
    """
    arm = next(arm for arm in main.arms if arm.name == paper.arm)
    run, trained = folder / main.name / f"seed{seed}" / arm.name, f"{main.name}-seed{seed}-{arm.name}"
    step = first_step(arm, recipe.sizes) + own_steps(arm, recipe.sizes)
    own, expert = (_played(run, paper, step, 0, suffix) for suffix in ("", "_expert"))
    measured = folder / "policy" / "measurements"
    words = ("diagnose", run, "--measures", "all", "--seed", seed, "--trajectories")
    size = max(recipe.episodes // 2, 1)
    return [
        *(_own_skill(folder, paper, recipe, seed) if paper.own_skill else ()),
        Stage(
            "expert",
            undertow("eval", run, "--protocol", "expert", "--size", size),
            expert,
            (trained,),
            weight=30,
        ),
        Stage(
            "diagnose-own",
            undertow(*words, own, "--episodes", recipe.episodes, "--out", measured / paper.arm),
            measured / paper.arm,
            (trained,),
            weight=10 * recipe.episodes,
        ),
        Stage(
            "diagnose-expert",
            undertow(*words, expert, "--out", measured / f"{paper.arm}-expert"),
            measured / f"{paper.arm}-expert",
            ("expert",),
            weight=10 * recipe.episodes,
        ),
    ]


def _own_skill(folder: Path, paper: Paper, recipe: Recipe, seed: int) -> list[Stage]:
    """Stage I plays without and with the skill it wrote after an earlier attempt, and reads its own episodes again."""
    stage1, measured = folder / f"seed{seed}" / "stage1", folder / "policy" / "measurements" / "stage1"
    step, last = recipe.sizes.stage1_steps, recipe.sizes.eval_seeds - 1
    seeds, needs = ",".join(map(str, range(last + 1))), (f"seed{seed}-stage1",)
    words = ("--trajectories", _played(stage1, paper, step, 0), "--episodes", recipe.episodes, "--seed", seed)
    return [
        Stage(
            "stage1-end",
            undertow("eval", stage1, "--seeds", seeds),
            _played(stage1, paper, step, last),
            needs,
            weight=60,
        ),
        Stage(
            "stage1-own-skill",
            undertow("eval", stage1, "--seeds", seeds, "--protocol", "own_skill"),
            _played(stage1, paper, step, last, "_own_skill"),
            needs,
            weight=90,
        ),
        Stage(
            "diagnose-stage1",
            undertow("diagnose", stage1, *words, "--out", measured),
            measured,
            needs,
            weight=2 * recipe.episodes,
        ),
    ]


def _played(run: Path, paper: Paper, step: int, seed: int, suffix: str = "") -> Path:
    return run / "trajectories" / f"{paper.panel}_step{step}_seed{seed}{suffix}"
