"""Figure 4 of PCSD: success on the unseen split (rooms that no training task has), by task type and arm.

Open marks are the paper's, of all tasks together.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from analysis.reference import paper_values
from figures.figure import SavedFigure, save
from figures.panels import PAPER_MARKERS, paper_handle, paper_mark
from figures.steps import arm_handles, looks
from figures.style import PAGE, style

NAME = "pcsd_fig4_unseen"
NEEDS = ("unseen_types",)
INTERVAL = "95 %, as named in the column `interval`"
TYPES = {  # ALFWorld's names -> those of the papers
    "pick_and_place_simple": "pick",
    "look_at_obj_in_light": "look",
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
    "pick_two_obj_and_place": "pick two",
    "all": "all",
}


def draw(success: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw unseen_types of analysis.ablation_tables and the published values (arm, low, high, model)."""
    arms = looks(success["arm"])
    known = [name for name in TYPES if name in set(success["type"])]
    types = [*(name for name in dict.fromkeys(success["type"]) if name not in TYPES), *known]
    width = min(0.8 / len(arms), 0.2)
    with style():
        figure = Figure(figsize=(PAGE, 2.35), layout="constrained")
        axes = figure.subplots()
        for place, name in enumerate(types):
            for index, (arm, (_, colour, marker)) in enumerate(arms.items()):
                x = place + width * (index - (len(arms) - 1) / 2)
                for row in success[(success["arm"] == arm) & (success["type"] == name)].itertuples():
                    axes.bar(x, row.success, width * 0.9, color=colour, alpha=0.35, lw=0)
                    axes.plot([x, x], [row.low, row.high], color=colour, linewidth=1.1)
                    axes.plot(x, row.success, marker, color=colour, ms=3.6, zorder=3, clip_on=False)
                for value in paper[paper["arm"] == arm].itertuples() if name == "all" else ():
                    paper_mark(axes, x + 0.3 * width, value.low, value.high, PAPER_MARKERS[value.model], colour)
        if len(types) > 1 and types[-1] == "all":
            axes.axvline(len(types) - 1.5, color="#BBBBBB", linewidth=0.7)
        counts = success.groupby("type")["n_tasks"].max()
        labels = [f"{TYPES.get(name, name)}\n{int(counts[name])} tasks" for name in types]
        axes.set_xticks(range(len(types)), labels)
        axes.set_xlim(-0.55, len(types) - 0.45)
        axes.set_ylim(0, 1.02)
        axes.set_ylabel("success, unseen split")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.tick_params(axis="x", length=0)
        models = dict.fromkeys(paper["model"])
        handles = [*arm_handles(arms), *(paper_handle(f"PCSD paper, {m}", PAPER_MARKERS[m]) for m in models)]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), columnspacing=1.4)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests."""
    success = tables["unseen_types"]
    paper = paper_values("success/alfworld_unseen/")
    paper = paper.assign(arm=paper["quantity"].str.rpartition("/")[2])
    drawn = {"success": success, "paper": paper[paper["arm"].isin(set(success["arm"]))]}
    return save(
        draw(**drawn),
        folder,
        NAME,
        drawn=drawn,
        inputs=inputs,
        script=__name__,
        interval=INTERVAL,
    )
