"""Progress of a long command: a bar in a terminal, plain lines elsewhere, JSON lines for a study that started it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

VARIABLE = "UNDERTOW_PROGRESS"  # path of the file a study reads
_LINE_EVERY = 10.0  # seconds between plain lines

_shown: list[Any] = []  # the terminal's display, while there is one

Report = Callable[..., None]  # report(step, success=0.42): step counts finished units


@contextmanager
def progress(stage: str, total: int) -> Iterator[Report]:
    """Yields report(step, **values), to be called after every finished unit of work.

    Under a study (the variable names a file) each call appends one JSON line {stage, step, total, ...values};
    in a terminal it moves a bar; otherwise it prints a line at most every ten seconds and at the end. What is begun
    inside another one stands below it.
    """
    path = os.environ.get(VARIABLE)
    if path:
        with open(path, "a", encoding="utf-8") as stream:

            def to_file(step: int, **values: float) -> None:
                stream.write(json.dumps({"stage": stage, "step": step, "total": total, **values}) + "\n")
                stream.flush()

            to_file(0)
            yield to_file
    elif sys.stderr.isatty():
        yield from _bar(stage, total)
    else:
        last = time.monotonic()

        def to_lines(step: int, **values: float) -> None:
            nonlocal last
            if step >= total or time.monotonic() - last >= _LINE_EVERY:
                last = time.monotonic()
                print(f"{stage} {step}/{total} {_describe(values)}".rstrip(), file=sys.stderr, flush=True)

        yield to_lines


@contextmanager
def parts() -> Iterator[Callable[[str, int, int, float], None]]:
    """Yields report(stage, step, total, loss) for a command of several stages, one progress after the other; a loss of
    NaN is none."""
    begun: dict[str, Report] = {}
    with ExitStack() as stack:

        def report(stage: str, step: int, total: int, loss: float) -> None:
            if stage not in begun:
                stack.close()
                begun[stage] = stack.enter_context(progress(stage, total))
            begun[stage](step, **({} if loss != loss else {"loss": loss}))

        yield report


def _bar(stage: str, total: int) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with ExitStack() as stack:
        if not _shown:  # a terminal has room for one display
            display = Progress(*columns, TextColumn("{task.fields[values]}"), console=Console(stderr=True))
            _shown.append(stack.enter_context(display))
            stack.callback(_shown.clear)
        bar = _shown[0]
        task = bar.add_task(stage, total=total, values="")
        yield lambda step, **values: bar.update(task, completed=step, values=_describe(values))


def _describe(values: dict[str, float]) -> str:
    formats = {"success": ".1%"}
    return "  ".join(f"{name} {value:{formats.get(name, '.4g')}}" for name, value in values.items())
