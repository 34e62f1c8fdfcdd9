"""Gradient audit of the distillation channels. A row of panels a reader, a line a channel.

(a) Cosine of what a channel's gradient is on average with the gradient of the full reverse KL, on the parameters of the
blocks and on the logits; an undefined one says why. (b) Share of the per-token gradient norm on each class of tokens.
(c) Variance of one sample relative to the square of the average. (d) Effective number of tokens, as a share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, PercentFormatter

from figures.figure import SavedFigure, save
from figures.style import PAGE, style

NAME = "fig_audit"
NEEDS = ("audit",)
INTERVAL = "95 %, percentile bootstrap over trajectories"
LABELS = {
    "reverse_kl": "reverse KL, full vocabulary",
    "gap_weight": "sampled, weight = gap",
    "unit_weight": "sampled, weight = 1",
    "hidden_alignment": "hidden-state alignment",
}
COSINES = {"cosine_parameters": ("parameters", "#0072B2", "o"), "cosine_logits": ("logits", "#D55E00", "s")}
CLASSES = {
    "think": ("think", "#009E73", "^"),
    "action": ("action", "#D55E00", "o"),
    "format": ("format", "#777777", "s"),
}
_QUANTITIES = (*COSINES, "norm_share", "noise", "effective_tokens")
_GREY = "#777777"


def draw(audit: pd.DataFrame) -> Figure:
    """Draw the table audit of analysis.causal_tables."""
    readers = list(dict.fromkeys(audit["reader"]))
    channels = list(dict.fromkeys(audit["channel"]))
    with style():
        size = (PAGE, 0.85 + len(readers) * (0.45 + 0.2 * len(channels)))
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(len(readers), 4, squeeze=False, sharey=True, width_ratios=[1.3, 1, 0.8, 0.8])
        for row, reader in zip(grid, readers, strict=True):
            mine, first = audit[audit["reader"] == reader], reader == readers[0]
            _cosines(row[0], mine, channels)
            for place, (token_class, (_, colour, marker)) in enumerate(CLASSES.items()):
                shares = mine[(mine["quantity"] == "norm_share") & (mine["token_class"] == token_class)]
                _points(row[1], shares, channels, colour, marker, 0.22 * (1 - place))
            noise = mine[mine["quantity"] == "noise"]
            _points(row[2], noise[noise["value"] > 0], channels, "#0072B2", "o")
            for value in noise[noise["value"] == 0].itertuples():
                row[2].text(0.03, _place(channels, value.channel), "no sampling", size=5.4, color=_GREY, va="center",
                            transform=row[2].get_yaxis_transform())  # fmt: skip
            _points(row[3], mine[mine["quantity"] == "effective_tokens"], channels, "#0072B2", "o")
            _axis(row[0], "a" if first else "", reader, "cosine with reverse KL")
            _axis(row[1], "b" if first else "", "gradient norm by class", "share of norm")
            _axis(row[2], "c" if first else "", "sampling noise", "variance / mean²")
            _axis(row[3], "d" if first else "", "effective tokens", f"share, {_n(mine)} turns")
            row[0].set_xlim(-1.08, 1.08)
            row[0].axvline(0, color="#333333", linewidth=0.6, zorder=1)
            _decades(row[2], noise["value"])
            for axes in (row[1], row[3]):
                axes.set_xlim(-0.03, 1.03)
                axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            row[0].set_yticks(range(len(channels)), [LABELS.get(c, c) for c in reversed(channels)])
            row[0].set_ylim(-0.6, len(channels) - 0.4)
        figure.legend(handles=_handles(), loc="outside lower center", ncols=5, columnspacing=1.4)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests."""
    drawn = {"audit": tables["audit"][tables["audit"]["quantity"].isin(_QUANTITIES)]}
    return save(draw(**drawn), folder, NAME, drawn=drawn, inputs=inputs, script=__name__, interval=INTERVAL)


def _cosines(axes: Axes, audit: pd.DataFrame, channels: Sequence[str]) -> None:
    for place, (quantity, (_, colour, marker)) in enumerate(COSINES.items()):
        table = audit[audit["quantity"] == quantity]
        _points(axes, table, channels, colour, marker, 0.14 - 0.28 * place)
    reasons = audit[(audit["quantity"] == "cosine_parameters") & audit["value"].isna()]
    for row in reasons.itertuples():
        y = _place(channels, row.channel)
        axes.text(0, y, f"undefined: {row.note}", size=5.4, color=_GREY, ha="center", va="center",
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # fmt: skip


def _points(
    axes: Axes, table: pd.DataFrame, channels: Sequence[str], colour: str, marker: str, shift: float = 0.0
) -> None:
    for row in table[table["value"].notna()].itertuples():
        y = _place(channels, row.channel) + shift
        axes.plot([row.low, row.high], [y, y], color=colour, linewidth=1.1)
        axes.plot(row.value, y, marker, color=colour, ms=3.4, mec="white", mew=0.3, zorder=3)


def _decades(axes: Axes, values: pd.Series) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())
    exponents = np.log10(values[values > 0])
    if len(exponents):
        axes.set_xlim(10 ** np.floor(exponents.min() - 0.3), 10 ** np.ceil(exponents.max() + 0.3))


def _place(channels: Sequence[str], channel: str) -> int:
    return len(channels) - 1 - channels.index(channel)  # the first stands on top


def _axis(axes: Axes, letter: str, title: str, label: str) -> None:
    axes.set_title(title, fontweight="normal")
    axes.annotate(letter, (0, 1), (-10, 6), xycoords="axes fraction", textcoords="offset points", size=9, weight="bold")
    axes.set_xlabel(label)
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)


def _n(audit: pd.DataFrame) -> int:
    return int(np.max(audit["n_segments"] + audit["n_undefined"]))


def _handles() -> list[Line2D]:
    cosines = [(f"a: on the {label}", colour, marker) for label, colour, marker in COSINES.values()]
    classes = [(f"b: {label}", colour, marker) for label, colour, marker in CLASSES.values()]
    return [Line2D([], [], color=c, marker=m, ms=3.4, label=label) for label, c, m in (*cosines, *classes)]
