"""A figure on disk: PNG, PDF, the numbers drawn as CSV, and a JSON record of where they come from.

Figures are built on matplotlib's Figure class, never through pyplot: no display and no backend is needed, and the
user's own choice of backend stays untouched.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import __version__ as _MATPLOTLIB
from matplotlib.figure import Figure

PUBLISHED = ("paper", "logs")  # drawn tables of other people's numbers, with a column source
# Nothing in a file may depend on the time or the machine: equal tables give equal bytes.
_METADATA: dict[str, dict[str, Any]] = {"png": {"Software": None}, "pdf": {"CreationDate": None}}


@dataclass(frozen=True)
class SavedFigure:
    """Where a figure lies. `record` is the JSON file that names its script, inputs, intervals and references."""

    name: str
    png: Path
    pdf: Path
    data: dict[str, Path]  # table -> CSV
    record: Path


def save(
    figure: Figure,
    folder: Path,
    name: str,
    *,
    drawn: Mapping[str, pd.DataFrame],
    inputs: Mapping[str, str],
    script: str,
    interval: str,
) -> SavedFigure:
    """Write <name>.png, .pdf, one <name>_<table>.csv a drawn table, and <name>.json last.

    Args: drawn (exactly the rows on the page), inputs (artifact path -> digest), script (module that drew it),
    interval (how the error bars were made). The record's references are the sources of published values on the page,
    those of the drawn tables PUBLISHED.
    """
    folder.mkdir(parents=True, exist_ok=True)
    images = {kind: folder / f"{name}.{kind}" for kind in _METADATA}
    for kind, path in images.items():
        temporary = path.with_suffix(f".tmp.{kind}")
        figure.savefig(temporary, format=kind, metadata=_METADATA[kind])
        os.replace(temporary, path)
    data = {table: folder / f"{name}_{table}.csv" for table in drawn}
    for table, path in data.items():
        _write(path, drawn[table].to_csv(index=False, lineterminator="\n"))
    record = {
        "figure": name,
        "script": script,
        "interval": interval,
        "inputs": dict(inputs),
        "references": sorted({text for name in PUBLISHED if name in drawn for text in drawn[name]["source"]}),
        "drawn": {table: {"file": path.name, "rows": len(drawn[table])} for table, path in data.items()},
        "sha256": {path.name: _sha256(path) for path in (*images.values(), *data.values())},
        "matplotlib": _MATPLOTLIB,
    }
    _write(folder / f"{name}.json", json.dumps(record, indent=1) + "\n")
    return SavedFigure(name, images["png"], images["pdf"], data, folder / f"{name}.json")


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
