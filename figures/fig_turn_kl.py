"""Figure 2 (left) of SDAR: how far the teacher's context moves the policy, turn by turn. A row of panels, one a reader.

KL(student || teacher) of whole turns: minus the gap summed over the turn's sampled tokens, the single-sample estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.reference import paper_values
from figures.fig_cka import CONTEXTS, OWN
from figures.fig_gap import handles, present
from figures.figure import SavedFigure, save
from figures.panels import PAPER_MARKERS, curve, paper_mark, title
from figures.style import PAGE, style

NAME = "sdar_fig2_turn_kl"
NEEDS = ("gaps",)
INTERVAL = "95 %, percentile bootstrap over trajectories, pointwise by turn"


def draw(turns: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw the KL by turn of analysis.gap_tables, and the published values of kl/by_turn."""
    readers = list(dict.fromkeys(turns["reader"]))
    with style():
        figure = Figure(figsize=(PAGE * (0.6 if len(readers) == 1 else 1), 2.9), layout="constrained")
        for axes, reader in zip(figure.subplots(1, len(readers), squeeze=False)[0], readers, strict=True):
            _turns(axes, turns[turns["reader"] == reader], paper)
            title(axes, "", f"{reader}: KL of a turn")
        figure.legend(handles=handles(turns, paper), loc="outside lower center", ncols=4, columnspacing=1.4)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests.

    Raises: ValueError when no turn was measured under the own skill.
    """
    gaps = tables["gaps"]
    turns = gaps[(gaps["by"] == "turn") & (gaps["quantity"] == "kl") & gaps["context"].isin(CONTEXTS)]
    if OWN not in set(turns["context"]):
        raise ValueError(f"SDAR's figure 2 needs the gap under {OWN}; diagnose with the measure gaps and that context")
    drawn = {"turns": turns, "paper": paper_values("kl/by_turn")}
    return save(
        draw(**drawn),
        folder,
        NAME,
        drawn=drawn,
        inputs=inputs,
        script=__name__,
        interval=INTERVAL,
    )


def _turns(axes: Axes, table: pd.DataFrame, paper: pd.DataFrame) -> None:
    for context in present(table):
        _, colour, marker = CONTEXTS[context]
        mine = table[table["context"] == context]
        curve(axes, mine["at"].astype(int), mine, "value", colour, marker=marker, ms=2.4)
    for value in paper.itertuples():
        paper_mark(axes, value.at, value.low, value.high, PAPER_MARKERS[value.model])
    axes.axhline(0, color="#333333", linewidth=0.5, zorder=1)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    own = table[table["context"] == OWN]
    axes.set_xlabel(f"turn ({_span(own['n_trajectories'])} episodes a turn)")
    axes.set_ylabel("KL(student ‖ teacher)\n(nats a turn, estimate)")


def _span(counts: pd.Series) -> str:
    low, high = int(counts.min()), int(counts.max())
    return f"{low}" if low == high else f"{low}–{high}"
