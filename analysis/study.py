"""A study is an ordered graph of stages; each stage is a command in its own process and leaves an output on disk.

Run again, a study skips every stage whose command and inputs are unchanged and whose output is there. A stage that
fails takes only the stages that need it with it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.board import Board, Row
from diagnostics.progress import VARIABLE

_POLL = 0.2  # seconds between two looks at the running stages
_GRACE = 60.0  # seconds stages get to stop cleanly after SIGINT


@dataclass(frozen=True)
class Stage:
    """One command of a study. Its output (a file, or a folder that is not empty) must exist when it ends."""

    name: str
    command: tuple[str, ...]  # argv, run in the caller's working directory
    output: Path
    needs: tuple[str, ...] = ()  # names of earlier stages
    weight: float = 60.0  # expected seconds; only the time left depends on it


def run_study(stages: Sequence[Stage], folder: Path, jobs: int = 1) -> int:
    """Run the stages in order, `jobs` at a time, and show one progress board.

    The folder gets study.json (command, state and digest of each stage), logs/<stage>.log and progress/<stage>.jsonl.
    Args: stages in an order where every need comes first; a stage starts when its needs are done and a place is free.
    Returns: exit code, 0 when all is done, 1 when a stage failed or was skipped, 130 after Ctrl-C (the running stages
    got SIGINT and were waited for; run again to continue).
    Raises: ValueError for a graph that cannot run, or when another process works in the folder.
    """
    _check(stages)
    if jobs < 1:
        raise ValueError(f"study: jobs is {jobs}, expected 1 or more stages at once")
    for part in ("logs", "progress"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    with _lock(folder) as lock, _interruptible(), Board() as board:
        records = _read(folder / "study.json")
        rows = {stage.name: Row(stage.name, stage.weight) for stage in stages}
        running: list[_Running] = []
        try:
            while running or any(row.state == "waiting" for row in rows.values()):
                for stage in stages:
                    if rows[stage.name].state == "waiting" and len(running) < jobs:
                        running += _begin(stage, rows, records, folder, lock)
                for work in [work for work in running if work.over()]:
                    running.remove(work)
                    work.conclude()
                    _settle(work, records, folder)
                board.show(rows.values())
                if running:
                    time.sleep(_POLL)
        except KeyboardInterrupt:
            for work in running:
                work.row.state = "interrupted"
            _stop([work.child for work in running])
            for work in running:
                work.conclude()
                _settle(work, records, folder)
            board.show(rows.values())
            names = ", ".join(work.stage.name for work in running)
            board.say(f"stopped in stage {names}; run the same command again to continue")
            return 130
        finally:
            _stop([work.child for work in running])
        return _conclude(stages, rows, folder, board)


@dataclass
class _Running:
    """A stage's process."""

    stage: Stage
    row: Row
    child: subprocess.Popen[bytes]
    progress: Path
    start: float

    def over(self) -> bool:
        """Look at the stage; whether it has ended."""
        ended = self.child.poll() is not None
        self.row.seconds = time.monotonic() - self.start
        self.row.read(self.progress)
        return ended

    def conclude(self) -> None:
        self.over()
        if self.row.state != "running":
            return
        if self.child.returncode:
            self.row.state, self.row.note = "failed", f"exit code {self.child.returncode}"
        elif not _exists(self.stage.output):
            self.row.state, self.row.note = "failed", f"it left no {self.stage.output}"
        else:
            self.row.state = "done"


def _begin(stage: Stage, rows: dict[str, Row], records: dict[str, Any], folder: Path, lock: int) -> list[_Running]:
    """Start a stage whose needs are settled; nothing where it is kept, skipped, cannot start, or has to wait."""
    row, needs = rows[stage.name], [rows[need] for need in stage.needs]
    if any(need.state in ("waiting", "running") for need in needs):
        return []
    inputs = {need: records.get(need, {}).get("digest") for need in stage.needs}
    blocked = [need.name for need in needs if need.state != "done"]
    if blocked:
        row.state, row.note = "skipped", f"needs {', '.join(blocked)}"
        return []
    if _is_current(stage, records.get(stage.name), inputs):
        row.state, row.note = "done", "kept"
        return []
    record: dict[str, Any] = {"command": list(stage.command), "inputs": inputs, "output": str(stage.output)}
    records[stage.name] = record | {"state": "running", "log": str(_log(folder, stage))}
    _write(folder / "study.json", records)  # a study that is killed now finds no "done" next time
    progress = folder / "progress" / f"{stage.name}.jsonl"
    progress.unlink(missing_ok=True)
    with open(_log(folder, stage), "ab") as log:
        log.write(f"$ {' '.join(stage.command)}\n".encode())
        log.flush()
        try:
            # A group of its own: Ctrl-C in the terminal reaches this process alone, which then stops the stage. The
            # stage inherits the lock, so that nobody else works in the folder if this process is killed before it.
            child = subprocess.Popen(
                stage.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, VARIABLE: str(progress.resolve())},
                process_group=0,
                pass_fds=(lock,),
            )
        except OSError as error:
            row.state, row.note = "failed", f"cannot start ({error})"
            return []
    row.state = "running"
    return [_Running(stage, row, child, progress, time.monotonic())]


def _settle(work: _Running, records: dict[str, Any], folder: Path) -> None:
    """Write down how a stage ended."""
    digest = output_digest(work.stage.output) if work.row.state == "done" else None
    records[work.stage.name] |= {"state": work.row.state, "seconds": round(work.row.seconds, 1), "digest": digest}
    _write(folder / "study.json", records)


def output_digest(output: Path) -> str:
    """sha256 of what an output holds: the digests in its manifests where it holds artifacts (they cover all other
    files, and neither time nor machine), otherwise every file in it."""
    manifests = sorted(output.rglob("manifest.json"))
    files = manifests or ([output] if output.is_file() else sorted(p for p in output.rglob("*") if p.is_file()))
    sha = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest = (json.loads(content).get("digest") if manifests else None) or hashlib.sha256(content).hexdigest()
        sha.update(f"{path.relative_to(output.parent)}:{digest}\n".encode())
    return sha.hexdigest()


def _stop(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """SIGINT to every stage's process group, then wait; SIGKILL after the grace time or a second Ctrl-C."""
    children = [child for child in children if child.poll() is None]
    for child in children:
        os.killpg(child.pid, signal.SIGINT)
    end = time.monotonic() + _GRACE
    for child in children:
        try:
            child.wait(max(end - time.monotonic(), 0))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _conclude(stages: Sequence[Stage], rows: dict[str, Row], folder: Path, board: Board) -> int:
    for stage in stages:
        row = rows[stage.name]
        if row.state == "failed":
            board.say(f"stage {stage.name} failed: {row.note}; see {_log(folder, stage)}")
        elif row.state == "skipped":
            board.say(f"stage {stage.name} was skipped: {row.note}")
    return int(any(row.state != "done" for row in rows.values()))


def _is_current(stage: Stage, record: dict[str, Any] | None, inputs: dict[str, str | None]) -> bool:
    return (
        record is not None
        and record["state"] == "done"
        and record["command"] == list(stage.command)
        and record["inputs"] == inputs
        and _exists(stage.output)
    )


def _exists(output: Path) -> bool:
    return output.is_file() or (output.is_dir() and any(output.iterdir()))


def _log(folder: Path, stage: Stage) -> Path:
    return folder / "logs" / f"{stage.name}.log"


def _check(stages: Sequence[Stage]) -> None:
    seen: set[str] = set()
    for stage in stages:
        if stage.name in seen:
            raise ValueError(f"study: two stages are named {stage.name!r}")
        missing = [need for need in stage.needs if need not in seen]
        if missing:
            raise ValueError(f"study: stage {stage.name!r} needs {missing[0]!r}, which is no earlier stage")
        seen.add(stage.name)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"study: {path} is not valid JSON ({error}); remove it to start the study anew") from None


def _write(path: Path, records: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


@contextmanager
def _lock(folder: Path) -> Iterator[int]:
    """Hold the folder's lock; a stage left over from a killed study holds it too."""
    with open(folder / "study.lock", "w", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"study: another process works in {folder}; wait for it or stop it first") from None
        yield stream.fileno()


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM stops a study as Ctrl-C does, so that no stage is left behind; and SIGINT does even where a shell that
    started the study in the background had it ignored, which the stages would inherit."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
