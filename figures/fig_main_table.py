"""The papers' main table of an environment, e.g. success of every arm by type of task and over all of them.

Each cell holds our value in per cent with its interval, as numbers and as a mark on an axis from 0 to 100 %, and
below it the values that papers print for the method of that name. A paper's colour and a model's mark are the same in
every cell; their environments, models and budgets are not ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from figures.figure import SavedFigure, save
from figures.panels import GREY, PAPER_MARKERS, paper_handle, title
from figures.style import PAGE, style

NAME = "main_table"
NEEDS = ("main",)
INTERVAL = (
    "95 %: of success Wilson where every task was played once, else percentile bootstrap over tasks; of scores "
    "bootstrap over tasks; of a mean over data sets normal, from their standard errors"
)
_BLUE = "#0072B2"
_PAPERS = {"SDAR": "#D55E00", "PR-OPD": "#CC79A7", "PCSD": "#009E73", "OPID": "#E69F00"}
_LEVEL, _BESIDE = -0.02, 0.24  # below the middle of a cell: our mark, the papers'


def draw(main: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw the table `main` of an ablation, and published values by arm and column."""
    arms, columns = (list(dict.fromkeys(main[name])) for name in ("arm", "column"))
    with style():
        width = min(PAGE, 4.4 + 0.7 * len(columns))
        figure = Figure(figsize=(width, 1.05 + 0.44 * len(arms)), layout="constrained")
        panels = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
        for axes, column in zip(panels, columns, strict=True):
            _column(axes, main[main["column"] == column], paper[paper["column"] == column], arms)
            title(axes, "", column)
        panels[0].set_yticks(range(len(arms)), arms)
        panels[0].set_ylim(len(arms) - 0.45, -0.6)
        figure.legend(handles=_handles(paper), loc="outside lower center", ncols=4, columnspacing=1.4)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests.

    Args: tables, of ablation_tables.tabulate: main, and main_paper where anything is published of its methods.
    Raises: ValueError without the table main.
    """
    if "main" not in tables or tables["main"].empty:
        raise ValueError("the main table needs the table main of an ablation; run `undertow ablate` and tabulate")
    drawn = {"main": tables["main"]}
    drawn["paper"] = tables.get("main_paper", pd.DataFrame(columns=["arm", "column", "model", "low", "source"]))
    return save(draw(**drawn), folder, NAME, drawn=drawn, inputs=inputs, script=__name__, interval=INTERVAL)


def _column(axes: Axes, cells: pd.DataFrame, paper: pd.DataFrame, arms: list[str]) -> None:
    for row in cells.itertuples():
        y = arms.index(row.arm)
        axes.plot([row.low, row.high], [y + _LEVEL] * 2, color=_BLUE, linewidth=1.2)
        axes.plot(row.value, y + _LEVEL, "o", color=_BLUE, ms=3.4, zorder=3)
        interval = f" [{100 * row.low:.0f}, {100 * row.high:.0f}]" if row.low == row.low else ""
        axes.text(0.5, y - 0.3, f"{100 * row.value:.0f}{interval}", ha="center", va="center", size=5.6)
    for value in paper.itertuples():
        look: dict[str, Any] = {"mfc": "white", "mec": _colour(value.source), "ms": 3.0, "mew": 0.7, "zorder": 4}
        axes.plot(
            value.low, arms.index(value.arm) + _BESIDE, PAPER_MARKERS.get(value.model, "s"), clip_on=False, **look
        )
    axes.hlines([y + 0.5 for y in range(len(arms) - 1)], -0.06, 1.06, color="#E6E6E6", linewidth=0.5)
    axes.set_xlim(-0.06, 1.06)
    axes.set_xticks([0, 0.5, 1], ["0", "50", "100"])
    axes.grid(False, axis="y")
    axes.grid(True, axis="x")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    sizes = sorted({int(size) for size in cells["n_tasks"]})
    axes.set_xlabel(f"{'–'.join(str(size) for size in dict.fromkeys((sizes[0], sizes[-1])))} tasks" if sizes else "")


def _colour(source: str) -> str:
    return _PAPERS.get(source.partition(" ")[0], GREY)


def _handles(paper: pd.DataFrame) -> list[Any]:
    ours = Line2D([], [], color=_BLUE, marker="o", ms=3.4, label="ours in %, 95 %")
    models = dict.fromkeys(paper["model"])
    papers = list(dict.fromkeys(source.partition(" ")[0] for source in paper["source"]))
    return [
        ours,
        *(paper_handle(f"papers: {model or 'not named'}", PAPER_MARKERS.get(model, "s")) for model in models),
        *(Patch(fc="white", ec=_PAPERS.get(name, GREY), lw=1.0, label=f"paper: {name}") for name in papers),
    ]
