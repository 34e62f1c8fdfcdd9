"""Figure 5 of PR-OPD: what a linear probe reads from each layer and from the output, a row of panels a reader.

(a) Whose skill is in the context, the episode's own or another's: accuracy on held-out tasks by layer (embed, blocks,
final norm); ticks on top mark layers above chance after correction for having looked at all of them. (b) The same from
features of the output, and from the number of the turn alone. (c) to (e) Success, task type and third of the episode,
read from the student's layers. Dashed: the same probes on control labels; dotted: the most frequent answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from analysis.reference import paper_values
from figures.figure import SavedFigure, save
from figures.panels import GREY, PAPER_MARKERS, curve, paper_handle, paper_mark, say, title
from figures.style import PAGE, style

NAME = "fig5_probes"
NEEDS = ("probes",)
INTERVAL = "95 %, as named in the column `interval` of the table, pointwise by layer"
OWN, ALPHA = "own_skill", 0.05
LABELS = {  # labels -> title, colour
    OWN: ("own or another's skill", "#0072B2"),
    "success": ("success", "#009E73"),
    "task_type": ("task type", "#D55E00"),
    "turn_third": ("third of the episode", "#CC79A7"),
}
OUTPUTS = {  # features -> name under the axis
    "sampled_logprob": "sampled\nlog p",
    "top64": "top 64\nlog p",
    "projection256": "random\n256",
    "pca": "PCA\n64",
    "mlp": "small\nnetwork",
    "turn_index": "turn\nnumber",
}
_DASHES: Any = (0, (4, 1.5))
_DOTS: Any = (0, (1, 1.2))


def draw(probes: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw the table probes of analysis.probe_tables."""
    readers = list(dict.fromkeys(probes["reader"]))
    sets = [name for name in LABELS if name in set(probes["labels"])]
    others = [name for name in sets if name != OWN]
    rows = 2 if others else 1
    with style():
        figure = Figure(figsize=(PAGE, 0.5 + 1.8 * rows * len(readers)), layout="constrained")
        grid = figure.add_gridspec(rows * len(readers), 6)
        for index, reader in enumerate(readers):
            mine, first, row = probes[probes["reader"] == reader], index == 0, rows * index
            own = mine[mine["labels"] == OWN]
            blocks = _last(mine)
            a = figure.add_subplot(grid[row, :3])
            b = figure.add_subplot(grid[row, 3:], sharey=a)
            _layers(a, own, OWN, blocks)
            _outputs(b, own)
            _paper(a, b, paper, blocks)
            title(a, "a" if first else "", f"{reader}: {LABELS[OWN][0]}, from the states")
            title(b, "b" if first else "", "the same, from the output")
            below: list[Axes] = []
            for place, (name, letter) in enumerate(zip(others, "cde", strict=False)):
                axes = figure.add_subplot(grid[row + 1, 2 * place : 2 * place + 2], sharey=below[0] if below else None)
                below.append(axes)
                _layers(axes, mine[mine["labels"] == name], name, blocks)
                title(axes, letter if first else "", f"{LABELS[name][0]} (student)")
            _accuracy([a, b], own)
            if below:
                _accuracy(below, mine[mine["labels"] != OWN])
        figure.legend(handles=_handles(paper), loc="outside lower center", ncols=4, columnspacing=1.4)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests.

    Raises: ValueError when there is no row for the own skill's labels (one that is not estimable is enough).
    """
    probes = tables.get("probes", pd.DataFrame(columns=["labels"]))
    if OWN not in set(probes["labels"]):
        raise ValueError("figure 5 needs probes for own_skill; diagnose with the measure probe")
    read = probes["features"].isin(("hidden", "")) | ((probes["labels"] == OWN) & probes["features"].isin(OUTPUTS))
    drawn = {"probes": probes[read & probes["labels"].isin(LABELS)], "paper": paper_values("probe/")}
    return save(
        draw(**drawn),
        folder,
        NAME,
        drawn=drawn,
        inputs=inputs,
        script=__name__,
        interval=INTERVAL,
    )


def _layers(axes: Axes, table: pd.DataFrame, labels: str, blocks: int) -> None:
    colour = LABELS[labels][1]
    _layer_ticks(axes, blocks, beside=labels == OWN)
    line = table[table["features"] == "hidden"]
    if line.empty:
        _reason(axes, table)
        return
    x = [_place(layer, blocks) for layer in line["layer"]]
    curve(axes, x, line, "accuracy", colour, marker="o", ms=2.6)
    axes.plot(x, line["control_accuracy"], color=colour, linestyle=_DASHES, linewidth=0.8)
    axes.axhline(line["majority"].iloc[0], color=GREY, linestyle=_DOTS, linewidth=1.0, zorder=1)
    _above_chance(axes, [place for place, p in zip(x, line["p_max"], strict=True) if p < ALPHA], colour)
    axes.set_xlabel(f"layer ({int(line['n_samples'].max())} turns)\n{_best(line)}", size=6.3)


def _outputs(axes: Axes, table: pd.DataFrame) -> None:
    colour = LABELS[OWN][1]
    rows = table[table["features"].isin(OUTPUTS)].set_index("features")
    present = [name for name in OUTPUTS if name in rows.index]
    if not present:
        _reason(axes, table)
    for x, name in enumerate(present):
        row = rows.loc[name]
        axes.plot([x, x], [row["low"], row["high"]], color=colour, linewidth=1.2)
        axes.plot(x, row["accuracy"], "o", color=colour, ms=3.6, zorder=3)
        control = [row["control_accuracy"]] * 2
        axes.plot([x - 0.3, x + 0.3], control, color=colour, linestyle=(0, (2, 1)), linewidth=0.8)
    _above_chance(axes, [x for x, name in enumerate(present) if rows.loc[name, "p_max"] < ALPHA], colour)
    if present:
        axes.axhline(rows["majority"].iloc[0], color=GREY, linestyle=_DOTS, linewidth=1.0, zorder=1)
    axes.set_xticks(range(len(present)), [OUTPUTS[name] for name in present], size=6)
    axes.set_xlim(-0.6, max(len(present), 1) + 0.4)


def _above_chance(axes: Axes, places: list[float], colour: str) -> None:
    if places:
        marks: dict[str, Any] = {"ms": 4, "mew": 1.1, "clip_on": False, "transform": axes.get_xaxis_transform()}
        axes.plot(places, [1.0] * len(places), "|", color=colour, **marks)


def _paper(a: Axes, b: Axes, paper: pd.DataFrame, blocks: int) -> None:
    beside = a.get_xlim()[1] - 0.6 * _gap(blocks)
    places = {"probe/hidden": beside, "probe/hidden/mid_layer": blocks / 2, "probe/hidden/last_layer": blocks}
    for value in paper.itertuples():
        if value.quantity == "probe/output":
            paper_mark(b, b.get_xlim()[1] - 0.45, value.low, value.high, "s")
        elif value.quantity in places:
            paper_mark(a, places[value.quantity], value.low, value.high, PAPER_MARKERS.get(value.model, "s"))


def _reason(axes: Axes, table: pd.DataFrame) -> None:
    reasons = dict.fromkeys(reason for reason in table["not_estimable"] if reason)
    say(axes, fill(f"not estimable: {'; '.join(reasons)}" if reasons else "not measured", 34))
    axes.set_xlabel("layer")


def _layer_ticks(axes: Axes, blocks: int, beside: bool) -> None:
    """Blocks by number, the embedding as e, the state after the final norm as n; room for marks beside them."""
    whole = [int(t) for t in MaxNLocator(5, integer=True).tick_values(0, blocks) if 0 <= t <= blocks]
    ticks: dict[float, str] = {-_gap(blocks): "e"}
    ticks |= {t: str(t) for t in whole} | {blocks + _gap(blocks): "n"}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xlim(-1.5 * _gap(blocks), blocks + (3 if beside else 1.5) * _gap(blocks))


def _place(layer: str, blocks: int) -> float:
    return {"embed": -_gap(blocks), "final_norm": blocks + _gap(blocks)}.get(layer) or float(layer)


def _gap(blocks: int) -> float:
    """From the first and last block to what stands beside them."""
    return max(1.0, blocks / 15)


def _last(probes: pd.DataFrame) -> int:
    """The last block."""
    blocks = [int(layer) for layer in probes["layer"] if str(layer).isdigit()]
    return max(blocks, default=0)


def _accuracy(row: list[Axes], probes: pd.DataFrame) -> None:
    shown = probes[["low", "accuracy", "control_accuracy", "majority"]].to_numpy(float)
    row[0].set_ylim(max(0.0, np.floor(10 * np.nanmin(shown, initial=0.5)) / 10 - 0.02), 1.03)
    row[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    row[0].set_ylabel("held-out accuracy")
    for axes in row[1:]:
        axes.tick_params(labelleft=False)


def _best(line: pd.DataFrame) -> str:
    """The layer that is read best, with its accuracy over that of control labels."""
    row = line.loc[line["accuracy"].idxmax()]
    bounds = f"[{row['selectivity_low']:+.2f}, {row['selectivity_high']:+.2f}]"
    return (
        f"best {row['layer']}: selectivity {row['selectivity']:+.2f} {bounds},\np (max over layers) {row['p_max']:.3f}"
    )


def _handles(paper: pd.DataFrame) -> list[Any]:
    line: dict[str, Any] = {"color": "#333333"}
    handles = [
        Line2D([], [], marker="o", ms=3, label="accuracy, 95 %", **line),
        Line2D([], [], linestyle=_DASHES, linewidth=0.8, label="control labels", **line),
        Line2D([], [], color=GREY, linestyle=_DOTS, label="most frequent answer"),
        Line2D([], [], marker="|", ms=5, mew=1.1, lw=0, label=f"p (max) < {ALPHA}", **line),
    ]
    models = dict.fromkeys(paper["model"])
    return handles + [
        paper_handle(f"PR-OPD paper: {model or 'range over layers or features'}", PAPER_MARKERS.get(model, "s"))
        for model in models
    ]
