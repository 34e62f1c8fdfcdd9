"""A data frame on the terminal."""

from __future__ import annotations

from typing import Any

import pandas as pd

SHARES = ("success", "low", "high", "share", "a", "b", "difference", "invalid_share")


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
