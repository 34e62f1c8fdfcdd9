"""Figure 2 of SDAR: how far the teacher's context moves the policy, turn by turn, and the KL to the reference in
training.

(a) KL(student || teacher) of whole turns, a panel a reader: minus the gap summed over the turn's sampled tokens, the
single-sample estimate. (b) The KL term along training steps by arm, where the table `signals` holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from analysis.reference import paper_values
from figures.fig_cka import CONTEXTS, OWN
from figures.fig_gap import handles, present
from figures.figure import SavedFigure, save
from figures.panels import COLOURS, MARKERS, PAPER_MARKERS, curve, paper_mark, title
from figures.style import PAGE, style

NAME = "sdar_fig2_turn_kl"
NEEDS = ("gaps",)
KL_LOSS = "loss/kl"  # as the trainer logs it, without its coefficient
INTERVAL = "a: 95 %, percentile bootstrap over trajectories, pointwise by turn; b: extremes over training seeds"
_FEW = 40  # steps; more markers than that hide a line
_LINES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)))


def draw(turns: pd.DataFrame, signals: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw the KL by turn of analysis.gap_tables and the KL term of ablation_tables.signal_table (may be empty)."""
    readers = list(dict.fromkeys(turns["reader"]))
    with style():
        figure = Figure(figsize=(PAGE, 0.6 + 2.0 * len(readers)), layout="constrained")
        grid = figure.add_gridspec(len(readers), 2 if len(signals) else 1)
        for index, reader in enumerate(readers):
            axes = figure.add_subplot(grid[index, 0])
            _turns(axes, turns[turns["reader"] == reader], paper[paper["quantity"] == "kl/by_turn"])
            title(axes, "a" if index == 0 else "", f"{reader}: KL of a turn")
        if len(signals):
            axes = figure.add_subplot(grid[:, 1])
            _training(axes, signals, paper[paper["quantity"] == "kl/loss_most"])
            title(axes, "b", "KL to the reference in training")
        figure.legend(handles=handles(turns, paper), loc="outside lower center", ncols=4, columnspacing=1.4)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests.

    Args: tables, gaps, and signals if there. Raises: ValueError when no turn was measured under the own skill.
    """
    gaps = tables["gaps"]
    turns = gaps[(gaps["by"] == "turn") & (gaps["quantity"] == "kl") & gaps["context"].isin(CONTEXTS)]
    if OWN not in set(turns["context"]):
        raise ValueError(f"SDAR's figure 2 needs the gap under {OWN}; diagnose with the measure gaps and that context")
    columns = ["arm", "metric", "step", "value", "lowest", "highest"]
    signals = tables.get("signals", pd.DataFrame(columns=columns))
    paper = paper_values("kl/")
    signals = signals[signals["metric"] == KL_LOSS]
    drawn = {
        "turns": turns,
        "signals": signals,
        "paper": paper if len(signals) else paper[paper["quantity"] == "kl/by_turn"],
    }
    return save(
        draw(**drawn),
        folder,
        NAME,
        drawn=drawn,
        inputs=inputs,
        script=__name__,
        interval=INTERVAL,
        references=sorted(set(drawn["paper"]["source"])),
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


def _training(axes: Axes, signals: pd.DataFrame, paper: pd.DataFrame) -> None:
    for index, arm in enumerate(dict.fromkeys(signals["arm"])):
        mine = signals[signals["arm"] == arm].sort_values("step")
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        axes.fill_between(mine["step"], mine["lowest"], mine["highest"], color=colour, alpha=0.17, lw=0)
        line = _LINES[index // len(COLOURS) % len(_LINES)]
        dots: dict[str, Any] = {"marker": marker, "ms": 2.4} if len(mine) <= _FEW else {}
        axes.plot(mine["step"], mine["value"], color=colour, linewidth=1.0, linestyle=line, label=arm, **dots)
    for value in paper.itertuples():
        paper_mark(axes, float(signals["step"].max()), value.low, value.high, PAPER_MARKERS[value.model])
    if (signals["lowest"] > 0).all():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("training step (open mark: largest in the paper)")
    axes.set_ylabel("KL to the reference (nats a token)")
    axes.legend(loc="best", ncols=2, columnspacing=1.0)


def _span(counts: pd.Series) -> str:
    low, high = int(counts.min()), int(counts.max())
    return f"{low}" if low == high else f"{low}–{high}"
