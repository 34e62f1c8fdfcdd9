"""Table 1 of three papers filled from runs: an ablation of their methods in each environment, and what they print.

<out>/household, search, webshop   each as `undertow ablate` would leave it, with its games and its Stage I
<out>/<environment>/policy         the shipped policy, untrained, without and with a library's skills in its prompt
<out>/tables/table1, table1_<paper>.md, .tex, .csv
An environment that has not run, or not yet, has no columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import ablation_tables
from analysis.ablation import PRESETS as ABLATION_PRESETS
from analysis.ablation import Part, Sizes, first_step, graph, own_steps, share_cores, undertow, words, write_plan
from analysis.ablation_tables import STARRED, arm_episodes
from analysis.arms import PLAN, Study, find_study
from analysis.frames import episode_frame
from analysis.invisible_advantage import plain_episodes
from analysis.layout import HEADS, WEIGHTS, layout, write_layouts
from analysis.main_table import main_table, published_table
from analysis.scores import graded, score_table
from analysis.study import Stage, run_study
from analysis.tables import save_tables, success_table
from diagnostics.artifact import MANIFEST, Artifact, load_artifact

NAME = "table1"
_STARRED = "skill_grpo"  # the arm that the papers also evaluate with skills in its prompt


@dataclass(frozen=True)
class World:
    """An environment of the table, its shipped policy, and what it settles for all arms."""

    policy: str
    panel: str  # environment and split, as evaluations are named
    common: Mapping[str, Any] = field(default_factory=dict)


WORLDS = {
    "household": World("tiny", "household_valid_seen"),
    "search": World("tiny-search", "searchqa_valid_seen", {"recipe": "tiny-search-grpo"}),
    "webshop": World("tiny-webshop", "webshop_sdar_valid", {"recipe": "tiny-webshop-grpo"}),
}
PAPERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # environments and methods; * with skills in the prompt
    "SDAR": (
        ("household", "search", "webshop"),
        ("vanilla", "skill_prompt*", "opsd", "grpo", "skill_grpo", "skill_grpo*", "grpo_opsd", "skill_sd", "rlsd",
         "sdar"),
    ),
    "PCSD": (("household", "webshop"), ("grpo", "skill_grpo*", "rlsd", "sdar", "pcsd")),
    "PR-OPD": (("household", "webshop"), ("vanilla", "opsd", "grpo", "skill_sd", "sdar", "pr_opd")),
}  # fmt: skip
PRESETS: dict[str, Sizes] = {
    "tiny": Sizes(panel=64, stage1_steps=2, stage2_steps=6, eval_every=3, seeds=(0,)),  # the papers have no Stage I
    "smoke": replace(ABLATION_PRESETS["smoke"], stage1_steps=1, settings={"tasks_per_step": 2, "group_size": 2}),
}


def reproduce_table1(folder: Path, sizes: Sizes, seeds: Sequence[int] | None = None, jobs: int = 1) -> int:
    """Run the ablation of every environment and return run_study's exit code; the plans are written first.

    Args: seeds, training seeds (None: those of the sizes); jobs, stages at once.
    """
    share_cores(jobs)
    seeds = seeds or sizes.seeds
    found = stages(folder, sizes, seeds)
    for name in WORLDS:
        write_plan(folder / name, _study(name), sizes, seeds, starred=False)
    return run_study(found, folder, jobs)


def stages(folder: Path, sizes: Sizes, seeds: Sequence[int]) -> list[Stage]:
    """The graph: environment by environment its ablation, then the rows that train nothing."""
    found: list[Stage] = []
    for name in WORLDS:
        part = Part(_study(name), folder / name, f"{name}-")
        found += graph(folder / name, [part], sizes, seeds, f"{name}-")
        found += _untrained(folder, name, sizes) + [_starred(folder, name, sizes, seed) for seed in seeds]
    return found


def environments(folder: Path) -> list[str]:
    """The environments of the table that have results in a folder: what ablation_tables.tabulate can read."""
    planned = [name for name in WORLDS if (folder / name / PLAN).is_file()]
    return [name for name in planned if ablation_tables.has_results(folder / name)]


def tabulate(
    folder: Path, ablations: Mapping[str, Mapping[str, pd.DataFrame]]
) -> tuple[dict[str, pd.DataFrame], list[Artifact]]:
    """The table `table1` as an artifact under <folder>/tables, and the papers' layouts beside it; and the inputs.

    Args: ablations, environment -> the tables of its ablation.
    Returns: table1 with the columns paper, environment, method, column, value, low, high, n_episodes, n_tasks (ours,
    NaN where the method did not run), model, published, source: one row a published model, one where there is none; a
    method that neither ran nor is published has none.
    """
    ours, inputs = {}, []
    for name, tables in ablations.items():
        rows, more = _other_rows(folder / name)
        ours[name] = pd.concat([tables["main"], *rows], ignore_index=True)
        inputs += [load_artifact(folder / name / "tables" / ablation_tables.NAME, "table"), *more]
    parts = [
        _part(paper, name, methods, ours[name], ablations[name])
        for paper, (names, methods) in PAPERS.items()
        for name in names
        if name in ours
    ]
    tables = {NAME: pd.concat(parts, ignore_index=True)}
    save_tables(folder / "tables" / NAME, tables, inputs)
    write_layouts(folder / "tables", tables[NAME])
    return tables, inputs


def summary(tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """The tables that are printed at the end: our values of every method, environment by environment."""
    rows = tables[NAME].dropna(subset="value").drop_duplicates(["environment", "method", "column"])
    return {
        f"table 1, {HEADS[str(name)]}, in per cent": layout(part.assign(published=float("nan"))).drop(columns=WEIGHTS)
        for name, part in rows.groupby("environment", sort=False)
    }


def _part(
    paper: str, name: str, methods: Sequence[str], main: pd.DataFrame, tables: Mapping[str, pd.DataFrame]
) -> pd.DataFrame:
    """Rows of one paper and environment, method by method in the paper's order."""
    env = WORLDS[name].panel.partition("_")[0]
    printed = published_table({method: method for method in methods}, env, set(tables["types"]["type"]), paper)
    printed = printed.rename(columns={"low": "published"})[["arm", "column", "model", "published", "source"]]
    cells = pd.MultiIndex.from_product([methods, dict.fromkeys(main["column"])], names=["arm", "column"])
    rows = cells.to_frame(index=False).merge(main, how="left").merge(printed, how="left")
    told = rows[["value", "published"]].notna().any(axis=1).groupby(rows["arm"]).transform("any")
    rows = rows[told].rename(columns={"arm": "method"})
    rows.insert(0, "paper", paper)
    rows.insert(1, "environment", name)
    return rows.fillna({"model": "", "source": ""})


def _other_rows(folder: Path) -> tuple[list[pd.DataFrame], list[Artifact]]:
    """Main-table rows of an environment's folder that are no arms: untrained, and with skills in the prompt."""
    plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    starred, inputs = arm_episodes(folder, plan, STARRED)
    frames = [] if starred.empty else [starred.assign(arm=starred["arm"] + "*")]
    policy = folder / "policy"
    with_skills = [path.parent for path in sorted(policy.glob(f"trajectories/*{STARRED}/{MANIFEST}"))]
    for arm, paths in (("vanilla", plain_episodes(policy)), ("skill_prompt*", with_skills)):
        found = [load_artifact(path, "trajectories") for path in paths]
        frames += [episode_frame(artifact, arm=arm) for artifact in found]
        inputs += found
    if not frames:
        return [], []
    episodes = pd.concat(frames, ignore_index=True)
    scores = score_table(episodes, ("arm",)) if graded(episodes) else pd.DataFrame()
    return [main_table(success_table(episodes, ("arm",)), scores, str(episodes["env"].iloc[0]))], inputs


def _study(name: str) -> Study:
    return replace(find_study(NAME), common=WORLDS[name].common)


def _untrained(folder: Path, name: str, sizes: Sizes) -> list[Stage]:
    """The shipped policy on the panel, as it is and with a library's skills in its prompt."""
    world, out = WORLDS[name], folder / name / "policy"
    seeds = ",".join(map(str, range(sizes.eval_seeds)))
    settings: dict[str, Any] = {"out": out, "seeds": seeds, "size": sizes.panel}
    needs: tuple[str, ...] = ()
    if not world.common:  # the games of the ablation
        settings["env.data"], needs = folder / name / "games", (f"{name}-games",)
    found = []
    for protocol, suffix in (("vanilla", ""), ("skill_prompt", STARRED)):
        command = undertow("eval", world.policy, *words({**settings, "protocol": protocol}))
        output = out / "trajectories" / f"{world.panel}_step0_seed{sizes.eval_seeds - 1}{suffix}"
        found.append(Stage(f"{name}-{protocol}", command, output, needs, weight=30))
    return found


def _starred(folder: Path, name: str, sizes: Sizes, seed: int) -> Stage:
    study = _study(name)
    arm = next(arm for arm in study.arms if arm.name == _STARRED)
    run, step = folder / name / f"seed{seed}" / arm.name, first_step(arm, sizes) + own_steps(arm, sizes)
    seeds = ",".join(map(str, range(sizes.eval_seeds)))
    output = f"{WORLDS[name].panel}_step{step}_seed{sizes.eval_seeds - 1}{STARRED}"
    return Stage(
        f"{name}-seed{seed}-{arm.name}-starred",
        undertow("eval", run, "--seeds", seeds, "--protocol", "skill_prompt"),
        run / "trajectories" / output,
        (f"{name}-seed{seed}-{arm.name}",),
        weight=30,
    )
