"""Figure 2 (right) of SDAR: how far every arm drifts from the reference policy, by step of training.

Open marks, on the upper axis of steps, are published training logs; the one on the right is the paper's highest value.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analysis.reference import paper_curves, paper_values
from figures.figure import SavedFigure, save
from figures.panels import PAPER_MARKERS, paper_handle, paper_mark
from figures.steps import SEEDS, arm_handles, by_step, looks, published_run, signal, thinned
from figures.style import COLUMN, style

NAME = "sdar_fig2_kl"
NEEDS = ("signals",)
INTERVAL = SEEDS
_LOG = "Qwen2.5-3B-Instruct"


def draw(kl: pd.DataFrame, logs: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Draw kl (arm, step, value, low, high), points of published logs, and the paper's highest value."""
    arms = looks(kl["arm"])
    with style():
        figure = Figure(figsize=(COLUMN * 1.25, 2.9), layout="constrained")
        axes = figure.subplots()
        by_step(axes, kl, arms)
        axes.set_yscale("log")
        published_run(axes, logs, arms, float(logs["step"].max()))
        axes.set_ylabel("KL to the reference, k3 (nats a token)")
        for value in paper.itertuples():
            paper_mark(axes, axes.get_xlim()[1], value.low, value.high, PAPER_MARKERS[""])
        handles = [*arm_handles(arms), paper_handle(f"training log, {_LOG}", PAPER_MARKERS[_LOG])]
        handles.append(paper_handle("SDAR paper, highest", PAPER_MARKERS[""]))
        figure.legend(handles=handles, loc="outside lower center", ncols=3, columnspacing=1.2)
    return figure


def write(folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    """Draw and save under `folder`; `inputs` maps the artifacts the tables were made from to their digests.

    Raises: ValueError when no arm logged its distance to the reference.
    """
    kl = signal(tables["signals"], "loss/kl")
    if kl.empty:
        raise ValueError(f"{NAME} needs an arm that logs loss/kl: train one with objective.kl_coefficient above 0")
    drawn = {
        "kl": kl,
        "logs": thinned(paper_curves("kl"), 20, PAPER_MARKERS[_LOG]),
        "paper": paper_values("kl/loss_most"),
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
