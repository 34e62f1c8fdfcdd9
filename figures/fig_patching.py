"""Causal patching: where in the network the skill's effect on the action sits. A row of panels a reader.

(a) Share of the gap between student and teacher in the action's log-prob that is closed by the teacher's state of one
block, at the action's own positions or at all of the response's; dashed: a random direction of equal length. (b) The
same at the positions of the thought alone: one block, all blocks up to it, all from it on. (c) Share of the turns whose
greedy action is the teacher's. (d) Logit lens: rank of the teacher's greedy action tokens in each run.
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
from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter

from figures.figure import SavedFigure, save
from figures.style import CONTEXT_LABELS, PAGE, style

NAME = "fig_patching"
NEEDS = ("patching", "logit_lens")
INTERVAL = "95 %, percentile bootstrap over trajectories, pointwise by layer"
_GREY = "#777777"
_DASHES: Any = (0, (4, 1.5))
_DOTS: Any = (0, (1, 1.2))
# (positions, scope) -> label, colour, marker; Okabe and Ito's colours
SERIES: dict[tuple[str, str], tuple[str, str, str]] = {
    ("action", "single"): ("action tokens", "#D55E00", "o"),
    ("all", "single"): ("all response tokens", "#0072B2", "s"),
    ("thought", "single"): ("thought, this block", "#009E73", "^"),
    ("thought", "up_to"): ("thought, up to this block", "#CC79A7", "v"),
    ("thought", "from"): ("thought, from this block on", "#E69F00", "D"),
}
BRANCHES = {"student": ("student's run", "#D55E00", "o"), "teacher": ("teacher's run", "#0072B2", "s")}
TOKENS: dict[str, Any] = {"first": "-", "all": _DOTS}
_PANELS = (("a", ("action", "all")), ("b", ("thought",)))


def draw(patching: pd.DataFrame, lens: pd.DataFrame) -> Figure:
    """Draw the tables patching and logit_lens of analysis.causal_tables."""
    readers = list(dict.fromkeys(patching["reader"]))
    with style():
        figure = Figure(figsize=(PAGE, 0.75 + 1.75 * len(readers)), layout="constrained")
        grid = figure.subplots(len(readers), 4, squeeze=False)
        for row, reader in zip(grid, readers, strict=True):
            mine, seen = (table[table["reader"] == reader] for table in (patching, lens))
            first = reader == readers[0]
            for axes, (letter, positions) in zip(row, _PANELS, strict=False):
                _lines(axes, mine[(mine["quantity"] == "recovered") & mine["positions"].isin(positions)])
                for level in (0, 1):
                    axes.axhline(level, color="#333333", linewidth=0.5, zorder=1)
                axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
                _title(axes, letter if first else "", reader if letter == "a" else "thought positions alone")
            row[0].set_ylabel("gap in log-prob closed")
            _greedy(row[2], mine[mine["quantity"] == "same_action"])
            _title(row[2], "c" if first else "", "greedy action = teacher's")
            _lens(row[3], seen[seen["quantity"] == "rank"])
            _title(row[3], "d" if first else "", "logit lens")
            for axes in row:
                _layers(axes, mine["layer"])
            row[0].set_xlabel(f"layer\n({_n(mine[mine['quantity'] == 'recovered'])})")
        figure.legend(handles=_handles(), loc="outside lower center", ncols=4, columnspacing=1.2)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests."""
    patching, lens = tables["patching"], tables["logit_lens"]
    drawn = {
        "patching": patching[patching["quantity"].isin(("recovered", "same_action"))],
        "lens": lens[lens["quantity"] == "rank"],
    }
    return save(draw(**drawn), folder, NAME, drawn=drawn, inputs=inputs, script=__name__, interval=INTERVAL)


def _lines(axes: Axes, table: pd.DataFrame) -> None:
    if table["value"].isna().all():
        _say(axes, f"undefined:\n{'; '.join(dict.fromkeys(table['note']))}")
    for (positions, scope), (_, colour, marker) in SERIES.items():
        for source, line_style in (("teacher", "-"), ("random", _DASHES)):
            chosen = (table["positions"] == positions) & (table["scope"] == scope) & (table["source"] == source)
            line = table[chosen & table["value"].notna()]
            if line.empty:
                continue
            size = 3.4 if positions == "action" else 2.2  # the two of panel a often coincide
            dots = {"marker": marker, "ms": size} if source == "teacher" else {}
            _curve(axes, line, colour, linestyle=line_style, **dots)


def _greedy(axes: Axes, table: pd.DataFrame) -> None:
    _lines(axes, table[table["positions"].isin(("action", "all"))])
    without = table[table["source"] == "student"].iloc[0]
    axes.axhspan(without["low"], without["high"], color=_GREY, alpha=0.15, lw=0, zorder=0)
    axes.axhline(without["value"], color=_GREY, linestyle=_DOTS, linewidth=1.0)
    axes.set_ylim(top=1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _lens(axes: Axes, table: pd.DataFrame) -> None:
    for branch, (_, colour, marker) in BRANCHES.items():
        for tokens, line_style in TOKENS.items():
            line = table[(table["branch"] == branch) & (table["tokens"] == tokens)]
            dots = {"marker": marker, "ms": 2.2} if tokens == "first" else {}
            _curve(axes, line, colour, linestyle=line_style, **dots)
    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(10 ** max(np.ceil(np.log10(np.nanmax(table[["value", "high"]]))), 1.0), 0.9)  # the first on top
    axes.set_ylabel("rank (geometric mean)")


def _curve(axes: Axes, line: pd.DataFrame, colour: str, **kwargs: Any) -> None:
    layers = line["layer"].astype(int)
    axes.fill_between(layers, line["low"], line["high"], color=colour, alpha=0.15, lw=0)
    axes.plot(layers, line["value"], color=colour, linewidth=1.0, **kwargs)


def _layers(axes: Axes, layers: pd.Series) -> None:
    last = max(int(layer) for layer in layers if layer)
    axes.set_xlim(-0.4, last + 0.4)
    axes.set_xticks([t for t in MaxNLocator(5, integer=True).tick_values(0, last) if 0 <= t <= last])
    axes.set_xlabel("layer")


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", size=5.8, color=_GREY, wrap=True)


def _title(axes: Axes, letter: str, text: str) -> None:
    axes.set_title(text, fontweight="normal")
    axes.annotate(letter, (0, 1), (-12, 6), xycoords="axes fraction", textcoords="offset points", size=9, weight="bold")


def _n(table: pd.DataFrame) -> str:
    context = CONTEXT_LABELS.get(table["context"].iloc[0], table["context"].iloc[0])
    used, left_out = (int(np.max(table[name])) for name in ("n_segments", "n_undefined"))
    return f"{context}, {used} of {used + left_out} turns"


def _handles() -> list[Line2D]:
    patches = [Line2D([], [], color=c, marker=m, ms=3, label=label) for label, c, m in SERIES.values()]
    return [
        *patches,
        Line2D([], [], color=_GREY, linestyle=_DASHES, label="random direction, as long"),
        Line2D([], [], color=_GREY, linestyle=_DOTS, label="c: student, no patch; d: all tokens"),
        *(
            Line2D([], [], color=c, marker=m, ms=3, label=f"d: {label}, first token")
            for label, c, m in BRANCHES.values()
        ),
    ]
