"""The papers' main table: success of every arm by type of task and over all of them.

Each cell holds our success in per cent with its interval, as numbers and as a mark on an axis from 0 to 100 %, and
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

from analysis.reference import paper_values
from figures.figure import SavedFigure, save
from figures.panels import GREY, PAPER_MARKERS, paper_handle, title
from figures.style import PAGE, style

NAME = "main_table"
NEEDS = ("success", "types")
INTERVAL = "95 %, as named in the column `interval` of each table"
ALL = "all"
TYPES = {  # our type -> its name in the papers' tables, in their order
    "pick_and_place_simple": "pick",
    "look_at_obj_in_light": "look",
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
    "pick_two_obj_and_place": "pick2",
}
_BLUE = "#0072B2"
_PAPERS = {"SDAR": "#D55E00", "PR-OPD": "#CC79A7", "PCSD": "#009E73", "OPID": "#E69F00"}
_LEVEL, _BESIDE = -0.02, 0.24  # below the middle of a cell: our mark, the papers'


def draw(success: pd.DataFrame, types: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw the tables success and types of analysis.ablation_tables, and published values by arm and type."""
    arms = list(success["arm"])
    there = set(types["type"])
    columns = [*(name for name in TYPES if name in there), *sorted(there - set(TYPES)), ALL]
    cells = pd.concat([types[types["arm"].isin(arms)], success.assign(type=ALL)])
    with style():
        figure = Figure(figsize=(PAGE, 1.05 + 0.44 * len(arms)), layout="constrained")
        panels = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
        for axes, column in zip(panels, columns, strict=True):
            _column(axes, cells[cells["type"] == column], paper[paper["type"] == column], arms)
            title(axes, "", TYPES.get(column, column))
        panels[0].set_yticks(range(len(arms)), arms)
        panels[0].set_ylim(len(arms) - 0.45, -0.6)
        figure.legend(handles=_handles(paper), loc="outside lower center", ncols=4, columnspacing=1.4)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests.

    An arm stands beside the published values of the method that the study's table `paper` names for it, else of its own
    name. Raises: ValueError without success by type.
    """
    for name in NEEDS:
        if name not in tables or tables[name].empty:
            raise ValueError(
                f"the main table needs the table {name} of an ablation; run `undertow ablate` and tabulate"
            )
    success, types = tables["success"], tables["types"]
    drawn = {"success": success, "types": types[types["arm"].isin(success["arm"])]}
    drawn["paper"] = published(list(success["arm"]), set(types["type"]), tables.get("paper"))
    return save(
        draw(**drawn),
        folder,
        NAME,
        drawn=drawn,
        inputs=inputs,
        script=__name__,
        interval=INTERVAL,
    )


def published(arms: list[str], types: set[str], named: pd.DataFrame | None) -> pd.DataFrame:
    """Values of all papers and models for the arms: arm, type, and the fields of reference.PaperValue.

    Nothing is published for other types of task than ALFWorld's. A value that a paper repeats from another stands once,
    with its first source.
    """
    names = {arm: arm for arm in arms}
    if named is not None and len(named):
        own = named[named["quantity"].str.startswith("success/alfworld/")]
        names |= dict(zip(own["arm"], own["quantity"].str.rpartition("/")[2], strict=True))
    whole, parts = paper_values("success/alfworld/"), paper_values("success_by_type/alfworld/")
    values = pd.concat([whole, parts]).drop_duplicates(["quantity", "model", "low"])
    frames = []
    for arm in arms if types <= set(TYPES) else []:
        places = {f"success/alfworld/{names[arm]}": ALL}
        places |= {f"success_by_type/alfworld/{names[arm]}/{TYPES[kind]}": kind for kind in types}
        mine = values[values["quantity"].isin(places)]
        frames.append(mine.assign(arm=arm, type=mine["quantity"].map(places)))
    return pd.concat(frames, ignore_index=True) if frames else values[:0].assign(arm="", type="")


def _column(axes: Axes, cells: pd.DataFrame, paper: pd.DataFrame, arms: list[str]) -> None:
    for row in cells.itertuples():
        y = arms.index(row.arm)
        axes.plot([row.low, row.high], [y + _LEVEL] * 2, color=_BLUE, linewidth=1.2)
        axes.plot(row.success, y + _LEVEL, "o", color=_BLUE, ms=3.4, zorder=3)
        text = f"{100 * row.success:.0f} [{100 * row.low:.0f}, {100 * row.high:.0f}]"
        axes.text(0.5, y - 0.3, text, ha="center", va="center", size=5.6)
    for value in paper.itertuples():
        look: dict[str, Any] = {"mfc": "white", "mec": _colour(value.source), "ms": 3.0, "mew": 0.7, "zorder": 4}
        axes.plot(
            value.low, arms.index(value.arm) - _BESIDE, PAPER_MARKERS.get(value.model, "s"), clip_on=False, **look
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
    ours = Line2D([], [], color=_BLUE, marker="o", ms=3.4, label="ours: success in %, 95 %")
    models = dict.fromkeys(paper["model"])
    papers = list(dict.fromkeys(source.partition(" ")[0] for source in paper["source"]))
    return [
        ours,
        *(paper_handle(f"papers: {model}", PAPER_MARKERS.get(model, "s")) for model in models),
        *(Patch(fc="white", ec=_PAPERS.get(name, GREY), lw=1.0, label=f"paper: {name}") for name in papers),
    ]
