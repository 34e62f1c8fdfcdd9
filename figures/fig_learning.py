"""Figure 1 of SDAR: self-distillation with and without a gate. (a) Mean gap between teacher and student, by step of
training. (b) Success of the evaluations along training. (c) Success of every arm's last weights.

Open marks are published: curves of training logs and points read from the paper's figure, on the upper axis of steps;
in (c) the paper's main table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from analysis.reference import paper_curves, paper_values
from analysis.stats import wilson
from figures.figure import SavedFigure, save
from figures.panels import GREY, PAPER_MARKERS, paper_handle, paper_mark, say
from figures.steps import SEEDS, Look, arm_handles, by_step, looks, published_run, signal, thinned, title
from figures.style import PAGE, style

NAME = "sdar_fig1_learning"
NEEDS = ("signals", "curves", "success")
ARMS = ("grpo_opsd", "sdar")  # ungated and gated
INTERVAL = (
    f"a: {SEEDS}; b: 95 %, Wilson of all episodes of a step (tasks of the panel, training seeds); c: 95 %, as named in "
    "the column `interval`"
)
_LOGS = {"gap_mean": "gap", "success_rate": "success_by_step"}  # published curve -> points read from the figure


def draw(gap: pd.DataFrame, learning: pd.DataFrame, success: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw gap (arm, step, value, low, high), learning (the same of success), success and published marks."""
    arms = looks(arm for arm in ARMS if arm in set(gap["arm"]))
    every = looks(success["arm"])
    with style():
        figure = Figure(figsize=(PAGE, 2.55), layout="constrained")
        a, b, c = figure.subplots(1, 3, width_ratios=[1, 1, 0.4 + 0.13 * len(every)])
        for axes, rows, letter, metric in ((a, gap, "a", "gap_mean"), (b, learning, "b", "success_rate")):
            title(axes, letter, {"a": "teacher − student", "b": "along training, on the panel"}[letter])
            if rows.empty:
                say(axes, "no arm logged it")
                continue
            by_step(axes, rows, arms)
            published_run(axes, paper[paper["metric"] == metric], arms, float(paper["step"].max()))
        a.axhline(0, color="#333333", linewidth=0.7, zorder=1)
        a.set_ylabel("mean gap (nats)")
        b.set_ylabel("success")
        b.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        title(c, "c", "last weights")
        _bars(c, success, every, paper)
        models = list(dict.fromkeys(paper["model"]))
        handles = [*arm_handles(arms), *(paper_handle(f"published: {m}", PAPER_MARKERS[m]) for m in models)]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), columnspacing=1.4)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests.

    Args: tables, of ablation_tables.tabulate. Raises: ValueError when no arm of ARMS logged its gap.
    """
    gap, success = signal(tables["signals"], "gap/mean"), tables["success"]
    gap = gap[gap["arm"].isin(ARMS)]
    if gap.empty:
        raise ValueError(f"{NAME} needs the logged gaps of an arm {' or '.join(ARMS)}; run a study that trains one")
    drawn = {
        "gap": gap,
        "learning": learning_table(tables["curves"], success),
        "success": success,
        "paper": published(success["arm"], set(gap["arm"])),
    }
    return save(
        draw(**drawn),
        folder,
        NAME,
        drawn=drawn,
        inputs=inputs,
        script=__name__,
        interval=INTERVAL,
    )


def learning_table(curves: pd.DataFrame, success: pd.DataFrame) -> pd.DataFrame:
    """Success of ARMS at each evaluation: arm, step, value, low, high, n_episodes (of all training seeds)."""
    tasks = success.set_index("arm")["n_tasks"]
    rows = []
    for (arm, step), found in curves.dropna(subset="success").groupby(["arm", "step"]):
        if arm in ARMS:
            n = int(tasks[arm]) * len(found)
            interval = wilson(round(found["success"].mean() * n), n)
            row = {"arm": arm, "step": int(step), "value": found["success"].mean(), "n_episodes": n}
            rows.append({**row, "low": interval.low, "high": interval.high})
    return pd.DataFrame(rows, columns=["arm", "step", "value", "n_episodes", "low", "high"])


def published(arms: Collection[str], learning: Collection[str]) -> pd.DataFrame:
    """Published marks: metric, arm, step (NaN: at the end), value, model, marker, source.

    Of the main table for `arms` (metric success), of training for those of `learning` (metrics of
    reference.paper_curves); points read from the paper's figure, of 150 steps, stand at the same share of the logs'.
    """
    parts = []
    for metric, quantity in _LOGS.items():
        logs = thinned(paper_curves(metric), 30, PAPER_MARKERS["Qwen2.5-3B-Instruct"])
        points = paper_values(f"{quantity}/alfworld/")
        points = points[points["at"].notna() & ~points["quantity"].str.contains("by_turn|by_position")]
        named = points["quantity"].str.split("/").str[2]
        points = points.assign(arm=named, step=points["at"] * (logs["step"].max() / points["at"].max()))
        points = points.rename(columns={"low": "value"}).assign(marker=points["model"].map(PAPER_MARKERS))
        both = pd.concat([logs, points])
        parts.append(both[both["arm"].isin(learning)].assign(metric=metric))
    table = paper_values("success/alfworld/")
    table = table[table["source"].str.startswith("SDAR")]
    table = table.assign(arm=table["quantity"].str.split("/").str[2], step=np.nan, metric="success", value=table["low"])
    table = table[table["arm"].isin(set(arms))].assign(marker=table["model"].map(PAPER_MARKERS))
    return pd.concat([*parts, table])[["metric", "arm", "step", "value", "model", "marker", "source"]]


def _bars(axes: Axes, success: pd.DataFrame, arms: Mapping[str, Look], paper: pd.DataFrame) -> None:
    style: dict[str, Any] = {"linewidth": 1.1, "color": "#222222"}
    for place, row in enumerate(success.itertuples()):
        axes.bar(place, row.success, 0.62, color=arms[row.arm][1], alpha=0.55, lw=0)
        axes.plot([place, place], [row.low, row.high], **style)
        marks = paper[(paper["metric"] == "success") & (paper["arm"] == row.arm)]
        for mark in marks.itertuples():
            paper_mark(axes, place + 0.2, mark.value, mark.value, mark.marker, GREY)
    axes.set_xticks(
        range(len(arms)), [look[0] for look in arms.values()], rotation=45, ha="right", rotation_mode="anchor"
    )
    axes.set_xlim(-0.6, max(len(arms), 3) - 0.4)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.tick_params(axis="x", length=0)
