"""Figure 4 of PR-OPD: how much every layer changes under the own skill and under every control, a row a reader.

(a) Mean change of direction of the hidden state by layer and context, with its mean over layers on the right. (b) The
same after each layer's mean student state is taken away. (c) Change under the own skill over change under an unrelated
text of equal length; the numbers below are those of the mean over layers.
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
from matplotlib.ticker import LogLocator, NullFormatter

from analysis.reference import paper_values
from figures.fig_cka import CONTEXTS, OWN
from figures.figure import SavedFigure, save
from figures.panels import PAPER_MARKERS, curve, layer_axis, paper_handle, paper_mark, title
from figures.style import PAGE, style

NAME = "fig4_controls"
NEEDS = ("layer_changes",)
INTERVAL = "95 %, percentile bootstrap over trajectories, pointwise by layer"
CHANNELS = {"hidden_change": "raw", "hidden_change_centred": "centred"}
UNRELATED, MEAN = "unrelated", "mean"
_RATIOS = {"hidden_change": ("#0072B2", "o"), "hidden_change_centred": ("#E69F00", "s")}


def draw(changes: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw the table layer_changes of analysis.layer_tables."""
    readers = list(dict.fromkeys(changes["reader"]))
    with style():
        figure = Figure(figsize=(PAGE, 0.6 + 1.9 * len(readers)), layout="constrained")
        for row, reader in zip(figure.subplots(len(readers), 3, squeeze=False), readers, strict=True):
            mine = changes[changes["reader"] == reader]
            first = reader == readers[0]
            row[1].sharey(row[0])
            for axes, letter, (channel, label) in zip(row, "ab", CHANNELS.items(), strict=False):
                _changes(axes, mine[mine["channel"] == channel])
                title(axes, letter if first else "", f"{reader}: {label}" if letter == "a" else label)
            _scale(row[0], mine)
            row[0].set_ylabel("change 1 − cos")
            row[1].tick_params(labelleft=False)
            _ratio(row[2], mine, paper)
            title(row[2], "c" if first else "", "own skill / unrelated text")
        figure.legend(handles=_handles(changes, paper), loc="outside lower center", ncols=4, columnspacing=1.4)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests.

    Raises: ValueError when no layer was measured under the own skill.
    """
    changes = tables.get("layer_changes", pd.DataFrame(columns=["context", "channel"]))
    changes = changes[changes["context"].isin(CONTEXTS) & changes["channel"].isin(CHANNELS)]
    if OWN not in set(changes["context"]):
        raise ValueError(f"figure 4 needs the change by layer under {OWN}; diagnose with the measure change and it")
    changes = changes[changes["reader"].isin(changes.loc[changes["context"] == OWN, "reader"])]
    drawn = {"changes": changes, "paper": paper_values("hidden_change/")}
    return save(
        draw(**drawn),
        folder,
        NAME,
        drawn=drawn,
        inputs=inputs,
        script=__name__,
        interval=INTERVAL,
    )


def _changes(axes: Axes, table: pd.DataFrame) -> None:
    present = [context for context in CONTEXTS if context in set(table["context"])]
    layers = _layers(table)
    for place, context in enumerate(present):
        _, colour, marker = CONTEXTS[context]
        mine = table[table["context"] == context].set_index("layer")
        curve(axes, range(len(layers)), mine.loc[layers], "mean", colour, marker=marker, ms=2.2)
        x = _beside(len(layers) - 1, place)
        axes.plot([x, x], mine.loc[MEAN, ["low", "high"]], color=colour, linewidth=1.2)
        axes.plot(x, mine.loc[MEAN, "mean"], marker, color=colour, ms=3.6, mew=0.8, zorder=3)
    _ends(axes, len(layers) - 1, len(present))


def _ratio(axes: Axes, table: pd.DataFrame, paper: pd.DataFrame) -> None:
    own = table[table["context"] == OWN].rename(columns={"low": "_low", "high": "_high"})
    own = own.rename(columns={"ratio_low": "low", "ratio_high": "high"})
    layers, said = _layers(table), []
    last = len(layers) - 1
    for place, (channel, label) in enumerate(CHANNELS.items()):
        mine = own[own["channel"] == channel].set_index("layer")
        if mine.empty or mine["ratio_to_unrelated"].isna().all():
            continue
        colour, marker = _RATIOS[channel]
        curve(axes, range(len(layers)), mine.loc[layers], "ratio_to_unrelated", colour, marker=marker, ms=2.2)
        x, mean = _beside(last, place), mine.loc[MEAN]
        axes.plot([x, x], [mean["low"], mean["high"]], color=colour, linewidth=1.2)
        axes.plot(x, mean["ratio_to_unrelated"], marker, color=colour, ms=3.6, zorder=3)
        said.append(f"{label} {mean['ratio_to_unrelated']:.2f} [{mean['low']:.2f}, {mean['high']:.2f}]")
    for value in paper.itertuples():
        paper_mark(axes, _beside(last, 2), value.low, value.high, PAPER_MARKERS.get(value.model, "s"))
    axes.axhline(1, color="#333333", linewidth=0.6, zorder=1)
    axes.margins(y=0.12)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    _ends(axes, last, 3)
    axes.set_xlabel("\n".join(["layer (right: mean)", *(said or ["unrelated text was not read"])]))


def _scale(axes: Axes, table: pd.DataFrame) -> None:
    """Logarithmic down to the least change of a context that changes anything; linear below, so that 0 is shown."""
    told = table.loc[~table["context"].isin(("none", "floor")), ["mean", "low", "high"]].to_numpy(float)
    least = 10.0 ** np.floor(np.log10(np.nanmin(told[told > 0], initial=1.0)))
    axes.set_yscale("symlog", linthresh=least, linscale=0.3)
    axes.set_ylim(-0.5 * least, 1.8 * np.nanmax(told, initial=least))


def _ends(axes: Axes, last: int, beside: int) -> None:
    layer_axis(axes, last)
    axes.set_xlabel("layer (right: mean)")
    axes.axvline(last + 0.6 * _step(last), color="#CCCCCC", linewidth=0.6)
    axes.set_xlim(-0.4, _beside(last, beside - 0.4))


def _layers(table: pd.DataFrame) -> list[str]:
    return [layer for layer in dict.fromkeys(table["layer"].astype(str)) if layer != MEAN]


def _beside(last: int, place: float) -> float:
    """Where a mean over layers stands, right of the layers."""
    return last + _step(last) * (1.1 + 0.55 * place)


def _step(last: int) -> float:
    return max(last, 3) * 0.09


def _handles(changes: pd.DataFrame, paper: pd.DataFrame) -> list[Any]:
    handles = [
        Line2D([], [], color=colour, marker=marker, ms=3.4, label=label)
        for context, (label, colour, marker) in CONTEXTS.items()
        if context in set(changes["context"])
    ]
    handles += [
        Line2D([], [], color=colour, marker=marker, ms=3.4, label=f"c: {CHANNELS[channel]}")
        for channel, (colour, marker) in _RATIOS.items()
    ]
    models = dict.fromkeys(paper["model"])
    return handles + [paper_handle(f"PR-OPD paper: {model}", PAPER_MARKERS.get(model, "s")) for model in models]
