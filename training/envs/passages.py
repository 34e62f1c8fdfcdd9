"""Passage files: one JSON object a line, read by line number without holding the file in memory.

{"id": ..., "title": ..., "text": ...}          or, as retrieval servers have it:
{"id": ..., "contents": "\"Title\"\ntext"}      the first line is the title
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Passage:
    """What can be retrieved. `id` is "" where the source gives none."""

    id: str
    title: str
    text: str


def passage_of(record: Mapping[str, Any], where: str) -> Passage:
    """The passage of a JSON object in either form. Raises ValueError naming `where`."""
    text, title = record.get("text"), record.get("title", "")
    if text is None and isinstance(record.get("contents"), str):
        title, _, text = record["contents"].partition("\n")
        title = title.strip().strip('"')
    if not isinstance(text, str) or not isinstance(title, str):
        raise ValueError(f'{where} is no passage; expected an object with "title" and "text", or with "contents"')
    return Passage(str(record.get("id", "")), title, text)


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, JSON object) of each line that is not empty; .gz files are unpacked.

    Raises: ValueError on anything else.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError(f"{path}:{number} is no JSON object; expected one a line")
                yield f"{path}:{number}", record
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read ({error}); bring it into place again") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}:{number} is no JSON object ({error}); the file may be cut") from error


def read_passages(path: Path) -> Iterator[Passage]:
    """All passages of a file, in order."""
    return (passage_of(record, where) for where, record in read_json_lines(path))


class PassageStore:
    """Passages of a plain (not packed) file by line number; the file is mapped, so that processes share its pages."""

    def __init__(self, path: Path, ends: np.ndarray) -> None:
        """Args: ends, of `line_ends`."""
        self._path, self._ends = path, ends
        self._bytes = np.memmap(path, np.uint8, "r")

    def __getitem__(self, row: int) -> Passage:
        start = int(self._ends[row - 1]) if row else 0
        line = self._bytes[start : int(self._ends[row])].tobytes()
        return passage_of(json.loads(line), f"{self._path}:{row + 1}")


def line_ends(path: Path) -> np.ndarray:
    """int64 [lines]: the byte behind each line of a file that is not empty; an empty one belongs to the next."""
    with path.open("rb") as file:
        return np.fromiter(_ends(file), np.int64)


def _ends(lines: Iterable[bytes]) -> Iterator[int]:
    end = 0
    for line in lines:
        end += len(line)
        if line.strip():
            yield end
