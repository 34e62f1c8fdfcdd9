"""Data frames on the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

# Columns in [0, 1] (differences in [-1, 1]), shown in percent.
_RATES = "success low high share a b difference invalid_share final best mean_last_3 without rate detectable"
_POWER = "discordance power_unpaired power_paired detectable_unpaired detectable_paired"
_BOUNDS = "lowest_seed highest_seed wilson_low wilson_high success_low success_high score score_low score_high"
SHARES = {*_RATES.split(), *_POWER.split(), *_BOUNDS.split()}


def print_rows(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """print_table of rows by column."""
    print_table(pd.DataFrame(rows), title)


def print_table(frame: pd.DataFrame, title: str) -> None:
    """The title and aligned columns; rates in percent, NaN as a dash."""
    rows = [[_cell(value, str(name)) for name, value in row.items()] for row in frame.to_dict("records")]
    table = [[str(name) for name in frame.columns], *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print(f"\n{title}")
    for row in table:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _cell(value: Any, column: str) -> str:
    if value is None or value != value:
        return "–"
    if column in SHARES and isinstance(value, float | int):
        return f"{100 * value:.1f} %"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def method_tables(described: Sequence[Mapping[str, Any]]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Methods, as training.method.describe says them: what each needs, and its settings."""
    needs = [method["needs"] for method in described]
    table = pd.DataFrame(described)[["name", "channel"]].assign(
        skill=[need["skill"] for need in needs],
        reader=["the player" if need["seen_by"] == "student" else need["teacher"] for need in needs],
        reads=[" + ".join(_reads(need)) or "nothing" for need in needs],
        step=[method["step"] for method in described],
        paper=[method["paper"] for method in described],
    )
    settings = pd.DataFrame([{"method": method["name"], **own} for method in described for own in method["config"]])
    settings["default"] = [json.dumps(value) for value in settings["default"]]
    return table, settings


def _reads(need: Mapping[str, Any]) -> list[str]:
    """What a method reads of the pair, in words."""
    reads = ["log-probs"] if need["teacher_logprobs"] else []
    reads += [need["divergence"]] if need["divergence"] != "none" else []
    return reads + ([f"states {need['states']} tokens"] if need["states"] != "none" else [])
