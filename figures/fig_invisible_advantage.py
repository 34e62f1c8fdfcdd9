"""Figure 1 of PR-OPD, "the invisible advantage": what a skill in the context changes, and what aligning to it brings.

(a) Share of response tokens whose hidden state / sampled-token probability changes under the episode's own skill, above
the 99th percentile of the same quantity under an unrelated text of equal length; per reader, channel and token class.
(b) The same share at every threshold, because the papers name none. (c) Success on one fixed panel over training steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from analysis.reference import paper_values
from figures.figure import SavedFigure, save
from figures.style import ARMS, CHANNEL_LABELS, CHANNELS, CONTEXT_LABELS, CONTEXT_LINES, PAGE, style

NAME = "fig1_invisible_advantage"
NEEDS = ("changes", "thresholds")
CLASSES = ("all", "think", "action", "format")
READERS = {"tiny": "tiny policy (taught to read skills)", "smollm2-135m": "SmolLM2-135M (pretrained)"}
INTERVAL = (
    "95 %; a, b: percentile bootstrap over trajectories, given the threshold; "
    "c: as named in the column `interval` of its table"
)
_BAR = 0.36  # width in classes
_OFFSET = {"hidden_change": -_BAR / 2, "output_change": _BAR / 2}
_PAPER_MARKERS = {"Qwen2.5-3B-Instruct": "D", "Qwen3-1.7B": "o"}
_GREY = "#777777"
_LEVEL: Any = (0, (4, 2))


def draw(changes: pd.DataFrame, thresholds: pd.DataFrame, curves: pd.DataFrame | None = None) -> Figure:
    """Draw the tables of analysis.tables: change_table, threshold_table and curve_table.

    `curves` is None or empty as long as no training has been evaluated: then only (a) and (b) are drawn.
    """
    readers = list(dict.fromkeys(changes["reader"]))
    with_curves = _has(curves)
    widths = [1.12, 1.0, 1.2] if with_curves else [1.12, 1.0]
    size = (PAGE * sum(widths) / 3.32, 0.75 + (max(1.7 * len(readers), 2.6) if with_curves else 1.55 * len(readers)))
    with style():
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(wspace=0.04, hspace=0.06))
        grid = figure.add_gridspec(len(readers), len(widths), width_ratios=widths)
        for row, reader in enumerate(readers):
            a, b = figure.add_subplot(grid[row, 0]), figure.add_subplot(grid[row, 1])
            mine = changes[changes["reader"] == reader]
            _change_rates(a, mine)
            _threshold_curves(b, thresholds[thresholds["reader"] == reader])
            for channel, threshold in mine.groupby("channel")["threshold"].first().items():
                b.axvline(threshold, color=CHANNELS[channel], linewidth=0.7, alpha=0.7)
            _title(a, "a" if row == 0 else "", READERS.get(reader, reader))
            _title(b, "b" if row == 0 else "", "at every threshold")
            b.set_xlabel("threshold on |Δp| or 1 − cos" if row == len(readers) - 1 else "")
        if with_curves:
            _learning_curves(figure.add_subplot(grid[:, 2]), curves)
        columns = 5 if with_curves else 3
        figure.legend(handles=_handles(), loc="outside lower left", ncols=columns, columnspacing=1.4, handletextpad=0.6)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests.

    The tables may hold more than is drawn; the CSV files hold exactly the rows on the page.
    Raises: ValueError when the change rates lack the own-skill context.
    """
    changes, thresholds, curves = tables["changes"], tables["thresholds"], _own(tables.get("curves"))
    changes = changes[changes["channel"].isin(CHANNELS) & changes["context"].isin(("own_skill", "floor"))]
    drawn_curve = thresholds["channel"].isin(CHANNELS) & thresholds["context"].isin(CONTEXT_LINES)
    thresholds = thresholds[drawn_curve & (thresholds["token_class"] == "all")]
    if "own_skill" not in set(changes["context"]):
        raise ValueError("figure 1 needs change rates under own_skill; diagnose with own_skill and unrelated contexts")
    drawn = {"changes": changes, "thresholds": thresholds, "paper": _paper_rates()}
    if curves is not None and _has(curves):
        drawn |= {"curves": curves, "paper": pd.concat([_paper_rates(), _paper_success()])}
    return save(
        draw(changes, thresholds, curves),
        folder,
        NAME,
        drawn=drawn,
        inputs=inputs,
        script=__name__,
        interval=INTERVAL,
    )


def _own(curves: pd.DataFrame | None) -> pd.DataFrame | None:
    """The curves of this study's arms; those of an ablation have other arms, and no intervals."""
    known = curves is not None and "low" in curves and set(curves["arm"]) <= set(ARMS)
    return curves if known else None


def _has(curves: pd.DataFrame | None) -> bool:
    return curves is not None and not curves.empty


def _paper_rates() -> pd.DataFrame:
    return paper_values("change/")


def _paper_success() -> pd.DataFrame:
    return paper_values("success/webshop/")


def _change_rates(axes: Axes, table: pd.DataFrame) -> None:
    own = table[table["context"] == "own_skill"].set_index(["channel", "token_class"])
    floor = table[table["context"] == "floor"].set_index(["channel", "token_class"])
    for channel, colour in CHANNELS.items():
        for position, token_class in enumerate(CLASSES):
            if (channel, token_class) not in own.index:
                continue
            x, row = position + _OFFSET[channel], own.loc[(channel, token_class)]
            axes.bar(x, row["share"], _BAR * 0.92, color=colour, alpha=0.85, linewidth=0)
            axes.plot([x, x], [row["low"], row["high"]], color="#222222", linewidth=0.9)
            top = np.nanmax([row["share"], row["high"]])
            axes.annotate(
                f"{100 * row['share']:.0f}", (x, top), (0, 2), textcoords="offset points", ha="center", size=5.2
            )
            if (channel, token_class) in floor.index:
                level = floor.loc[(channel, token_class), "share"]
                axes.plot([x - _BAR * 0.46, x + _BAR * 0.46], [level, level], color="#222222", linestyle=(0, (1, 1)))
    for value in _paper_rates().itertuples():
        channel = f"{value.quantity.split('/')[1]}_change"
        position = CLASSES.index("action") if value.quantity.endswith("/action") else 0
        marker = _PAPER_MARKERS.get(value.model, "s")
        # Beside the bars, so that neither hides the other.
        x = position + (1.35 if channel == "output_change" else -1.32) * _BAR
        axes.plot(x, value.low, marker, mfc="white", mec=CHANNELS[channel], ms=3.2, mew=0.8, clip_on=False, zorder=4)
    tokens = own["n_tokens"].groupby(level="token_class").first()
    axes.set_xticks(range(len(CLASSES)), [f"{name}\n{_count(int(tokens.get(name, 0)))}" for name in CLASSES])
    axes.set_xlim(-0.62, len(CLASSES) - 0.42)
    axes.set_ylim(0, 1.08)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel(f"changed tokens\n({int(table['n_trajectories'].max())} trajectories)")
    axes.tick_params(axis="x", length=0)


def _threshold_curves(axes: Axes, table: pd.DataFrame) -> None:
    for (channel, context), line in table.groupby(["channel", "context"], sort=False):
        line = line.sort_values("threshold")
        axes.plot(line["threshold"], line["share"], color=CHANNELS[channel], linestyle=CONTEXT_LINES[context])
        if context == "own_skill":
            axes.fill_between(line["threshold"], line["low"], line["high"], color=CHANNELS[channel], alpha=0.18, lw=0)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=100, numticks=8))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, 1.08)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.margins(x=0)


def _learning_curves(axes: Axes, table: pd.DataFrame) -> None:
    first, last = int(table["step"].min()), int(table["step"].max())
    span = max(last - first, 1)
    ends = table.sort_values("step").groupby("arm").tail(1).sort_values("success")
    for place, end in enumerate(ends.itertuples()):
        curve = table[table["arm"] == end.arm].sort_values("step")
        _, colour, marker = ARMS[end.arm]
        if len(curve) == 1:  # not trained: a level to compare with
            axes.axhline(end.success, color=colour, linewidth=0.9, linestyle=_LEVEL, zorder=1)
        else:
            axes.plot(curve["step"], curve["success"], color=colour, marker=marker, ms=2.8, linewidth=1.1)
        # End points with intervals stand side by side in a strip of their own, ordered by level.
        x = last + span * (0.09 + 0.06 * place)
        axes.plot([x, x], [end.low, end.high], color=colour, linewidth=1.2)
        axes.plot(x, end.success, marker, color=colour, ms=4.4, mec="white", mew=0.5, zorder=3)
    axes.axvline(last + 0.045 * span, color="#CCCCCC", linewidth=0.6)
    paper = _paper_success()
    left = first - 0.05 * span
    for value in paper.itertuples():
        _, colour, marker = ARMS[value.quantity.rpartition("/")[2]]
        axes.plot(left, value.low, marker, mfc="white", mec=colour, ms=3.6, mew=0.8, clip_on=False, zorder=4)
    axes.set_xlim(left, last + span * (0.09 + 0.06 * len(ends)))
    axes.set_ylim(0, min(1.0, np.ceil(10 * max(table["high"].max(), paper["high"].max()) + 0.5) / 10))
    steps = sorted(table["step"].unique())
    axes.set_xticks(
        steps
        if len(steps) <= 6
        else [t for t in MaxNLocator(5, integer=True).tick_values(first, last) if first <= t <= last]
    )
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    tasks, seeds = int(table["n_tasks"].max()), int(ends["n_seeds"].max())
    _title(axes, "c", "success on the fixed panel")
    axes.set_xlabel(f"training step  (right: ends, {seeds} seed{'s' if seeds > 1 else ''})")
    axes.set_ylabel(f"success (n={tasks} tasks)")
    points = table["arm"].value_counts()
    handles = [_arm_handle(arm, trained=bool(points[arm] > 1)) for arm in reversed(ends["arm"].tolist())]
    handles.append(Line2D([], [], marker="s", mfc="white", mec=_GREY, ms=3.4, lw=0, label="PR-OPD paper (WebShop)"))
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.47, 0), borderaxespad=4.6, ncols=2, columnspacing=1.2
    )


def _title(axes: Axes, letter: str, text: str) -> None:
    axes.set_title(text, fontweight="normal")
    axes.annotate(letter, (0, 1), (-12, 6), xycoords="axes fraction", textcoords="offset points", size=9, weight="bold")


def _arm_handle(arm: str, trained: bool) -> Line2D:
    label, colour, marker = ARMS[arm]
    return Line2D([], [], color=colour, marker=marker, ms=3.4, label=label, linestyle="-" if trained else _LEVEL)


def _handles() -> list[Any]:
    paper = {**_PAPER_MARKERS, "both, about 0": "s"}
    return [
        *(Patch(color=colour, alpha=0.85, lw=0, label=CHANNEL_LABELS[name]) for name, colour in CHANNELS.items()),
        *(Line2D([], [], color="#333333", ls=line, label=CONTEXT_LABELS[name]) for name, line in CONTEXT_LINES.items()),
        Line2D([], [], color=_GREY, linewidth=0.7, label="99th percentile, unrelated"),
        *(
            Line2D([], [], marker=marker, mfc="white", mec=_GREY, ms=3.4, lw=0, label=f"paper: {model}")
            for model, marker in paper.items()
        ),
    ]


def _count(number: int) -> str:
    return f"n={number / 1000:.1f}k" if number >= 1000 else f"n={number}"
