"""Warm-up of PR-OPD: how much GRPO must come before the alignment?

(a) Paired gain over GRPO that went on from the same checkpoint for as many steps, from an early, a middle and a late
checkpoint of Stage I. (b) Paired difference to GRPO at the end, of alignment from each checkpoint on to the end. Hollow
marks: the paper's gains, labelled with its steps of GRPO + alignment.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from analysis.reference import paper_values
from figures.figure import SavedFigure, save
from figures.panels import COLOURS, GREY, MARKERS, PAPER_MARKERS, paper_handle, paper_mark, title
from figures.style import ARMS, PAGE, style

NAME = "fig_warmup"
NEEDS = ("differences",)
INTERVAL = "95 %, percentile bootstrap over training seeds and tasks of the paired differences"
CHECKPOINTS = ("early", "middle", "late")
_PAPER = {"100": "early", "120": "middle", "140": "late"}  # the paper's steps of GRPO, as the study takes them
_TO_END = "_to_end"
_STEP = 0.16  # between arms that start at one checkpoint


def draw(gains: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw the rows of `warmup_gains` and the published gains with their checkpoint."""
    looks = _looks(list(dict.fromkeys(gains["method"])))
    both = bool((gains["to"] == "end").any())
    with style():
        figure = Figure(figsize=(PAGE if both else 0.6 * PAGE, 2.5), layout="constrained")
        panels = figure.subplots(1, 2 if both else 1, squeeze=False, sharey=True)[0]
        for axes, end in zip(panels, ("same steps", "end"), strict=False):
            mine = gains[gains["to"] == end]
            methods = [method for method in looks if method in set(mine["method"])]
            for place, method in enumerate(methods):
                _, colour, marker = looks[method]
                for row in mine[mine["method"] == method].itertuples():
                    x = CHECKPOINTS.index(row.checkpoint) + _STEP * (place - (len(methods) - 1) / 2)
                    axes.plot([x, x], [row.low, row.high], color=colour, linewidth=1.3)
                    axes.plot(x, row.difference, marker, color=colour, ms=4.4, zorder=3)
            _axis(axes, mine)
        for place, value in enumerate(paper.itertuples()):
            before = list(paper["checkpoint"][:place]).count(value.checkpoint)
            x = CHECKPOINTS.index(value.checkpoint) + 0.28 + 0.16 * before
            paper_mark(panels[0], x, value.low, value.high, PAPER_MARKERS.get(value.model, "s"))
            panels[0].annotate(
                value.steps, (x, value.high), (0, 4), textcoords="offset points", ha="center", size=5, color=GREY
            )
        title(panels[0], "a", "gain over GRPO from the same checkpoint")
        if both:
            title(panels[1], "b", f"on to the end, over {' / '.join(_bases(gains))}")
        panels[0].set_ylabel("paired difference of success")
        panels[0].margins(y=0.12)
        panels[0].yaxis.set_major_formatter(PercentFormatter(1.0))
        panels[0].yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        figure.legend(handles=_handles(looks, paper), loc="outside lower center", ncols=3, columnspacing=1.4)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests.

    Raises: ValueError when the study compares no arm with GRPO from the same checkpoint.
    """
    gains = warmup_gains(tables.get("differences", pd.DataFrame(columns=["arm", "base"])))
    if gains.empty or "same steps" not in set(gains["to"]):
        raise ValueError(
            "the warm-up figure needs arms named <x>_early, <x>_middle or <x>_late against grpo of the same "
            "checkpoint; run the ready study warmup"
        )
    drawn = {"gains": gains, "paper": _published()}
    return save(
        draw(**drawn),
        folder,
        NAME,
        drawn=drawn,
        inputs=inputs,
        script=__name__,
        interval=INTERVAL,
    )


def warmup_gains(differences: pd.DataFrame) -> pd.DataFrame:
    """The differences of a warm-up study with columns method, checkpoint, to ("same steps" or "end") in front.

    An arm <method>_<checkpoint> against grpo_<same checkpoint> is a gain after equal steps;
    <method>_<checkpoint>_to_end against any is one at the end, and so is the last checkpoint's arm, whose equal steps
    lead there.
    """
    rows = []
    for row in differences.to_dict("records"):
        name, end = row["arm"].removesuffix(_TO_END), row["arm"].endswith(_TO_END)
        method, _, checkpoint = name.rpartition("_")
        if checkpoint not in CHECKPOINTS or not method:
            continue
        place = {"method": method, "checkpoint": checkpoint}
        if end:
            rows.append({**place, "to": "end", **row})
        elif row["base"] == f"grpo_{checkpoint}":
            rows.append({**place, "to": "same steps", **row})
    continued = {(row["method"], row["base"]) for row in rows if row["to"] == "end"}
    last = [row for row in rows if row["to"] == "same steps" and (row["method"], row["base"]) in continued]
    return pd.DataFrame(rows + [{**row, "to": "end"} for row in last])


def _published() -> pd.DataFrame:
    paper = paper_values("gain/")
    steps = paper["quantity"].str.extract(r"_(\d+)_(\d+)$")
    return paper.assign(checkpoint=steps[0].map(_PAPER), steps=steps[0] + "+" + steps[1])


def _axis(axes: Axes, gains: pd.DataFrame) -> None:
    axes.axhline(0, color="#333333", linewidth=0.7, zorder=1)
    axes.set_xticks(range(len(CHECKPOINTS)), CHECKPOINTS)
    axes.set_xlim(-0.5, len(CHECKPOINTS) - 0.3)
    sizes = [f"{int(gains['n_tasks'].max())} tasks"] if "n_tasks" in gains else []
    if "n_training_seeds" in gains:
        sizes.append(f"{int(gains['n_training_seeds'].max())} training seed(s)")
    axes.set_xlabel("\n".join(["checkpoint of Stage I", ", ".join(sizes)]))
    axes.tick_params(axis="x", length=0)


def _bases(gains: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(gains.loc[gains["to"] == "end", "base"]))


def _looks(methods: list[str]) -> dict[str, tuple[str, str, str]]:
    return {
        method: ARMS.get(method, (method, COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]))
        for index, method in enumerate(methods)
    }


def _handles(looks: Mapping[str, tuple[str, str, str]], paper: pd.DataFrame) -> list[Any]:
    ours = [
        Line2D([], [], color=colour, marker=marker, ms=4, label=f"{label}, 95 %")
        for label, colour, marker in looks.values()
    ]
    models = dict.fromkeys(paper["model"])
    return ours + [paper_handle(f"PR-OPD paper: {model}, WebShop", PAPER_MARKERS.get(model, "s")) for model in models]
