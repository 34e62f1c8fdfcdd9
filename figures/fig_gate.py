"""Figure 5 of SDAR: (a) mean gap between teacher and student, (b) share of tokens whose gate is open (above one half),
by step of training, for every arm whose loss has SDAR's gate.

Open marks, on the upper axis of steps, are a published training log; the open bar on the left of (b) is what the paper
says of the first steps of its 7B model (less than half).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from analysis.reference import paper_curves, paper_values
from figures.figure import SavedFigure, save
from figures.panels import PAPER_MARKERS, paper_handle, paper_mark
from figures.steps import SEEDS, arm_handles, by_step, looks, published_run, signal, thinned, title
from figures.style import PAGE, style

NAME = "sdar_fig5_gate"
NEEDS = ("signals",)
GATE = "weight/sdar/over_half"
INTERVAL = SEEDS
_LOG, _EARLY = "Qwen2.5-3B-Instruct", "Qwen2.5-7B-Instruct"


def draw(gap: pd.DataFrame, gate: pd.DataFrame, logs: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw gap and gate (arm, step, value, low, high), points of published logs, and the published range."""
    arms = looks(gate["arm"])
    with style():
        figure = Figure(figsize=(PAGE * 0.78, 2.55), layout="constrained")
        a, b = figure.subplots(1, 2)
        for axes, rows, letter, metric in ((a, gap, "a", "gap_mean"), (b, gate, "b", "gate_active_share")):
            by_step(axes, rows, arms)
            left, right = axes.get_xlim()
            axes.set_xlim(left - 0.05 * (right - left), right)  # room for the paper's range
            published_run(axes, logs[logs["metric"] == metric], arms, float(logs["step"].max()))
            title(axes, letter, {"a": "teacher − student", "b": "open gates"}[letter])
        a.axhline(0, color="#333333", linewidth=0.7, zorder=1)
        a.set_ylabel("mean gap (nats)")
        b.set_ylabel("share of tokens, gate > ½")
        b.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        b.set_ylim(0, 1)
        for value in paper.itertuples():
            paper_mark(b, left, value.low, value.high, PAPER_MARKERS[_EARLY])
        handles = arm_handles(arms)
        handles.append(paper_handle(f"training log, {_LOG}", PAPER_MARKERS[_LOG]))
        handles.append(paper_handle(f"SDAR paper, {_EARLY}, early", PAPER_MARKERS[_EARLY]))
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 3), columnspacing=1.4)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests.

    Raises: ValueError when no arm logged SDAR's gate.
    """
    gate, gap = (signal(tables["signals"], metric) for metric in (GATE, "gap/mean"))
    if gate.empty:
        raise ValueError(f"{NAME} needs an arm that logs {GATE}; train one with the method sdar")
    names = ("gap_mean", "gate_active_share")
    drawn = {
        "gap": gap[gap["arm"].isin(set(gate["arm"]))],
        "gate": gate,
        "logs": pd.concat([thinned(paper_curves(m), 20, PAPER_MARKERS[_LOG]).assign(metric=m) for m in names]),
        "paper": paper_values("gate/alfworld/sdar/active_share_early"),
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
