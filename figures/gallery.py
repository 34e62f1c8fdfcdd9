"""Every figure by its module, in the order of a report, and one function that draws all there are tables for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd

from figures.figure import SavedFigure

FIGURES = (
    "fig_invisible_advantage",
    "fig_controls",
    "fig_probes",
    "fig_cka",
    "fig_main_table",
    "fig_ablation",
    "fig_alignment",
    "fig_warmup",
    "fig_learning",
    "fig_turn_kl",
    "fig_kl",
    "fig_gap",
    "fig_gate",
    "fig_weights_dynamics",
    "fig_unseen",
    "fig_perturbation",
    "fig_agreement",
    "fig_thresholds",
    "fig_tokens",
    "fig_audit",
    "fig_patching",
)


def draw_all(
    folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame], only: str = ""
) -> tuple[list[SavedFigure], dict[str, str]]:
    """Draw the figures that the tables are enough for.

    Args: inputs, the artifacts the tables were made from -> their digests; only, the beginning of a figure's name
    ("": all of them).
    Returns: what was saved under `folder`, and for every other figure why there is nothing to draw.
    Raises: ValueError when no figure's name begins with `only`.
    """
    modules = {module.NAME: module for module in (import_module(f"figures.{name}") for name in FIGURES)}
    chosen = {name: module for name, module in modules.items() if name.startswith(only)}
    if not chosen:
        near = difflib.get_close_matches(only, modules, n=1, cutoff=0)
        raise ValueError(f"there is no figure {only!r} (nearest: {near[0]!r}); figures are {', '.join(modules)}")
    saved, missing = [], {}
    for name, module in chosen.items():
        try:
            saved.append(_draw(module, folder, inputs, tables))
        except ValueError as reason:
            missing[name] = str(reason)
    return saved, missing


def _draw(module: Any, folder: Path, inputs: Mapping[str, str], tables: Mapping[str, pd.DataFrame]) -> SavedFigure:
    absent = [name for name in module.NEEDS if name not in tables]
    if absent:
        raise ValueError(f"there is no table {absent[0]!r}")
    drawn: SavedFigure = module.write(folder, inputs, tables)
    return drawn
