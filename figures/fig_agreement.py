"""Figure 6 of PCSD, which is not described publicly, as we read it: do weights agree with an expert?

A panel a reader: for every method the AUROC of its weight for action tokens of turns whose command a searching expert
accepts against those of the others. 0.5 (the line): the weight tells nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.fig_perturbation import METHODS
from figures.figure import SavedFigure, save
from figures.panels import COLOURS, MARKERS, title
from figures.style import COLUMN, PAGE, style

NAME = "pcsd_fig6_agreement"
NEEDS = ("weight_auroc",)
INTERVAL = "95 %, percentile bootstrap over trajectories"
_ACROSS = 3  # panels in a row


def draw(auroc: pd.DataFrame) -> Figure:
    """Draw the table weight_auroc of analysis.perturbation_tables."""
    readers = list(dict.fromkeys(auroc["reader"]))
    methods = [m for m in METHODS if m in set(auroc["method"])]
    methods += [m for m in dict.fromkeys(auroc["method"]) if m not in METHODS]
    across = min(len(readers), _ACROSS)
    down = -(-len(readers) // across)
    reach = max(0.05, np.nanmax(np.abs(auroc[["auroc", "low", "high"]].to_numpy(float) - 0.5)))
    with style():
        size = (COLUMN if across == 1 else PAGE, down * (0.75 + 0.2 * len(methods)))
        figure = Figure(figsize=size, layout="constrained")
        panels = np.ravel(figure.subplots(down, across, squeeze=False, sharex=True, sharey=True))
        for index, axes in enumerate(panels):
            if index >= len(readers):
                axes.set_axis_off()
                continue
            mine = auroc[auroc["reader"] == readers[index]]
            _points(axes, mine, methods)
            title(axes, "abcdefghijkl"[index % 12] if len(readers) > 1 else "", readers[index])
            tokens = f"{mine['n_accepted'].max():,} accepted, {mine['n_rejected'].max():,} rejected tokens"
            axes.set_xlabel(f"AUROC of the weight\n{tokens}\n{mine['n_trajectories'].max()} trajectories")
            axes.tick_params(labelbottom=True)
        panels[0].set_xlim(max(0.5 - 1.15 * reach, -0.02), min(0.5 + 1.15 * reach, 1.02))
        panels[0].set_ylim(-0.6, len(methods) - 0.4)
        panels[0].set_yticks(range(len(methods)), [METHODS.get(m, m) for m in reversed(methods)])
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests.

    Raises: ValueError when no reader has tokens of both verdicts.
    """
    table = tables.get("weight_auroc", pd.DataFrame(columns=["auroc", "note"]))
    drawn = {"auroc": table[table["auroc"].notna()]}
    if drawn["auroc"].empty:
        reason = f" ({table['note'].iloc[0]})" if len(table) else ""
        raise ValueError(f"no reader has tokens that the expert accepts and such that it does not{reason}")
    return save(draw(**drawn), folder, NAME, drawn=drawn, inputs=inputs, script=__name__, interval=INTERVAL)


def _points(axes: Axes, table: pd.DataFrame, methods: Sequence[str]) -> None:
    axes.axvline(0.5, color="#333333", linewidth=0.6, zorder=1)
    for row in table.itertuples():
        place = list(methods).index(row.method)
        y, colour, marker = len(methods) - 1 - place, COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        axes.plot([row.low, row.high], [y, y], color=colour, linewidth=1.1)
        axes.plot(
            row.auroc, y, marker, color=colour, ms=3.8, mec="white" if marker != "x" else colour, mew=0.4, zorder=3
        )
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
