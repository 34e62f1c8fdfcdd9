"""Game records: reading the official ALFWorld folders and the packed form, and bringing them into place.

Official form: json_2.1.1/<split>/<task>/<trial>/ with game.tw-pddl and traj_data.json. Packed form:
games_<split>.jsonl.xz, one game a line, beside the domain (alfred.pddl) and the grammar (alfred_template.twl2) that
all its games share. `Task.source` is the official folder, or "<packed file>#<line>".
"""

from __future__ import annotations

import json
import lzma
import os
import re
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from training.envs.base import Task

SPLITS = ("train", "valid_seen", "valid_unseen")
DOMAIN, GRAMMAR = "alfred.pddl", "alfred_template.twl2"
OFFICIAL = "json_2.1.1"
_GOAL = re.compile(r"Your task is to: ((?:[^\"\\]|\\.)*?)\\?\"")


@lru_cache(8)
def _packed_lines(path: str, stamp: int) -> tuple[bytes, ...]:
    """All lines of a packed file, each deflated by itself (8 kB a game), so that any of them is quick to read."""
    try:
        with lzma.open(path) as file:
            return tuple(zlib.compress(line, 1) for line in file)
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{path}: damaged xz file ({error}); bring it into place again") from error


def _record(path: str, line: int) -> dict[str, Any]:
    try:
        lines = _packed_lines(path, os.stat(path).st_mtime_ns)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file with packed games") from None
    if not 0 <= line < len(lines):
        raise ValueError(f"{path}#{line}: the file has {len(lines)} games, counted from 0")
    return json.loads(zlib.decompress(lines[line]))


@lru_cache(8)
def _shared_texts(folder: str) -> tuple[str, str]:
    missing = [name for name in (DOMAIN, GRAMMAR) if not Path(folder, name).is_file()]
    if missing:
        raise ValueError(f"{folder}: {missing[0]} is missing; packed games need their domain and grammar beside them")
    return Path(folder, DOMAIN).read_text(encoding="utf-8"), Path(folder, GRAMMAR).read_text(encoding="utf-8")


def game_data(record: Mapping[str, Any], folder: str | Path) -> dict[str, Any]:
    """What the engine loads, from one packed record and the domain and grammar in `folder`."""
    domain, grammar = _shared_texts(str(folder))
    goal = json.dumps(record["task_desc"])[1:-1]  # it stands inside a JSON text of the grammar
    unknown = "UNKNOWN GOAL." if "UNKNOWN GOAL." in grammar else "UNKNOWN GOAL"  # a task_desc has its own full stop
    return {
        "pddl_domain": domain,
        "grammar": grammar.replace(unknown, goal),
        "pddl_problem": record["pddl_problem"],
        "walkthrough": record["walkthrough"],
        "solvable": True,
    }


def read_record(task: Task) -> dict[str, Any]:
    """The game of a task: pddl_domain, grammar, pddl_problem, walkthrough, solvable.

    Raises: ValueError naming the file, where it cannot be read.
    """
    path, _, line = task.source.rpartition("#")
    if path and line.isdigit():
        return game_data(_record(path, int(line)), Path(path).parent)
    return _official_game(Path(task.source))


def _official_game(folder: Path) -> dict[str, Any]:
    path = folder / "game.tw-pddl"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable game file ({error})") from error


def load_tasks(data_dir: str | Path, split: str) -> list[Task]:
    """All playable tasks of a split, in the order of the packed file, or sorted by id for official folders.

    Args: data_dir: a folder in either form. split: train, valid_seen or valid_unseen.
    Raises: ValueError where the folder holds no game of the split.
    """
    folder = Path(data_dir)
    packed = folder / f"games_{split}.jsonl.xz"
    if packed.is_file():
        tasks = list(_packed_tasks(packed))
    else:
        tasks = sorted(_official_tasks(folder, split), key=lambda task: task.id)
    if not tasks:
        raise ValueError(
            f"{folder}: no games of split {split!r}; expected {packed.name} there, "
            f"or {OFFICIAL}/{split}/<task>/<trial>/game.tw-pddl"
        )
    return tasks


def _packed_tasks(path: Path) -> Iterator[Task]:
    lines = _packed_lines(str(path), path.stat().st_mtime_ns)
    for number, line in enumerate(lines):
        record = json.loads(zlib.decompress(line))
        yield Task(
            id=f"{record['task']}/{record['trial']}",
            env=record.get("env", "alfworld"),
            split=record["split"],
            task_type=record["task"].split("-", 1)[0],
            description=record["task_desc"],
            source=f"{path}#{number}",
        )


def _official_tasks(folder: Path, split: str) -> Iterator[Task]:
    root = folder / OFFICIAL / split
    for path in root.glob("*/*/game.tw-pddl"):
        trial = path.parent
        name = f"{trial.parent.name}/{trial.name}"
        if "movable" in name or "Sliced" in name:  # not played by ALFWorld either
            continue
        text = path.read_text(encoding="utf-8")
        record = json.loads(text)
        if not record.get("solvable", False):
            continue
        yield Task(name, "alfworld", split, trial.parent.name.split("-", 1)[0], goal_sentence(record), str(trial))


def goal_sentence(game: Mapping[str, Any]) -> str:
    """The task sentence that the game's own grammar writes."""
    found = _GOAL.search(game["grammar"])
    return found.group(1) if found else ""


def import_games(source: str | Path, destination: str | Path) -> dict[str, int]:
    """Bring games (a folder or a .zip/.tar archive, in either form) into `destination`; returns games per split.

    Raises: ValueError where the source holds no games; then the destination is left as it was.
    """
    source, destination = Path(source), Path(destination)
    if source.is_dir():
        return _import_folder(source, destination)
    if not source.is_file():
        raise ValueError(f"{source}: no such file or folder")
    with tempfile.TemporaryDirectory(dir=_parent(destination)) as scratch:
        if zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive:
                archive.extractall(scratch)
        elif tarfile.is_tarfile(source):
            with tarfile.open(source) as archive:
                archive.extractall(scratch, filter="data")
        else:
            raise ValueError(f"{source}: neither a folder nor a zip or tar archive")
        return _import_folder(Path(scratch), destination)


def _parent(destination: Path) -> Path:
    destination.mkdir(parents=True, exist_ok=True)
    return destination


def _find(source: Path) -> tuple[Path, list[str]]:
    """The folder that holds games (the source itself or below) and its entries to copy."""
    for marker in [OFFICIAL, *(f"games_{split}.jsonl.xz" for split in SPLITS)]:
        for found in [source / marker, *sorted(source.rglob(marker))]:
            if found.exists():
                root = found.parent
                names = [OFFICIAL, DOMAIN, GRAMMAR, *(f"games_{split}.jsonl.xz" for split in SPLITS)]
                return root, [name for name in names if (root / name).exists()]
    raise ValueError(f"{source}: holds neither {OFFICIAL}/ nor games_<split>.jsonl.xz")


def _import_folder(source: Path, destination: Path) -> dict[str, int]:
    root, names = _find(source)
    counts = {}
    for split in SPLITS:
        if (root / OFFICIAL / split).is_dir() or (root / f"games_{split}.jsonl.xz").is_file():
            counts[split] = len(load_tasks(root, split))
    for name in names:
        target = _parent(destination) / name
        partial = target.with_name(target.name + ".partial")
        if (root / name).is_dir():
            shutil.copytree(root / name, partial, dirs_exist_ok=True)
            if target.exists():
                shutil.rmtree(target)
        else:
            shutil.copyfile(root / name, partial)
        os.replace(partial, target)
    return counts
