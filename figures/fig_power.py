"""How many episodes show a difference: (a) power against episodes of each arm, (b) the smallest gain they can show.

Hollow marks in (a) are differences that the papers report from 128 episodes an arm, at the power those had for them.
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
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from analysis.power import PANEL, POWER, limit_curves, power_curves, published_gaps
from figures.figure import SavedFigure, save
from figures.style import PAGE, style

NAME = "fig_power"
INTERVAL = "none: the curves are exact for the rates they name, and nothing is estimated"
EPISODES = tuple(int(n) for n in np.unique(np.geomspace(32, 8192, 49).round()))
TICKS = (32, 128, 512, 2048, 8192)
_SHADES = ("#9ECAE1", "#6BAED6", "#3182BD", "#08519C")  # light to dark: small to large gains
_ASKED, _GREY = "#D55E00", "#777777"
_MARKERS = {"PR-OPD": "s", "SDAR": "o", "PCSD": "^"}
_DESIGNS: dict[str, tuple[str, Any]] = {  # of analysis.power.limit_curves -> label, line
    "unpaired": ("different tasks", "-"),
    "independent": ("same tasks, won independently", (0, (4, 1.5))),
    "half way": ("half way", (0, (1, 1.2))),
    "nested": ("same tasks, the better wins all the other does", (0, (5, 1, 1, 1))),
}


def draw(curves: pd.DataFrame, limits: pd.DataFrame, paper: pd.DataFrame, rate: float, asked: float) -> Figure:
    """Draw the tables of analysis.power: power_curves, limit_curves and published_gaps.

    Args: rate, of the base arm, a share; asked, the gain that is drawn apart from the others.
    """
    with style():
        figure = Figure(figsize=(PAGE, 2.9), layout="constrained")
        a, b = figure.subplots(1, 2)
        _power(a, curves, asked)
        for gap in paper.itertuples():
            a.plot(gap.episodes, gap.power, _MARKERS[gap.paper], mfc="white", mec=_GREY, ms=4.2, mew=0.9, zorder=4)
        for design, line in limits.groupby("design", sort=False):
            label, dashes = _DESIGNS[design]
            b.plot(line["episodes"], line["detectable"], color="#222222", linestyle=dashes, label=label)
        b.axhline(asked, color=_ASKED, linewidth=0.8)
        b.annotate(
            f"{100 * asked:.1f} points", (TICKS[-1], asked), (0, 2), textcoords="offset points", size=6, ha="right"
        )
        b.legend(loc="upper right")
        b.set_ylim(0, None)
        _axis(a, "a", f"power to tell a gain over {100 * rate:.3g} % (unpaired)", "power")
        _axis(b, "b", f"smallest gain shown with power {100 * POWER:.0f} %", "gain in success")
        marks = [
            Line2D([], [], marker=_MARKERS[name], mfc="white", mec=_GREY, ms=4, lw=0, label=f"{name}, as reported")
            for name in dict.fromkeys(paper["paper"])
        ]
        figure.legend(handles=[*_gain_handles(curves, asked), *marks], loc="outside lower center", ncols=4)
    return figure


def write(folder: Path, inputs: Mapping[str, str], rate_a: float, rate_b: float) -> SavedFigure:
    """Draw and save under `folder`, for telling rate_b from rate_a; `inputs` as in the other figures (may be empty)."""
    rate, asked = min(rate_a, rate_b), abs(rate_b - rate_a)
    gains = sorted({asked, *(gain for gain in (0.02, 0.05, 0.1, 0.2) if abs(gain - asked) > 0.01)})
    drawn = {
        "curves": power_curves(rate, gains, EPISODES),
        "limits": limit_curves(rate, EPISODES),
        "paper": published_gaps(),
    }
    return save(
        draw(**drawn, rate=rate, asked=asked),
        folder,
        NAME,
        drawn=drawn,
        inputs=inputs,
        script=__name__,
        interval=INTERVAL,
    )


def _power(axes: Axes, curves: pd.DataFrame, asked: float) -> None:
    for gain, line in curves.groupby("gain"):
        axes.plot(line["episodes"], line["power"], color=_colour(curves, gain, asked), lw=1.8 if gain == asked else 1.2)
    axes.axhline(POWER, color="#333333", linewidth=0.6, linestyle=(0, (4, 2)))
    axes.axvline(PANEL, color="#333333", linewidth=0.6, linestyle=(0, (1, 2)))
    axes.annotate(f"{PANEL} episodes", (PANEL, 1.0), (3, -6), textcoords="offset points", size=6)
    axes.set_ylim(0, 1.03)


def _colour(curves: pd.DataFrame, gain: float, asked: float) -> str:
    others = sorted(set(curves["gain"]) - {asked})
    return _ASKED if gain == asked else _SHADES[others.index(gain) % len(_SHADES)]


def _gain_handles(curves: pd.DataFrame, asked: float) -> list[Line2D]:
    return [
        Line2D([], [], color=_colour(curves, gain, asked), label=f"{100 * gain:.3g} points")
        for gain in sorted(set(curves["gain"]))
    ]


def _axis(axes: Axes, letter: str, title: str, label: str) -> None:
    axes.set_title(title, fontweight="normal")
    axes.annotate(letter, (0, 1), (-12, 6), xycoords="axes fraction", textcoords="offset points", size=9, weight="bold")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlim(EPISODES[0], EPISODES[-1])
    axes.set_xlabel("episodes of each arm" if letter == "a" else "episodes of each arm (paired: tasks)")
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
