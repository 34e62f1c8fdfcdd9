"""A matched ablation: (a) success of every arm's last weights, (b) its paired difference to the arm it is held against;
(c), (d) the same of the score, where the environment grades its episodes.

Small ticks are single training seeds' extremes; hollow marks are the papers' values, of other models and environments.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from analysis.main_table import ALL
from figures.figure import SavedFigure, save
from figures.style import PAGE, style

NAME = "ablation"  # and behind it the study's name, where the tables say it
NEEDS = ("success", "cost")  # of an ablation: other studies have no cost of arms
INTERVAL = (
    "95 %; a: as named in the column `interval` of its table; b, d: percentile bootstrap over training seeds and tasks "
    "of the paired differences; c: percentile bootstrap over tasks"
)
_BLUE, _GREY, _GREEN = "#0072B2", "#777777", "#009E73"
_MARKERS = "Dosv^"  # of the papers' models
_FIT = {  # how the published quantities of each panel begin
    "success": ("success/", "accuracy/", "exact_match/"),
    "success difference": ("gain/",),
    "score": ("score/",),
    "score difference": ("score_gain/",),
}


def draw(
    success: pd.DataFrame,
    differences: pd.DataFrame,
    paper: pd.DataFrame,
    starred: pd.DataFrame | None = None,
    scores: pd.DataFrame | None = None,
    score_differences: pd.DataFrame | None = None,
    study: str = "",
) -> Figure:
    """Draw the tables of analysis.ablation_tables; differences, paper and starred may be empty.

    With `scores` of all episodes (columns arm, score, low, high) the score and its differences are a second row.
    """
    arms = list(success["arm"])
    places = {arm: len(arms) - 1 - i for i, arm in enumerate(arms)}  # the first arm stands on top
    models = list(dict.fromkeys(paper["model"])) if len(paper) else []
    handles = [Line2D([], [], color=_BLUE, marker="o", ms=3.8, label="last weights, 95 %")]
    rows = 1 if scores is None else 2
    with style():
        height = 0.8 + 0.2 * bool(study) + rows * (0.35 + 0.27 * len(arms))
        figure = Figure(figsize=(PAGE, height), layout="constrained")
        if study:
            figure.suptitle(study, x=0.01, ha="left", fontsize=8, fontweight="bold")
        panels = figure.subplots(rows, 2, sharey=True, squeeze=False, width_ratios=[1.15, 1])
        a = panels[0][0]
        for row in success.itertuples():
            if row.n_training_seeds > 1:
                y = places[row.arm]
                a.plot([row.lowest_seed, row.highest_seed], [y, y], "|", color="#222222", ms=5, mew=0.8)
        if success["n_training_seeds"].max() > 1:
            handles.append(Line2D([], [], marker="|", color="#222222", ms=5, lw=0, label="training seeds, extremes"))
        if starred is not None and len(starred):
            a.plot(
                starred["success"], starred["arm"].map(places), "*", color=_GREEN, ms=6, mec="white", mew=0.4, zorder=4
            )
            handles.append(Line2D([], [], marker="*", color=_GREEN, ms=6, lw=0, label="with skills in the prompt"))
        bases = dict(zip(differences.get("arm", ()), differences.get("base", ()), strict=True))
        several = len(set(bases.values())) > 1
        base = "its base" if several else next(iter(bases.values()), "")
        drawn = [("success", success, differences)]
        if scores is not None:
            drawn.append(("score", scores, differences[:0] if score_differences is None else score_differences))
        for (left, right), letters, (name, levels, compared) in zip(panels, ("ab", "cd")[:rows], drawn, strict=True):
            _intervals(left, levels, name, places)
            _intervals(right, compared, "difference", places)
            for axes, quantity in ((left, name), (right, f"{name} difference")):
                _paper_marks(axes, paper, places, models, _FIT[quantity])
            _axis(left, letters[0], f"{name} on the fixed panel", _n(success) if name == drawn[-1][0] else "")
            compare = f"paired difference{' of the score' * (name == 'score')} to {base}"
            _axis(right, letters[1], compare if bases else "no arm to compare with", "")
            right.axvline(0, color="#333333", linewidth=0.7, zorder=1)
        labels = [f"{arm}\n– {bases[arm]}" if several and arm in bases else arm for arm in arms]
        a.set_yticks([places[arm] for arm in arms], labels)
        a.set_ylim(-0.6, len(arms) - 0.4)
        handles += [
            Line2D([], [], marker=marker, mfc="white", mec=_GREY, ms=3.6, lw=0, label=f"paper: {model or 'not named'}")
            for model, marker in zip(models, _MARKERS, strict=False)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4), columnspacing=1.4)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder` as ablation_<study>; `inputs` maps the artifacts of the tables to their digests.

    Args: tables, of ablation_tables.tabulate.
    """
    empty = {"differences": ["arm", "base"], "paper": ["arm", "model", "quantity", "source"]}
    drawn = {name: tables.get(name, pd.DataFrame(columns=columns)) for name, columns in empty.items()}
    drawn["paper"] = drawn["paper"][drawn["paper"]["arm"].isin(tables["success"]["arm"])]
    drawn = {"success": tables["success"], **drawn}
    drawn |= {name: tables[name] for name in ("starred", "score_differences") if name in tables}
    if "scores" in tables:
        ends = {"score_low": "low", "score_high": "high"}
        rows = tables["scores"][tables["scores"]["type"] == ALL]
        drawn["scores"] = rows[["arm", "score", *ends]].rename(columns=ends)
    study = str(tables["study"]["study"].iloc[0]) if "study" in tables else ""
    return save(
        draw(**drawn, study=study),
        folder,
        f"{NAME}_{study}" if study else NAME,
        drawn=drawn,
        inputs=inputs,
        script=__name__,
        interval=INTERVAL,
    )


def _intervals(axes: Axes, rows: pd.DataFrame, column: str, places: Mapping[str, int]) -> None:
    for row in rows.to_dict("records"):
        y = places[row["arm"]]
        axes.plot([row["low"], row["high"]], [y, y], color=_BLUE, linewidth=1.3)
        axes.plot(row[column], y, "o", color=_BLUE, ms=4.2, zorder=3)


def _paper_marks(
    axes: Axes, paper: pd.DataFrame, places: Mapping[str, int], models: list[str], starts: tuple[str, ...]
) -> None:
    for value in paper.itertuples():
        if value.quantity.startswith(starts):
            marker = _MARKERS[models.index(value.model) % len(_MARKERS)]
            y = places[value.arm] - 0.24  # below our own, so that neither hides the other
            axes.plot(value.low, y, marker, mfc="white", mec=_GREY, ms=3.6, mew=0.8, zorder=2)


def _axis(axes: Axes, letter: str, title: str, label: str) -> None:
    axes.set_title(title, fontweight="normal")
    axes.annotate(letter, (0, 1), (-10, 6), xycoords="axes fraction", textcoords="offset points", size=9, weight="bold")
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)


def _n(success: pd.DataFrame) -> str:
    def span(column: str) -> Any:
        low, high = int(np.min(success[column])), int(np.max(success[column]))
        return low if low == high else f"{low}–{high}"

    return f"{span('n_episodes')} episodes of {span('n_tasks')} tasks, {span('n_training_seeds')} training seed(s)"
