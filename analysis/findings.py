"""What a run or a study came to, in a few plain lines: each is one number of a table with its 95 % interval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from analysis.claims import FAILS, HOLDS, MISSING, OPEN

Tables = Mapping[str, pd.DataFrame]
_CHANNELS = {"hidden_change": "the hidden state", "output_change": "the probability"}
MOST = 8  # differences that are told; their table holds all


def findings(tables: Tables, claims: pd.DataFrame | None) -> list[str]:
    """Lines for the top of a report. Args: tables by name (changes, success, curves, differences, gains); claims."""
    found = [] if claims is None else [_claims(claims)]
    found += _changes(tables)
    differences = list(_differences(tables))
    found += differences[:MOST] or list(_success(tables))
    if len(differences) > MOST:
        found.append(f"{len(differences) - MOST} more differences are in their table.")
    return found


def _claims(claims: pd.DataFrame) -> str:
    counts = claims["verdict"].value_counts()
    told = ", ".join(f"{verdict} {counts.get(verdict, 0)}" for verdict in (HOLDS, FAILS, OPEN))
    sentences = claims["id"].nunique()
    missing = claims.loc[claims["verdict"] == MISSING, "id"].nunique()
    readings = len(claims) - counts.get(MISSING, 0)
    return (
        f"Of {sentences} sentences of the papers {sentences - missing} were tested, in {readings} readings (one a "
        f"model or arm): {told}."
    )


def _changes(tables: Tables) -> list[str]:
    if not _has(tables, "changes", "reader", "channel", "token_class", "context", "share", "low", "high"):
        return []
    rows = tables["changes"]
    rows = rows[(rows["context"] == "own_skill") & (rows["token_class"] == "all")]
    lines = []
    for reader, group in rows.groupby("reader", sort=False):
        by_channel = group.drop_duplicates("channel").set_index("channel")
        shares = {name: by_channel.loc[name] for name in _CHANNELS if name in by_channel.index}
        parts = [f"{words} of {_percent(shares[name])}" for name, words in _CHANNELS.items() if name in shares]
        if parts:
            text = f"the own skill changes {' and '.join(parts)} of the tokens"
            lines.append(f"{reader}: {text}, by more than an unrelated text does to 99 % of them.")
    return lines


def _differences(tables: Tables) -> Iterator[str]:
    for name, base, what in (
        ("differences", "base", "success"),
        ("gains", "baseline", "success"),
        ("score_differences", "base", "score"),
    ):
        if not _has(tables, name, base, "arm", "difference", "low", "high", "n_tasks"):
            continue
        for row in tables[name].dropna(subset="difference").to_dict("records"):
            step = f", step {row['step']:.0f}" if "step" in row else ""
            points = f"{_points(row['difference'], signed=True)} points of {what} {_interval(row)}"
            yield f"{row['arm']} against {row[base]}{step}: {points}; {row['n_tasks']} tasks."


def _success(tables: Tables) -> Iterator[str]:
    columns = ("arm", "success", "low", "high", "n_episodes")
    if _has(tables, "success", *columns):
        rows = tables["success"]
    elif _has(tables, "curves", "step", *columns):
        rows = tables["curves"].sort_values("step").groupby("arm", sort=False).tail(1)
    else:
        return
    for row in rows.dropna(subset="success").to_dict("records"):
        yield f"{row['arm']} succeeds in {_points(row['success'])} % {_interval(row)} of {row['n_episodes']} episodes."


def _has(tables: Tables, name: str, *columns: str) -> bool:
    """Whether there is a table that says this; tables of somebody else's making may bear our names."""
    return name in tables and set(columns) <= set(tables[name].columns)


def _percent(row: pd.Series) -> str:
    return f"{_points(row['share'])} % {_interval(row)}"


def _interval(row: Mapping[str, Any] | pd.Series) -> str:
    return f"[{_points(row['low'])}, {_points(row['high'])}]"


def _points(share: float, signed: bool = False) -> str:
    points = round(100 * share, 1) + 0.0  # no minus in front of 0
    return f"{points:{'+' if signed and points else ''}.1f}".replace("-", "−")
