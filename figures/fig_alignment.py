"""Alignment curves of PR-OPD: does the student's state come to the teacher's, and does it keep its directions?

(a) Alignment loss 2 - 2 cos by training step, counted from the first step of alignment. (b) Cosine of student and
teacher states, as the loss sees it (after the projector, if there is one) and raw, mean over layers. (c) The same by
layer at the last step. (d) Effective rank of the student's states, mean over layers: a fall would be a collapse.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from analysis.reference import paper_values
from figures.figure import SavedFigure, save
from figures.panels import COLOURS, GREY, MARKERS, curve, layer_axis, paper_handle, title
from figures.style import ARMS, PAGE, style

NAME = "fig_alignment"
NEEDS = ("signals",)
INTERVAL = (
    "extremes over training seeds; of a mean over layers the mean of the layers' extremes, which is no narrower; "
    "none with one seed"
)
LOSS = "loss/pr_opd"
PROJECTED, RAW, RANK = "loss/pr_opd/cosine_projected/", "states/cosine_raw/", "states/effective_rank/"
_RAW: Any = (0, (4, 1.5))
_DOTTED = 12  # steps that can be marked one by one
_LEVELS = {"alignment/steps_to_0.5": 0.5, "alignment/steps_to_0.3": 0.3}


def draw(steps: pd.DataFrame, layers: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw the curves of `aligned`: by step (mean over layers), and by layer at each arm's last step."""
    arms = _looks(list(dict.fromkeys(steps["arm"])))
    with style():
        figure = Figure(figsize=(PAGE, 2.35), layout="constrained")
        a, b, c, d = figure.subplots(1, 4)
        for index, (arm, (_, colour, marker)) in enumerate(arms.items()):
            mine, last = steps[steps["arm"] == arm], layers[layers["arm"] == arm]
            dots = {"marker": marker, "ms": max(4.6 - 0.9 * index, 2.0)}  # arms often coincide: none hides another
            if mine["step"].nunique() > _DOTTED:
                dots = {}
            for axes, metric, look in (
                (a, LOSS, dots),
                (b, PROJECTED, dots),
                (b, RAW, {"linestyle": _RAW}),
                (d, RANK, dots),
            ):
                line = mine[mine["metric"] == metric]
                curve(axes, line["step_of_alignment"], line, "value", colour, **look)
            for metric, look in ((PROJECTED, dots), (RAW, {"linestyle": _RAW})):
                line = last[last["metric"] == metric]
                curve(c, line["layer"], line, "value", colour, **look)
        _steps(a, b, d, steps, paper)
        _paper(a, b, paper)
        title(a, "a", "alignment loss")
        title(b, "b", "cosine, mean over layers")
        title(c, "c", "cosine at the last step")
        title(d, "d", "effective rank")
        a.set_ylim(bottom=0)
        layer_axis(c, int(layers["layer"].max()) if len(layers) else 0)
        figure.legend(handles=_handles(arms), loc="outside lower center", ncols=4, columnspacing=1.4)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests.

    Raises: ValueError when no arm aligned hidden states.
    """
    signals = tables.get("signals", pd.DataFrame(columns=["metric"]))
    if LOSS not in set(signals["metric"]):
        raise ValueError("the alignment figure needs an arm that logs loss/pr_opd; train one with the method pr_opd")
    steps, layers = aligned(signals)
    drawn = {"steps": steps, "layers": layers, "paper": paper_values("alignment/")}
    return save(
        draw(**drawn),
        folder,
        NAME,
        drawn=drawn,
        inputs=inputs,
        script=__name__,
        interval=INTERVAL,
    )


def aligned(signals: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Of the arms that align: what (a), (b) and (d) show by step, and what (c) shows by layer.

    Columns: arm, metric (per-layer metrics without the layer), step, step_of_alignment (1 at the arm's first), value,
    low, high; layer.
    """
    first = signals[signals["metric"] == LOSS].groupby("arm")["step"].min()
    signals = signals[signals["arm"].isin(first.index)].rename(columns={"lowest": "low", "highest": "high"})
    signals = signals.assign(step_of_alignment=signals["step"] - signals["arm"].map(first) + 1)
    columns = ["value", "low", "high"]
    place = ["arm", "metric", "step", "step_of_alignment"]
    by_layer = []
    for prefix in (PROJECTED, RAW, RANK):
        mine = signals[signals["metric"].str.startswith(prefix)]
        by_layer.append(mine.assign(layer=mine["metric"].str.removeprefix(prefix).astype(int), metric=prefix))
    layers = pd.concat(by_layer)
    means = layers.groupby(place, sort=False)[columns].mean().reset_index()
    steps = pd.concat([signals.loc[signals["metric"] == LOSS, [*place, *columns]], means], ignore_index=True)
    last = layers["step"] == layers.groupby(["arm", "metric"])["step"].transform("max")
    layers = layers[last & (layers["metric"] != RANK)].sort_values(["arm", "metric", "layer"], ignore_index=True)
    return steps, layers[[*place, "layer", *columns]]


def _steps(a: Axes, b: Axes, d: Axes, steps: pd.DataFrame, paper: pd.DataFrame) -> None:
    last = float(steps["step_of_alignment"].max())
    reach = float(paper.loc[paper["quantity"].isin(_LEVELS), "high"].max())
    for axes, end in ((a, max(last, reach)), (b, last), (d, last)):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(0.8, max(end, 1.5) * 1.35)
        axes.set_xlabel("step of alignment")


def _paper(a: Axes, b: Axes, paper: pd.DataFrame) -> None:
    marks: dict[str, Any] = {"mfc": "white", "mec": GREY, "ms": 3.6, "mew": 0.8, "color": GREY, "linewidth": 0.6}
    for value in paper.itertuples():
        ends = [value.low, value.high]
        if value.quantity in _LEVELS:
            a.plot(ends, [_LEVELS[value.quantity]] * 2, "s-", zorder=4, **marks)
        elif value.quantity == "alignment/loss_start":
            a.plot([1, 1], ends, "s-", zorder=4, **marks)
        elif value.quantity == "alignment/final_cosine":
            b.plot([b.get_xlim()[1] / 1.08] * 2, ends, "s-", zorder=4, **marks)


def _looks(arms: list[str]) -> dict[str, tuple[str, str, str]]:
    """Label, colour and marker of each arm; arms without a look of their own take the next free colour."""
    free = [colour for colour in COLOURS if colour not in {ARMS[arm][1] for arm in arms if arm in ARMS}]
    looks = {}
    for index, arm in enumerate(arms):
        looks[arm] = ARMS.get(arm) or (arm, free[index % len(free)], MARKERS[index % len(MARKERS)])
    return looks


def _handles(arms: Mapping[str, tuple[str, str, str]]) -> list[Any]:
    return [
        *(Line2D([], [], color=colour, marker=marker, ms=3, label=label) for label, colour, marker in arms.values()),
        Line2D([], [], color="#333333", label="b, c: as the loss sees it"),
        Line2D([], [], color="#333333", linestyle=_RAW, label="b, c: raw"),
        paper_handle("PR-OPD paper: range of eight runs", "s"),
    ]
