"""Figure 5 of PCSD: does a method's weight change as the teacher's quality does when the skill is perturbed?

For each reader, above: for three methods, one point a trajectory and perturbed skill; the change of the teacher's
quality (mean log-prob of the actions of another, successful episode of the task) against the change of the mean weight,
own skill minus perturbed. Below: Spearman's rank correlation for every method, with mean weights over all response
tokens (a correlation that is undefined says why) and over the action tokens alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.perturbation_tables import CONSTANT
from analysis.reference import paper_values
from figures.figure import SavedFigure, save
from figures.panels import GREY, paper_handle, say, title
from figures.style import PAGE, style

NAME = "pcsd_fig5_perturbation"
NEEDS = ("perturbation", "perturbation_units")
INTERVAL = "correlations: 95 %, percentile bootstrap over trajectories; points: none (single trajectories)"
METHODS = {
    "pcsd": "PCSD",
    "sdar": "SDAR",
    "sdar_normalised": "SDAR, normalised",
    "sdar_hard": "SDAR, hard gate",
    "sod": "SOD",
    "constant": "no weights",
}
CONTEXTS = {  # context -> label, colour, marker
    "none": ("skill removed", "#777777", "v"),
    "shuffled": ("skill shuffled", "#CC79A7", "^"),
    "other_skill": ("another trajectory's skill", "#D55E00", "s"),
    "unrelated": ("unrelated text", "#009E73", "D"),
}
PAPER = {"removed": "none", "shuffled": "shuffled"}  # as the published values call them -> context
SCATTERED = 3  # methods whose points are shown, the first in the order of METHODS
TOKENS = {"perturbation": "mean over all response tokens", "perturbation_actions": "mean over action tokens"}


def draw(units: pd.DataFrame, paper: pd.DataFrame, **correlations: pd.DataFrame) -> Figure:
    """Draw tables of analysis.perturbation_tables.

    Args: units, of perturbation_units; paper, published correlations; correlations, of perturbation_table under the
    name `perturbation` and, where there is one, of action_perturbation_table as `perturbation_actions`.
    """
    whole = correlations["perturbation"]
    readers = list(dict.fromkeys(whole["reader"]))
    methods = sorted(dict.fromkeys(whole["method"]), key=_rank)
    with style():
        height = 2.2 + 0.25 * len(methods)
        figure = Figure(figsize=(PAGE, 0.4 + height * len(readers)), layout="constrained")
        for part, reader in zip(figure.subfigures(len(readers), 1, squeeze=False)[:, 0], readers, strict=True):
            letters = iter("abcde") if reader == readers[0] else iter([""] * 5)
            above, below = part.subfigures(2, 1, height_ratios=[1.75, height - 1.75])
            shown = methods[:SCATTERED]
            for axes, method in zip(np.ravel(above.subplots(1, len(shown))), shown, strict=True):
                mine = units[(units["reader"] == reader) & (units["method"] == method)]
                said = _scatter(axes, mine)
                label = f"{METHODS.get(method, method)}{said}"
                title(axes, next(letters), f"{reader}: {label}" if method == shown[0] else label)
            above.supylabel("change of mean weight", size=7)
            above.supxlabel("change of the teacher's quality, nats a token", size=7)
            row = np.ravel(below.subplots(1, len(correlations), sharey=True))
            for axes, (name, table) in zip(row, correlations.items(), strict=True):
                mine = table[table["reader"] == reader]
                _correlations(axes, mine, methods, paper if name == "perturbation" else paper.head(0))
                title(axes, next(letters), TOKENS[name])
            row[0].set_yticks(range(len(methods)), [METHODS.get(m, m) for m in reversed(methods)])
        figure.legend(handles=_handles(whole, paper), loc="outside lower center", ncols=5, columnspacing=1.4)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests.

    Raises: ValueError when no method's weights were read under a perturbed skill.
    """
    found = {name: _known(tables[name]) for name in TOKENS if name in tables}
    if found.get("perturbation", pd.DataFrame()).empty:
        raise ValueError(
            "figure 5 of PCSD needs a perturbed skill: diagnose with the measure perturbation and with none"
        )
    drawn = {"units": _known(tables["perturbation_units"]), "paper": _paper(), **found}
    return save(
        draw(**drawn),
        folder,
        NAME,
        drawn=drawn,
        inputs=inputs,
        script=__name__,
        interval=INTERVAL,
    )


def _known(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["context"].isin(CONTEXTS)] if len(table) else table


def _paper() -> pd.DataFrame:
    values = paper_values("perturbation/")
    parts = values["quantity"].str.split("/", expand=True)
    return values.assign(method=parts[1], context=parts[2].map(PAPER))


def _scatter(axes: Axes, units: pd.DataFrame) -> str:
    """The points of a method; what the title has to add."""
    column, said = "weight_change", ""
    if len(units) and np.ptp(units[column]) <= CONSTANT:  # normalised to mean 1 over every response
        column, said = "action_weight_change", ", action tokens"
    units = units.dropna(subset=[column])
    axes.axhline(0, color="#BBBBBB", linewidth=0.6, zorder=1)
    axes.axvline(0, color="#BBBBBB", linewidth=0.6, zorder=1)
    for context, (_, colour, marker) in CONTEXTS.items():
        mine = units[units["context"] == context]
        axes.plot(mine["quality_change"], mine[column], marker, color=colour, ms=2.8, mec="white", mew=0.25, alpha=0.85)
    axes.locator_params(nbins=5)
    if units.empty:
        say(axes, "no trajectory has both changes")
        axes.set_xticks([])
        axes.set_yticks([])
    return said


def _correlations(axes: Axes, table: pd.DataFrame, methods: Sequence[str], paper: pd.DataFrame) -> None:
    contexts = [context for context in CONTEXTS if context in set(table["context"])]
    shift = dict(zip(contexts, 0.3 * (1 - 2 * (np.arange(len(contexts)) + 0.5) / max(len(contexts), 1)), strict=True))
    for row in table.itertuples():
        y = len(methods) - 1 - list(methods).index(row.method) + shift[row.context]
        _, colour, marker = CONTEXTS[row.context]
        axes.plot([row.low, row.high], [y, y], color=colour, linewidth=1.1)
        axes.plot(row.spearman, y, marker, color=colour, ms=3.2, mec="white", mew=0.3, zorder=3)
    for value in paper.itertuples():
        if value.method in methods and value.context in shift:
            y = len(methods) - 1 - list(methods).index(value.method) + shift[value.context]
            _, colour, marker = CONTEXTS[value.context]
            axes.plot(value.low, y, marker, mfc="white", mec=colour, ms=3.8, mew=0.8, lw=0, zorder=4)
    for method, rows in table.groupby("method", sort=False):
        if rows["spearman"].isna().all():
            y = len(methods) - 1 - list(methods).index(str(method))
            reason = str(rows["note"].iloc[0]).partition(";")[0]
            axes.text(0, y, f"undefined: {reason}", size=5.2, color=GREY, ha="center", va="center",
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6}, zorder=5)  # fmt: skip
    axes.axvline(0, color="#333333", linewidth=0.6, zorder=1)
    axes.set_xlim(-1.05, 1.05)
    axes.set_xticks([-1, -0.5, 0, 0.5, 1])
    axes.set_ylim(-0.6, len(methods) - 0.4)
    axes.set_xlabel(f"rank correlation, {_range(table['n_units'])} trajectories")
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)


def _range(counts: pd.Series) -> str:
    return " to ".join(str(n) for n in sorted({int(counts.min()), int(counts.max())})) if len(counts) else "no"


def _rank(method: str) -> tuple[int, str]:
    known = list(METHODS)
    return (known.index(method) if method in known else len(known), method)


def _handles(table: pd.DataFrame, paper: pd.DataFrame) -> list[Any]:
    handles: list[Any] = [
        Line2D([], [], color=colour, marker=marker, ms=3.4, label=label)
        for context, (label, colour, marker) in CONTEXTS.items()
        if context in set(table["context"])
    ]
    shown = set(zip(table["method"], table["context"], strict=True)) & set(
        zip(paper["method"], paper["context"], strict=True)
    )
    return [*handles, *([paper_handle("published (PCSD)", "v")] if shown else [])]
