"""One episode token by token: gap, hidden change of every block, and the weight of every method; a strip a reader.

Shown are the runs of tokens around the largest gaps under the own skill, at most 60 tokens, in the order of reading;
the whole episode is in the table `tokens`.
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
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from figures.fig_cka import OWN
from figures.figure import SavedFigure, save
from figures.panels import title
from figures.style import PAGE, style

NAME = "fig_tokens"
NEEDS = ("tokens", "token_contexts")
INTERVAL = "none: single tokens of one episode"
SHOWN, RUN = 60, 20  # tokens that are shown at most, and of one run
WEIGHT, CHANGE = "weight/", "hidden_change/"  # columns, in front of a method's name and of a block's number
CLASSES = {"think": "#0072B2", "action": "#D55E00", "format": "#777777"}
_BEFORE = 7  # tokens of a run that stand in front of the one with the large gap
_TEXT = 14  # characters of a token that are shown


def draw(tokens: pd.DataFrame, episodes: pd.DataFrame) -> Figure:
    """Draw the tokens that `selected` chose, and what their episodes were about (a row a reader)."""
    readers = list(dict.fromkeys(tokens["reader"]))
    methods = [column for column in tokens if column.startswith(WEIGHT) and tokens[column].notna().any()]
    blocks = sum(column.startswith(CHANGE) for column in tokens)
    heights = [1.0, min(0.3 + 0.12 * blocks, 2.2), 0.16 * max(len(methods), 1)]
    with style():
        figure = Figure(figsize=(PAGE, (1.15 + sum(heights)) * len(readers)), layout="constrained")
        grid = figure.subplots(3 * len(readers), 1, squeeze=False, height_ratios=heights * len(readers))[:, 0]
        for block, reader in zip(np.split(grid, len(readers)), readers, strict=True):
            mine = tokens[tokens["reader"] == reader].reset_index(drop=True)
            _strip(block, mine, methods)
            about = episodes[episodes["reader"] == reader].iloc[0]
            outcome = "solved" if about["success"] else "not solved"
            title(block[0], "", f"{reader}: “{about['description'].strip()}”, {outcome}")
        classes = [Patch(color=colour, label=kind) for kind, colour in CLASSES.items()]
        said = f"token class (shown: at most {SHOWN} tokens, around the largest gaps of one episode)"
        figure.legend(handles=classes, loc="outside lower center", ncols=3, title=said, title_fontsize=6.2)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests.

    Args: tables, those of NEEDS. Raises: ValueError when no token was read under the own skill.
    """
    tokens, contexts = (tables[name][tables[name]["context"] == OWN] for name in NEEDS)
    if tokens.empty:
        raise ValueError(f"the token view needs tokens under {OWN}; diagnose with the measure tokens and that context")
    parts = [selected(mine) for _, mine in tokens.groupby("reader", sort=False)]
    chosen = pd.concat(parts, ignore_index=True)
    shown = contexts.merge(chosen[["reader", "trajectory"]].drop_duplicates())
    drawn = {"tokens": chosen, "episodes": shown}
    return save(draw(**drawn), folder, NAME, drawn=drawn, inputs=inputs, script=__name__, interval=INTERVAL)


def selected(tokens: pd.DataFrame) -> pd.DataFrame:
    """The tokens of the first episode that are shown, with the column `run` (0, 1, 2 in the order of reading).

    From the largest |gap| down, the tokens around it in its turn are taken where none of them is taken yet and there
    is room for them: at most RUN tokens a run, SHOWN in all. Hidden changes become one column a block.
    Args: rows of one reader under one context.
    """
    episode = tokens[tokens["trajectory"] == tokens["trajectory"].iloc[0]].sort_values("index").reset_index(drop=True)
    turn, taken = episode["turn"].to_numpy(), np.zeros(len(episode), dtype=bool)
    runs: list[slice] = []
    for place in np.argsort(-episode["gap"].abs().fillna(0).to_numpy(), kind="stable"):
        same = np.flatnonzero(turn == turn[place])
        start = max(min(place - _BEFORE, same[-1] + 1 - RUN), same[0])
        run = slice(start, min(start + RUN, same[-1] + 1))
        if taken.sum() + run.stop - run.start <= SHOWN and not taken[run].any():
            runs.append(run)
            taken[run] = True
    runs.sort(key=lambda run: run.start)
    shown = pd.concat([episode[run].assign(run=number) for number, run in enumerate(runs)], ignore_index=True)
    change = np.stack([np.asarray(values, dtype=float) for values in shown["hidden_change"]])
    columns = {f"{CHANGE}{block}": values for block, values in enumerate(change.T)}
    return shown.drop(columns="hidden_change").assign(**columns)


def _strip(block: Any, tokens: pd.DataFrame, methods: list[str]) -> None:
    """Gap, hidden change and weights over one axis of tokens, runs set apart by an empty place."""
    gaps, states, weights = block
    places = np.arange(len(tokens)) + tokens["run"].to_numpy()
    width = int(places[-1]) + 1
    colours = [CLASSES[kind] for kind in tokens["token_class"]]
    gaps.bar(places, tokens["gap"], width=0.8, color=colours)
    gaps.axhline(0, color="#333333", linewidth=0.5)
    gaps.set_ylabel("gap (nats)")
    for number, run in tokens.groupby("run"):
        middle = places[tokens["run"] == number].mean()
        gaps.annotate(
            f"turn {int(run['turn'].iloc[0]) + 1}, from token {int(run['index'].iloc[0]) + 1}", (middle, 0),
            (0, -3), xycoords=("data", "axes fraction"), textcoords="offset points", ha="center", va="top", size=5.8,
        )  # fmt: skip
    measured = tokens.filter(like=CHANGE).dropna(axis=1, how="all")
    change = np.full((measured.shape[1], width), np.nan)
    change[:, places] = measured.to_numpy().T
    _heat(states, change, "cividis", "1 − cos", float(np.nanmax(change)) or 1.0)
    states.invert_yaxis()
    states.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    states.set_ylabel("block")
    given = np.full((max(len(methods), 1), width), np.nan)
    for row, method in enumerate(methods):
        given[row, places] = tokens[method]
    _heat(weights, given, "viridis", "weight", max(1.0, float(np.nanmax(given, initial=1.0))))
    weights.set_yticks(range(len(methods)), [method.removeprefix(WEIGHT) for method in methods])
    weights.set_xticks(places, [_shown(text) for text in tokens["text"]], rotation=90, size=4.8, family="monospace")
    for label, colour in zip(weights.get_xticklabels(), colours, strict=True):
        label.set_color(colour)
    for axes in block:
        axes.set_xlim(-0.7, width - 0.3)
        axes.grid(axes is gaps, axis="y")
        if axes is not weights:
            axes.set_xticks([])


def _heat(axes: Axes, values: np.ndarray, colours: str, label: str, largest: float) -> None:
    colourmap = colormaps[colours].with_extremes(bad="white")
    image = axes.imshow(
        np.ma.masked_invalid(values), aspect="auto", vmin=0, vmax=largest, cmap=colourmap, interpolation="nearest"
    )
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01, aspect=8, fraction=0.02, ticks=[0, largest])
    bar.ax.set_yticklabels(["0", f"{largest:.2g}"])
    bar.set_label(label, size=6)
    bar.outline.set_visible(False)


def _shown(text: str) -> str:
    """A token as a label: white space made visible, no dollar signs (they would start a formula), cut when long."""
    visible = "".join(sign if sign.isprintable() else "·" for sign in text.replace("\n", "↵").replace(" ", "␣"))
    visible = visible.replace("$", r"\$")
    return visible if len(visible) <= _TEXT else visible[: _TEXT - 1] + "…"
