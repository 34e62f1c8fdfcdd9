"""Share of tokens that change more than any threshold, for every channel and context, a block of panels a reader.

The papers publish no threshold; whole curves need none. The dotted line is the 99th percentile under the unrelated
text, where the tables hold it: what stands right of it is beyond the null.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, PercentFormatter

from figures.fig_cka import CONTEXTS
from figures.fig_gap import present
from figures.figure import SavedFigure, save
from figures.panels import title
from figures.style import PAGE, style

NAME = "fig_thresholds"
NEEDS = ("thresholds",)
INTERVAL = "95 %, percentile bootstrap over trajectories, pointwise by threshold"
NULL = "unrelated"
CHANNELS = {  # channel -> label, unit
    "output_change": ("token probability", "|Δp|"),
    "output_logprob_change": ("token log-prob", "|Δ log p|, nats"),
    "output_jsd": ("output distributions", "JSD, nats"),
    "hidden_change": ("hidden state, direction", "1 − cos"),
    "hidden_change_centred": ("hidden state, centred", "1 − cos"),
    "hidden_norm_change": ("hidden state, length", "relative"),
}
_COLUMNS = 3
_VISIBLE = 0.01  # shares nearer to 0 or 1 than this say nothing more about where a curve lies
_DOTS: Any = (0, (1, 1.2))


def draw(thresholds: pd.DataFrame, nulls: pd.DataFrame) -> Figure:
    """Draw the table thresholds of analysis.tables, and the null thresholds of `changes` (may be empty)."""
    readers = list(dict.fromkeys(thresholds["reader"]))
    channels = [channel for channel in CHANNELS if channel in set(thresholds["channel"])]
    rows = ceil(len(channels) / _COLUMNS)
    with style():
        figure = Figure(figsize=(PAGE, 0.45 + 1.55 * rows * len(readers)), layout="constrained")
        grid = figure.subplots(rows * len(readers), min(_COLUMNS, len(channels)), squeeze=False, sharey=True)
        for block, reader in zip(np.split(grid, len(readers)), readers, strict=True):
            for place, axes in enumerate(block.flat):
                if place >= len(channels):
                    axes.remove()
                    continue
                own = thresholds["reader"].eq(reader) & thresholds["channel"].eq(channels[place])
                limit = nulls[nulls["reader"].eq(reader) & nulls["channel"].eq(channels[place])]
                label, unit = CHANNELS[channels[place]]
                _curves(axes, thresholds[own], limit)
                axes.set_xlabel(f"threshold ({unit})")
                title(axes, "", f"{reader}: {label}" if place == 0 else label)
            for axes in block[:, 0]:
                axes.set_ylabel("tokens above it")
        figure.legend(handles=_handles(thresholds, nulls), loc="outside lower center", ncols=4, columnspacing=1.4)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests.

    Args: tables, thresholds, and changes if there. Raises: ValueError when no known channel and context is in it.
    """
    thresholds = tables["thresholds"]
    known = thresholds["channel"].isin(CHANNELS) & thresholds["context"].isin(CONTEXTS)
    thresholds = thresholds[known & thresholds["token_class"].eq("all")]
    if thresholds.empty:
        raise ValueError("there is no threshold curve over all tokens; diagnose with the measure change")
    nulls = tables.get("changes", pd.DataFrame(columns=["reader", "channel", "context", "token_class", "threshold"]))
    nulls = nulls[nulls["token_class"].eq("all") & nulls["context"].eq(NULL)][["reader", "channel", "threshold"]]
    drawn = {"thresholds": thresholds, "nulls": nulls}
    return save(draw(**drawn), folder, NAME, drawn=drawn, inputs=inputs, script=__name__, interval=INTERVAL)


def _curves(axes: Axes, table: pd.DataFrame, limit: pd.DataFrame) -> None:
    for context in present(table):
        _, colour, marker = CONTEXTS[context]
        line = table[table["context"] == context].sort_values("threshold")
        axes.fill_between(line["threshold"], line["low"], line["high"], color=colour, alpha=0.17, lw=0)
        axes.plot(line["threshold"], line["share"], color=colour, lw=1.0, marker=marker, ms=2.4, markevery=(4, 18))
    for value in limit["threshold"]:
        axes.axvline(value, color="#333333", linestyle=_DOTS, linewidth=0.8)
    told = table[table["share"].between(_VISIBLE, 1 - _VISIBLE)]["threshold"]
    axes.set_xscale("log")
    axes.set_xlim(0.5 * told.min(), 2 * told.max()) if len(told) else None
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _handles(thresholds: pd.DataFrame, nulls: pd.DataFrame) -> list[Line2D]:
    shown = [CONTEXTS[context] for context in present(thresholds)]
    handles = [Line2D([], [], color=colour, marker=marker, ms=3.4, label=label) for label, colour, marker in shown]
    if len(nulls):
        handles.append(Line2D([], [], color="#333333", linestyle=_DOTS, label="99 % of the tokens, unrelated text"))
    return handles
