"""Figure 6 of PR-OPD: linear CKA between the states without and with a text in the context, a row of panels a reader.

(a) Debiased CKA of every student layer with every teacher layer under the own skill, of a sample of the rows.
(b) Dissimilarity 1 - CKA of the same layer under every text, of all rows, with its mean over layers on the right; ticks
on top mark layers where the own skill's lies above every control's. (c) The same without massive coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis.reference import paper_values
from figures.figure import SavedFigure, save
from figures.style import PAGE, style

NAME = "fig6_cka"
NEEDS = ("cka", "cka_map")
OWN = "own_skill"
INTERVAL = "b, c: 95 %, as named in the column `interval` of the table; a: none (single values of the map)"
CONTEXTS: dict[str, tuple[str, str, str]] = {  # context -> label, colour, marker; Okabe and Ito's colours
    OWN: ("own skill", "#0072B2", "o"),
    "other_skill": ("another trajectory's skill", "#D55E00", "s"),
    "shuffled": ("own skill, words shuffled", "#CC79A7", "^"),
    "unrelated": ("unrelated text", "#009E73", "D"),
    "none": ("empty skill", "#777777", "v"),
    "floor": ("same context, re-run", "#222222", "x"),
}
_GAP = "#DDDDDD"
_LINEAR = 1e-5  # below it the axis is linear, so that 0 and small negative values are shown


def draw(cka: pd.DataFrame, pairs: pd.DataFrame, contrasts: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw the tables of analysis.cka_tables: cka, cka_map and cka_contrasts (may be empty)."""
    readers = list(dict.fromkeys(cka["reader"]))
    with style():
        figure = Figure(figsize=(PAGE, 0.5 + 2.05 * len(readers)), layout="constrained")
        grid = figure.subplots(len(readers), 3, squeeze=False, width_ratios=[0.95, 1, 1])
        for (a, b, c), reader in zip(grid, readers, strict=True):
            mine, contrast = (t[t["reader"] == reader] if len(t) else t for t in (cka, contrasts))
            c.sharey(b)
            _map(a, pairs[pairs["reader"] == reader], mine)
            for axes, letter, coordinates in ((b, "b", "all"), (c, "c", "trimmed")):
                _title(axes, letter if reader == readers[0] else "", _coordinates(mine, coordinates))
                chosen = contrast[contrast["coordinates"] == coordinates] if len(contrast) else contrast
                _lines(axes, mine[mine["coordinates"] == coordinates], chosen, paper)
            b.set_ylabel("dissimilarity 1 − CKA")
            b.set_ylim(*_reach(mine, paper))
            c.tick_params(labelleft=False)
            _title(a, "a" if reader == readers[0] else "", f"{reader}: CKA, own skill")
        figure.legend(handles=_handles(cka), loc="outside lower center", ncols=4, columnspacing=1.4)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests.

    Raises: ValueError when the own-skill context is not among them.
    """
    cka = tables["cka"]
    if OWN not in set(cka["context"]):
        raise ValueError(f"figure 6 needs CKA under {OWN}; diagnose with the measure cka and the context {OWN}")
    pairs = tables["cka_map"]
    drawn = {
        "cka": cka[cka["context"].isin(CONTEXTS)],
        "pairs": pairs[(pairs["context"] == OWN) & (pairs["coordinates"] == "all")],
        "contrasts": tables.get("cka_contrasts", pd.DataFrame(columns=["reader", "coordinates"])),
        "paper": paper_values("cka/dissimilarity/"),
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


def _map(axes: Axes, pairs: pd.DataFrame, cka: pd.DataFrame) -> None:
    square = pairs.pivot(index="student_layer", columns="teacher_layer", values="debiased")
    square = square.sort_index(key=lambda names: names.astype(int))
    square = square[sorted(square.columns, key=int)]
    colours = colormaps["cividis"].with_extremes(bad=_GAP)
    image = axes.imshow(
        np.ma.masked_invalid(square.to_numpy()), origin="lower", vmin=0, vmax=1, cmap=colours, interpolation="nearest"
    )
    axes.figure.colorbar(image, ax=axes, shrink=0.85, pad=0.03, ticks=[0, 0.5, 1]).outline.set_visible(False)
    axes.grid(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, integer=True))
    rows = cka.loc[cka["context"] == OWN, "n_sampled"]
    axes.set_xlabel(f"teacher layer (n = {int(rows.iloc[0])})")
    axes.set_ylabel("student layer")


def _lines(axes: Axes, cka: pd.DataFrame, contrasts: pd.DataFrame, paper: pd.DataFrame) -> None:
    present = [context for context in CONTEXTS if context in set(cka["context"])]
    layers = [layer for layer in dict.fromkeys(cka["layer"]) if layer != "mean"]
    last = len(layers) - 1
    for place, context in enumerate(present):
        _, colour, marker = CONTEXTS[context]
        mine = cka[cka["context"] == context].set_index("layer")
        line = mine.reindex(layers)
        axes.fill_between(range(len(layers)), line["low"], line["high"], color=colour, alpha=0.2, lw=0)
        axes.plot(range(len(layers)), line["dissimilarity"], color=colour, marker=marker, ms=2.2, linewidth=0.9)
        x = _beside(last, place)
        axes.plot([x, x], mine.loc["mean", ["low", "high"]], color=colour, linewidth=1.2)
        axes.plot(x, mine.loc["mean", "dissimilarity"], marker, color=colour, ms=3.6, mew=0.8, zorder=3)
        for value in paper[paper["quantity"] == f"cka/dissimilarity/{context}"].itertuples():
            axes.plot(x + 0.25 * _step(last), value.low, marker, mfc="white", mec=colour, ms=3.6, mew=0.8, zorder=4)
    above = _above_all(contrasts, layers)
    if above:
        marks: dict[str, Any] = {"ms": 4, "mew": 1.1, "clip_on": False, "transform": axes.get_xaxis_transform()}
        axes.plot(above, [1.015] * len(above), "|", color=CONTEXTS[OWN][1], **marks)
    axes.axvline(last + 0.6 * _step(last), color="#CCCCCC", linewidth=0.6)
    axes.set_yscale("symlog", linthresh=_LINEAR, linscale=0.3)
    axes.set_xlim(-0.4, _beside(last, len(present) + 0.2))
    axes.set_xticks([t for t in MaxNLocator(5, integer=True).tick_values(0, last) if 0 <= t <= last])
    axes.set_xlabel("layer (right: their mean)")


def _reach(cka: pd.DataFrame, paper: pd.DataFrame) -> tuple[float, float]:
    """Ends of the axis of dissimilarity: every value and interval inside, 0 too, and room around them."""
    values = np.concatenate([cka[["dissimilarity", "low", "high"]].to_numpy(float).ravel(), paper["high"].to_numpy()])
    return min(1.5 * np.nanmin(values), 0) - _LINEAR / 2, max(1.7 * np.nanmax(values), _LINEAR)


def _above_all(contrasts: pd.DataFrame, layers: list[str]) -> list[int]:
    """Places of the layers where the interval of own minus control lies above 0 for every control."""
    if contrasts.empty:
        return []
    above = (contrasts.set_index("layer")["low"] > 0).groupby(level="layer").all()
    return [place for place, layer in enumerate(layers) if above.get(layer, False)]


def _beside(last: int, place: float) -> float:
    """Where the mean of a context stands, right of the layers."""
    return last + _step(last) * (1.1 + 0.55 * place)


def _step(last: int) -> float:
    return max(last, 3) * 0.09


def _coordinates(cka: pd.DataFrame, coordinates: str) -> str:
    """What the title says: coordinates of a state and rows, or how many coordinates the trimmed version is without."""
    widths = {name: cka[(cka["coordinates"] == name) & (cka["layer"] != "mean")]["d"] for name in ("all", "trimmed")}
    if coordinates == "all":
        rows = cka.loc[cka["context"] == OWN, "n"]
        return f"d = {int(widths['all'].max())}, n = {int(rows.iloc[0])} tokens"
    dropped = int((widths["all"].to_numpy() - widths["trimmed"].to_numpy()).max())
    return f"≤ {dropped} massive coordinates dropped" if dropped else "no coordinate is massive"


def _title(axes: Axes, letter: str, text: str) -> None:
    axes.set_title(text, fontweight="normal")
    axes.annotate(letter, (0, 1), (-12, 6), xycoords="axes fraction", textcoords="offset points", size=9, weight="bold")


def _handles(cka: pd.DataFrame) -> list[Any]:
    handles = [
        Line2D([], [], color=colour, marker=marker, ms=3.4, label=label)
        for context, (label, colour, marker) in CONTEXTS.items()
        if context in set(cka["context"])
    ]
    own = CONTEXTS[OWN][1]
    handles.append(Line2D([], [], marker="|", color=own, ms=5, mew=1.1, lw=0, label="own skill above all controls"))
    handles.append(Line2D([], [], marker="o", mfc="white", mec="#777777", ms=3.6, lw=0, label="PR-OPD paper, mean"))
    return handles
