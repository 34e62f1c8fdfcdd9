"""A report as one HTML file: templates of analysis/pages, figures as data, no other file and no network."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from analysis.card import Card
from analysis.claims import FAILS, HOLDS, MISSING, OPEN, count_table
from analysis.plain import SHARES
from analysis.token_page import View, script_json

PAGES = Path(__file__).parent / "pages"
MARKS = {HOLDS: "✓", FAILS: "✗", OPEN: "?", MISSING: "–"}  # a verdict is never told by its colour alone
_ROWS = 60  # of a table on the page; curves have hundreds and are drawn


@dataclass(frozen=True)
class Page:
    """What a report shows; parts that are empty are left out."""

    title: str
    found: Sequence[str] = ()  # what was found, a line each
    warnings: Sequence[str] = ()
    claims: pd.DataFrame | None = None  # columns of analysis.claims.COLUMNS
    figures: Sequence[Path] = ()  # PNG files, their records (.json) beside them
    tokens: Sequence[View] = ()
    left_out: Sequence[str] = ()  # readers whose tokens are not on the page
    training: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    samples: Sequence[tuple[str, str]] = ()  # (where from, teacher's prompt)
    card: Card | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    inputs: Sequence[tuple[str, str, str]] = ()  # (kind, path, digest)


def write_report(path: Path, page: Page) -> Path:
    """Write the page. Returns the path."""
    environment = Environment(
        loader=FileSystemLoader(PAGES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["cell"] = cell
    environment.filters["mark"] = MARKS.get
    html = environment.get_template("page.html").render(
        page=page,
        figures=[_figure(figure) for figure in page.figures],
        training=[_table(name, frame) for name, frame in page.training.items()],
        tables=[_table(name, frame) for name, frame in page.tables.items()],
        counts=None if page.claims is None else _table("", count_table(page.claims)),
        measured=[] if page.claims is None else _rows(page.claims[page.claims["verdict"] != MISSING]),
        missing=[] if page.claims is None else _rows(page.claims[page.claims["verdict"] == MISSING]),
        tokens=script_json(page.tokens),
        runs=None if page.card is None or page.card.runs.empty else _table("", page.card.runs),
        versions=None if page.card is None else _table("", page.card.versions),
        config=json.dumps(page.config, indent=1, ensure_ascii=False) if page.config else "",
    )
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(html, encoding="utf-8")
    os.replace(temporary, path)
    return path


def caption(record: Mapping[str, Any]) -> str:
    """One line of what a figure's record says: how its intervals were made, whose values it shows, what drew it."""
    papers: dict[str, list[str]] = {}
    for source in dict.fromkeys(record.get("references", ())):
        paper, closing, place = str(source).removesuffix(".").partition("), ")
        papers.setdefault(paper + closing.rstrip(" "), []).append(place)
    marks = "; ".join(f"{paper} {', '.join(places)}".strip() for paper, places in papers.items())
    parts = [f"Interval: {record['interval']}." if record.get("interval") else ""]
    parts += [f"Marks of papers: {marks}." if marks else ""]
    if "script" in record:
        count = len(record.get("inputs", ()))
        parts.append(f"Drawn by {record['script']} from {count} artifact{'' if count == 1 else 's'}.")
    return " ".join(part for part in parts if part)


def cell(value: Any, column: str) -> str:
    """A value of a table: rates in percent, a dash where there is none."""
    if value is None or (isinstance(value, float) and value != value):
        return "–"
    if column in SHARES and isinstance(value, int | float):
        return f"{100 * value:.1f} %"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(name: str, frame: pd.DataFrame) -> dict[str, Any]:
    rows = frame.head(_ROWS).to_numpy(dtype=object)
    return {"name": name, "columns": [str(column) for column in frame.columns], "rows": rows, "length": len(frame)}


def _rows(claims: pd.DataFrame) -> list[dict[str, Any]]:
    """Claims with their numbers as text."""
    return [{**row, "value": _number(row), "published": _published(row)} for row in claims.to_dict("records")]


def _number(row: Mapping[str, Any]) -> str:
    if row["value"] is None or row["value"] != row["value"]:
        return "–"
    bounds = f" [{row['low']:.3g}, {row['high']:.3g}]" if row["low"] == row["low"] else " (no interval)"
    return f"{row['value']:.3g}{bounds}".replace("-", "−")


def _published(row: Mapping[str, Any]) -> str:
    low, high = row["published_low"], row["published_high"]
    if low != low:
        return "–"
    return (f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}").replace("-", "−")


def _figure(path: Path) -> dict[str, str]:
    record = path.with_suffix(".json")
    told = caption(json.loads(record.read_text(encoding="utf-8"))) if record.is_file() else ""
    return {"name": path.stem, "caption": told, "image": base64.b64encode(path.read_bytes()).decode()}
