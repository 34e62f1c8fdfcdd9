"""The progress board of a study: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

_MARKS = {"waiting": "·", "running": "▸", "done": "✓", "failed": "✗", "skipped": "–", "interrupted": "■"}
_STYLES = {"running": "bold cyan", "done": "green", "failed": "bold red", "skipped": "yellow", "interrupted": "yellow"}
_LINE_EVERY = 30.0  # seconds between plain lines about a running stage


@dataclass
class Row:
    """What the board knows about one stage; the only mutable record of a study."""

    name: str
    weight: float  # expected seconds
    state: str = "waiting"
    note: str = ""
    part: str = ""  # name the stage gives to what it is doing
    step: int = 0
    total: int = 0
    success: float | None = None  # in [0, 1]
    seconds: float = 0.0

    def read(self, progress: Path) -> None:
        """Take the last complete line of a stage's progress file."""
        try:
            lines = progress.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return
        if lines:
            last = json.loads(lines[-1])
            self.part, self.step, self.total = last["stage"], last["step"], last["total"]
            self.success = last.get("success", self.success)

    @property
    def fraction(self) -> float:
        """Share of the stage's work that is done, in [0, 1]; a running stage without steps goes by its weight."""
        if self.state == "done":
            return 1.0
        if self.total:
            return min(self.step / self.total, 1.0)
        return min(self.seconds / (self.weight + self.seconds), 0.95) if self.seconds else 0.0


def time_left(rows: Collection[Row]) -> float:
    """Expected seconds until the last stage ends: remaining weight times the pace measured so far.

    The pace is (seconds spent + w0) / (weight worked off + w0), w0 = 30 s, so that it starts at 1.
    """
    ran = [row for row in rows if row.seconds > 0]
    prior = 30.0
    pace = (sum(row.seconds for row in ran) + prior) / (sum(row.weight * row.fraction for row in ran) + prior)
    open_rows = [row for row in rows if row.state in ("waiting", "running")]
    return pace * sum(row.weight * (1 - row.fraction) for row in open_rows)


class Board:
    """Shows rows; `say` prints a sentence that stays."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._shown: dict[str, tuple[str, float]] = {}  # plain mode: state and time of a stage's last line

    def __enter__(self) -> Board:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, rows: Collection[Row]) -> None:
        if self._live:
            self._live.update(_table(rows), refresh=True)
            return
        for row in rows:
            state, when = self._shown.get(row.name, ("waiting", 0.0))
            if row.state == "waiting" or (row.state == state and row.state != "running"):
                continue
            if row.state != state or time.monotonic() - when >= _LINE_EVERY:
                self._shown[row.name] = (row.state, time.monotonic())
                self.say("  ".join(text for text in (*_cells(row), f"left {_clock(time_left(rows))}") if text))

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _table(rows: Collection[Row]) -> Table:
    left = f"time left about {_clock(time_left(rows))}"
    table = Table(box=None, header_style="dim", caption=left, caption_justify="left")
    for column in ("stage", "", "step", "success", "time", ""):
        table.add_column(column, justify="right" if column in ("step", "success", "time") else "left")
    for row in rows:
        table.add_row(*_cells(row), style=_STYLES.get(row.state, "dim"))
    return table


def _cells(row: Row) -> tuple[str, str, str, str, str, str]:
    return (
        f"{_MARKS[row.state]} {row.name}",
        row.state if row.state != "running" else row.part or "running",
        f"{row.step}/{row.total}" if row.total else "",
        f"{row.success:.1%}" if row.success is not None else "",
        _clock(row.seconds) if row.seconds else "",
        row.note,
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
