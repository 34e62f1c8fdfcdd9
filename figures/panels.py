"""Parts that the panels of several figures share."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

GREY = "#777777"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito
MARKERS = "os^Dvx"
PAPER_MARKERS = {"Qwen2.5-3B-Instruct": "D", "Qwen3-1.7B": "o", "Qwen2.5-7B-Instruct": "^", "": "s"}


def title(axes: Axes, letter: str, text: str) -> None:
    """A plain title with the panel's letter in front of it; no letter for \"\"."""
    axes.set_title(text, fontweight="normal")
    axes.annotate(letter, (0, 1), (-12, 6), xycoords="axes fraction", textcoords="offset points", size=9, weight="bold")


def layer_axis(axes: Axes, last: int) -> None:
    """Ticks at whole layers from 0 to `last`."""
    axes.set_xticks([t for t in MaxNLocator(5, integer=True).tick_values(0, last) if 0 <= t <= last])
    axes.set_xlabel("layer")


def curve(axes: Axes, x: Any, line: pd.DataFrame, value: str, colour: str, **kwargs: Any) -> None:
    """A line with the band from `low` to `high`."""
    axes.fill_between(x, line["low"], line["high"], color=colour, alpha=0.17, lw=0)
    axes.plot(x, line[value], color=colour, linewidth=1.0, **kwargs)


def say(axes: Axes, text: str) -> None:
    """Words in the middle of a panel in which nothing can be drawn."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", size=5.8, color=GREY, wrap=True)


def paper_mark(axes: Axes, x: float, low: float, high: float, marker: str, colour: str = GREY) -> None:
    """A published value as an open mark, a published range as an open bar between two of them."""
    style: dict[str, Any] = {"mfc": "white", "mec": colour, "ms": 3.6, "mew": 0.8, "zorder": 4, "clip_on": False}
    axes.plot([x, x], [low, high], color=colour, linewidth=0.6, zorder=3.5)
    axes.plot([x] * len({low, high}), sorted({low, high}), marker, lw=0, **style)


def paper_handle(label: str, marker: str, colour: str = GREY) -> Line2D:
    return Line2D([], [], marker=marker, mfc="white", mec=colour, ms=3.6, lw=0, label=label)
