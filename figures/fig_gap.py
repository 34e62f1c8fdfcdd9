"""Figure 3 of SDAR: the gap between teacher and student in the sampled token's log-prob, a row of panels a reader.

(a) Its distribution, on a logarithmic axis; what lies outside [-1, 1] stands at the ends, the paper's mean on top.
(b) Its size by ten turns. (c) Its mean by relative position inside the turn. The contexts `none` and `floor`, whose gap
is 0 up to rounding, are left out of (a).
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
from matplotlib.ticker import PercentFormatter

from analysis.reference import paper_values
from figures.fig_cka import CONTEXTS, OWN
from figures.figure import SavedFigure, save
from figures.panels import PAPER_MARKERS, curve, paper_handle, paper_mark, title
from figures.style import PAGE, style

NAME = "sdar_fig3_gap"
NEEDS = ("gaps", "gap_histogram")
INTERVAL = "95 %, percentile bootstrap over trajectories, pointwise"
PAPER = "gap/alfworld/sdar/"
_UNCHANGED = ("none", "floor")
_END = 1.06  # nats; where the open bins stand
_PLACES = {"abs_gap": "turn_bin", "gap": "position"}  # quantity -> what panels b and c go by


def draw(gaps: pd.DataFrame, histogram: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw the tables gaps and gap_histogram of analysis.gap_tables."""
    readers = list(dict.fromkeys(gaps["reader"]))
    with style():
        figure = Figure(figsize=(PAGE, 0.65 + 2.1 * len(readers)), layout="constrained")
        grid = figure.subplots(len(readers), 3, squeeze=False, width_ratios=[1.25, 1, 1])
        for (a, b, c), reader in zip(grid, readers, strict=True):
            mine = gaps[gaps["reader"] == reader]
            letters = "abc" if reader == readers[0] else ("", "", "")
            _histogram(a, histogram[histogram["reader"] == reader], paper)
            a.set_xlabel("gap (nats)\n" + _summary(mine))
            title(a, letters[0], f"{reader}: distribution")
            _turns(b, mine[(mine["by"] == "turn_bin") & (mine["quantity"] == "abs_gap")], paper)
            title(b, letters[1], "size by turn")
            _positions(c, mine[(mine["by"] == "position") & (mine["quantity"] == "gap")], paper)
            title(c, letters[2], "mean by place in the turn")
        figure.legend(handles=handles(gaps, paper), loc="outside lower center", ncols=4, columnspacing=1.4)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests.

    Args: tables, those of NEEDS. Raises: ValueError when the own-skill context is not among them.
    """
    gaps, histogram = (tables[name][tables[name]["context"].isin(CONTEXTS)] for name in NEEDS)
    if OWN not in set(gaps["context"]):
        raise ValueError(f"SDAR's figure 3 needs the gap under {OWN}; diagnose with the measure gaps and that context")
    shown = [gaps["quantity"].eq(quantity) & gaps["by"].isin((by, "all")) for quantity, by in _PLACES.items()]
    shown.append(gaps["quantity"].eq("negative_share") & gaps["by"].eq("all"))
    histogram = histogram[histogram["token_class"].eq("all") & ~histogram["context"].isin(_UNCHANGED)]
    drawn = {"gaps": gaps[np.logical_or.reduce(shown)], "histogram": histogram, "paper": _paper()}
    return save(
        draw(**drawn),
        folder,
        NAME,
        drawn=drawn,
        inputs=inputs,
        script=__name__,
        interval=INTERVAL,
    )


def present(table: pd.DataFrame) -> list[str]:
    """The contexts of a table, in the order in which they are drawn."""
    return [context for context in CONTEXTS if context in set(table["context"])]


def handles(table: pd.DataFrame, paper: pd.DataFrame) -> list[Line2D]:
    """Legend entries of the contexts of a table, and of the models of SDAR's published values."""
    shown = [CONTEXTS[context] for context in present(table)]
    contexts = [Line2D([], [], color=colour, marker=marker, ms=3.4, label=label) for label, colour, marker in shown]
    models = dict.fromkeys(paper["model"])
    return contexts + [paper_handle(f"SDAR paper: {m or 'model not named'}", PAPER_MARKERS.get(m, "s")) for m in models]


def _paper() -> pd.DataFrame:
    """The values of SDAR's own figure 3; those by training step belong to another one."""
    values = paper_values(PAPER)
    return values[~values["quantity"].str.endswith("/by_step")]


def _histogram(axes: Axes, histogram: pd.DataFrame, paper: pd.DataFrame) -> None:
    for context in present(histogram):
        line = histogram[histogram["context"] == context].sort_values("left")
        closed = line[np.isfinite(line["left"]) & np.isfinite(line["right"])]
        _, colour, marker = CONTEXTS[context]
        edges = [*closed["left"], closed["right"].iloc[-1]]
        seen = closed["share"].where(closed["share"] > 0)
        axes.stairs(seen, edges, baseline=None, color=colour, linewidth=0.9)
        low, high = (np.append(closed[name], closed[name].iloc[-1]) for name in ("low", "high"))
        axes.fill_between(edges, low, high, where=high > 0, step="post", color=colour, alpha=0.15, lw=0)
        for x, end in ((-_END, line.iloc[0]), (_END, line.iloc[-1])):
            if end["share"] > 0:
                axes.plot([x, x], [end["low"], end["high"]], color=colour, linewidth=1.0)
                axes.plot(x, end["share"], marker, color=colour, ms=3)
    axes.set_yscale("log")
    shares = histogram.loc[histogram["share"] > 0, "share"]
    axes.set_ylim(0.5 * shares.min(), 2.5 * shares.max())
    axes.axvline(0, color="#333333", linewidth=0.5, zorder=1)
    axes.set_xticks([-1, -0.5, 0, 0.5, 1])
    axes.set_ylabel("share of tokens in a bin")
    for value in paper[paper["quantity"] == f"{PAPER}mean"].itertuples():
        mark: dict[str, Any] = {"mfc": "white", "mec": "#777777", "ms": 4, "mew": 0.8, "clip_on": False, "zorder": 5}
        axes.plot(value.low, 0.97, PAPER_MARKERS.get(value.model, "s"), transform=axes.get_xaxis_transform(), **mark)


def _turns(axes: Axes, table: pd.DataFrame, paper: pd.DataFrame) -> None:
    published = paper[paper["quantity"] == f"{PAPER}by_turn"]
    firsts = sorted({*table["at"].astype(int), *published["at"].astype(int)})
    shown = present(table)
    for index, context in enumerate(shown):
        _, colour, marker = CONTEXTS[context]
        mine = table[table["context"] == context]
        x = [firsts.index(int(at)) + _dodge(index, len(shown) + 1) for at in mine["at"]]
        axes.vlines(x, mine["low"], mine["high"], color=colour, linewidth=1.0)
        axes.plot(x, mine["value"], marker, color=colour, ms=3, lw=0)
    for value in published.itertuples():
        place = firsts.index(int(value.at)) + _dodge(len(shown), len(shown) + 1)
        paper_mark(axes, place, value.low, value.high, PAPER_MARKERS.get(value.model, "s"))
    last = max(firsts)
    axes.set_xticks(range(len(firsts)), [f"{at}+" if at == last else f"{at}–{at + 9}" for at in firsts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("turn")
    axes.set_ylabel("|gap| (nats)")


def _positions(axes: Axes, table: pd.DataFrame, paper: pd.DataFrame) -> None:
    for context in present(table):
        _, colour, marker = CONTEXTS[context]
        mine = table[table["context"] == context]
        curve(axes, mine["at"].astype(float), mine, "value", colour, marker=marker, ms=2.2)
    for value in paper[paper["quantity"] == f"{PAPER}by_position"].itertuples():
        paper_mark(axes, value.at, value.low, value.high, PAPER_MARKERS.get(value.model, "s"))
    axes.axhline(0, color="#333333", linewidth=0.5, zorder=1)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("relative position in the turn")
    axes.set_ylabel("gap (nats)")


def _summary(gaps: pd.DataFrame) -> str:
    """What panel a says in words: mean and share below 0 of all tokens under the own skill."""
    own = gaps[(gaps["context"] == OWN) & (gaps["by"] == "all")].set_index("quantity")
    if own.empty:
        return ""
    mean, below = (_spelled(own.loc[name]) for name in ("gap", "negative_share"))
    size = own.loc["gap"]
    n = f"{int(size['n_tokens']):,} tokens, {int(size['n_trajectories'])} episodes"
    return f"own skill: mean {mean}\nbelow 0: {below}\n{n}"


def _spelled(row: pd.Series) -> str:
    span = f" [{row['low']:.3f}, {row['high']:.3f}]" if np.isfinite(row["low"]) else ""
    return f"{row['value']:.3f}{span}".replace("-", "−")


def _dodge(index: int, count: int) -> float:
    return 0.7 * ((index + 0.5) / count - 0.5)
