"""What the figures of training share: how an arm looks, its logged quantities by step, and published runs beside them.

A published run is hundreds of steps long and ours a few: its marks stand on an axis of their own, on top, so that both
runs begin on the left and end on the right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import cycle
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from figures.panels import COLOURS, GREY, MARKERS, curve

Look = tuple[str, str, str]  # label, colour, marker
SEEDS = "extremes over training seeds (one seed: none)"
ARMS: dict[str, Look] = {
    "grpo": ("GRPO", "#E69F00", "v"),
    "opsd": ("OPSD", "#56B4E9", "<"),
    "grpo_opsd": ("GRPO+OPSD", "#D55E00", "s"),
    "skill_sd": ("Skill-SD", "#888888", "X"),
    "rlsd": ("RLSD", "#009E73", "D"),
    "skill_grpo": ("Skill-GRPO", "#000000", "P"),
    "sdar": ("SDAR", "#0072B2", "o"),
    "pcsd": ("PCSD", "#CC79A7", "^"),
}


def looks(arms: Iterable[str]) -> dict[str, Look]:
    """Label, colour and marker of every arm: its method's own, else the next that no other arm here has."""
    names = list(dict.fromkeys(arms))
    taken = [ARMS[arm] for arm in names if arm in ARMS]
    colours = [colour for colour in COLOURS if colour not in {look[1] for look in taken}] or list(COLOURS)
    markers = [marker for marker in MARKERS if marker not in {look[2] for look in taken}] or list(MARKERS)
    others = iter(zip(cycle(colours), cycle(markers), strict=False))
    return {arm: ARMS[arm] if arm in ARMS else (arm, *next(others)) for arm in names}


def title(axes: Axes, letter: str, text: str) -> None:
    """A plain title with the panel's letter in front of it, above whatever stands on the upper axis."""
    words = axes.set_title(text, fontweight="normal")
    axes.annotate(letter, (0, 0), (-12, 0), xycoords=words, textcoords="offset points", size=9, weight="bold")


def signal(signals: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rows of one metric of the table signals, by step; its extremes are called low and high."""
    rows = signals[signals["metric"] == metric].sort_values("step", kind="stable")
    return rows.rename(columns={"lowest": "low", "highest": "high"})


def by_step(axes: Axes, rows: pd.DataFrame, arms: Mapping[str, Look], value: str = "value") -> None:
    """A line an arm, with a band from low to high; whole steps on the axis."""
    for arm, (_, colour, marker) in arms.items():
        mine = rows[rows["arm"] == arm]
        if len(mine):
            curve(axes, mine["step"], mine, value, colour, marker=marker, ms=3.2)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("step of the arm")


def published_run(axes: Axes, points: pd.DataFrame, arms: Mapping[str, Look], steps: float) -> Axes:
    """Open marks of published runs of `steps` steps; points: arm, step, value, and marker."""
    top = axes.twiny()
    low, high = axes.get_xlim()
    axes.set_xlim(low, high)  # the two axes stay beside each other, whatever is drawn later
    first, last = axes.dataLim.x0, max(axes.dataLim.x1, axes.dataLim.x0 + 1)
    scale = steps / (last - first)
    top.set_xlim((low - first) * scale, (high - first) * scale)
    top.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    for point in points.itertuples():
        colour = arms[point.arm][1] if point.arm in arms else GREY
        top.plot(point.step, point.value, point.marker, mfc="white", mec=colour, ms=3.2, mew=0.7, zorder=2)
    top.set_xlabel("step of the published run", color=GREY, labelpad=2)
    top.tick_params(axis="x", colors=GREY, top=True, labeltop=True)
    top.spines["top"].set_visible(True)
    top.spines["top"].set_color("#BBBBBB")
    top.grid(False)
    return top


def thinned(curves: pd.DataFrame, steps: int, marker: str) -> pd.DataFrame:
    """Points of a curve of analysis.reference that lie at whole multiples of `steps`: arm, step, value, marker."""
    rows = curves[(curves["env"] == "alfworld") & ((curves["step"] % steps == 0) | (curves["step"] == 1))]
    return rows.rename(columns={"method": "arm"})[["arm", "step", "value", "model", "source"]].assign(marker=marker)


def arm_handles(arms: Mapping[str, Look]) -> list[Any]:
    return [Line2D([], [], color=colour, marker=marker, ms=3.4, label=label) for label, colour, marker in arms.values()]
