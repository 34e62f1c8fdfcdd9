"""A paper's training figures as one graph: its ablations, all branching from the same games and the same Stage I.

<out>/games, <out>/seed<s>/stage1   made once for all studies of the paper
<out>/<study>/...                   each ablation as `undertow ablate` would leave it, for its tables and figures
<out>/policy/measurements/...       what the skill changes for the paper's own arm: its episodes, and an expert's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis import ablation_tables
from analysis.ablation import PRESETS as ABLATION_PRESETS
from analysis.ablation import Part, Sizes, first_step, graph, own_steps, share_cores, undertow, write_plan
from analysis.arms import PLAN, Study, find_study
from analysis.study import Stage, run_study

PAPERS: dict[str, tuple[str, ...]] = {  # the first study has an arm named like the paper, which is diagnosed
    "pcsd": ("pcsd-main", "pcsd-components", "pcsd-lambda"),
    "sdar": ("sdar-main", "sdar-gates", "sdar-beta", "sdar-lambda", "objective", "retrieval"),
}
STARRED = ("sdar-main",)  # studies whose arms also play with a library's skills in the prompt
PANEL = "household_valid_seen"


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
    return found + _diagnoses(folder, paper, parts[0].study, recipe, seeds[0])


def finished(folder: Path, paper: str) -> list[Path]:
    """The folders of the paper's studies that have results, in order: what ablation_tables.tabulate can read."""
    folders = [folder / name for name in PAPERS[paper]]
    return [path for path in folders if (path / PLAN).is_file() and ablation_tables.has_results(path)]


def _parts(folder: Path, paper: str) -> list[Part]:
    return [Part(find_study(name), folder / name, f"{name}-", name in STARRED) for name in PAPERS[paper]]


def _diagnoses(folder: Path, paper: str, main: Study, recipe: Recipe, seed: int) -> list[Stage]:
    """Everything that is measured, of the paper's arm on its own episodes and on an expert's.

    Its own tokens show the gap as training meets it; the expert plays every task twice, so that a weight has a
    successful attempt at the same task to be judged by.
    """
    arm = next(arm for arm in main.arms if arm.name == paper)
    run, trained = folder / main.name / f"seed{seed}" / arm.name, f"{main.name}-seed{seed}-{arm.name}"
    own = run / "trajectories" / f"{PANEL}_step{first_step(arm, recipe.sizes) + own_steps(arm, recipe.sizes)}_seed0"
    expert, measured = own.with_name(f"{own.name}_expert"), folder / "policy" / "measurements"
    words = ("diagnose", run, "--measures", "all", "--seed", seed, "--trajectories")
    size = max(recipe.episodes // 2, 1)
    return [
        Stage(
            "expert",
            undertow("eval", run, "--protocol", "expert", "--size", size),
            expert,
            (trained,),
            weight=30,
        ),
        Stage(
            "diagnose-own",
            undertow(*words, own, "--episodes", recipe.episodes, "--out", measured / paper),
            measured / paper,
            (trained,),
            weight=10 * recipe.episodes,
        ),
        Stage(
            "diagnose-expert",
            undertow(*words, expert, "--out", measured / f"{paper}-expert"),
            measured / f"{paper}-expert",
            ("expert",),
            weight=10 * recipe.episodes,
        ),
    ]
