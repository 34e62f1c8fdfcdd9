"""Figure 3 of PCSD: (a) mean gap between teacher and student, (b) share of tokens that weigh more than one half.

By step of training, for every arm whose loss has SDAR's gate or PCSD's weight. The open bar on the right is the range
that the paper reports for PCSD.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from analysis.reference import paper_values
from figures.figure import SavedFigure, save
from figures.panels import GREY, paper_handle, paper_mark
from figures.steps import SEEDS, arm_handles, by_step, looks, signal, title
from figures.style import PAGE, style

NAME = "pcsd_fig3_weights"
NEEDS = ("signals",)
METHODS = ("pcsd", "sdar")
INTERVAL = SEEDS


def draw(gap: pd.DataFrame, weight: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw gap and weight (arm, step, value, low, high) and the published range."""
    arms = looks(weight["arm"])
    with style():
        figure = Figure(figsize=(PAGE * 0.78, 2.3), layout="constrained")
        a, b = figure.subplots(1, 2)
        title(a, "a", "teacher − student")
        by_step(a, gap, arms)
        a.axhline(0, color="#333333", linewidth=0.7, zorder=1)
        a.set_ylabel("mean gap (nats)")
        title(b, "b", "tokens that weigh more than ½")
        by_step(b, weight, arms)
        b.set_ylabel("share of tokens")
        b.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        for value in paper.itertuples():
            _range(b, value.low, value.high)
        handles = [*arm_handles(arms), paper_handle("PCSD paper, range over training", "s")]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4), columnspacing=1.4)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests.

    Raises: ValueError when no arm logged a weight of METHODS.
    """
    signals = tables["signals"]
    weight = pd.concat([signal(signals, f"weight/{method}/over_half") for method in METHODS])
    if weight.empty:
        raise ValueError(f"{NAME} needs an arm whose method logs its weights: {' or '.join(METHODS)}")
    gap = signal(signals, "gap/mean")
    drawn = {
        "gap": gap[gap["arm"].isin(set(weight["arm"]))],
        "weight": weight,
        "paper": paper_values("weight/pcsd/over_half"),
    }
    return save(
        draw(**drawn),
        folder,
        NAME,
        drawn=drawn,
        inputs=inputs,
        script=__name__,
        interval=INTERVAL,
    )


def _range(axes: Axes, low: float, high: float) -> None:
    """A published range right of the last step."""
    first, last = axes.get_xlim()
    x = last + 0.03 * (last - first)
    paper_mark(axes, x, low, high, "s", GREY)
    axes.set_xlim(first, last + 0.06 * (last - first))
    bottom, top = axes.get_ylim()
    axes.set_ylim(min(bottom, low - 0.02), max(top, high + 0.02))
