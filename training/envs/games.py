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
from pathlib import Path, PurePosixPath
from typing import Any

from training.envs.base import Task

SPLITS = ("train", "valid_seen", "valid_unseen")
DOMAIN, GRAMMAR = "alfred.pddl", "alfred_template.twl2"
OFFICIAL, GAME = "json_2.1.1", "game.tw-pddl"
_GOAL = re.compile(r'Your task is to: ([^"]*)"')


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
    goal = json.dumps(record["task_desc"], ensure_ascii=False)[1:-1]  # it stands inside a JSON text of the grammar
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
    path = folder / GAME
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable game file ({error})") from error


def load_tasks(data_dir: str | Path, split: str) -> list[Task]:
    """All playable tasks of a split, in the order of the packed file, or sorted by id for official folders.

    Args: data_dir: a folder in either form. split: train, valid_seen or valid_unseen.
    Raises: ValueError where the folder holds no game of the split.
    """
    tasks = _tasks(Path(data_dir), split)
    if not tasks:
        raise ValueError(
            f"{data_dir}: no games of split {split!r}; expected games_{split}.jsonl.xz there, "
            f"or {OFFICIAL}/{split}/<task>/<trial>/{GAME}"
        )
    return tasks


def _tasks(folder: Path, split: str) -> list[Task]:
    packed = folder / f"games_{split}.jsonl.xz"
    if packed.is_file():
        return list(_packed_tasks(packed))
    return sorted(_official_tasks(folder, split), key=lambda task: task.id)


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
    for path in root.glob(f"*/*/{GAME}"):
        trial = path.parent
        name = f"{trial.parent.name}/{trial.name}"
        if "movable" in name or "Sliced" in name:  # not played by ALFWorld either
            continue
        game = _official_game(trial)
        if game.get("solvable", False):
            yield Task(name, "alfworld", split, name.split("-", 1)[0], goal_sentence(game), str(trial))


def goal_sentence(game: Mapping[str, Any]) -> str:
    """The task sentence that the game's own grammar writes."""
    found = _GOAL.search(game["grammar"])
    return found.group(1) if found else ""


def import_games(source: str | Path, destination: str | Path) -> dict[str, int]:
    """Copy the games of a folder, a zip or a tar archive (in either form) into `destination`; games per split.

    Official games are added to those already there. Every file is put in place whole or not at all.

    Raises: ValueError where the source holds no games, or packed games of another domain or grammar are there already.
    """
    source, destination = Path(source), Path(destination)
    destination.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        return _import_folder(source, destination)
    if not source.is_file():
        raise ValueError(f"{source}: no such file or folder")
    with tempfile.TemporaryDirectory(dir=destination) as scratch:
        if zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive:
                archive.extractall(scratch, [name for name in archive.namelist() if _belongs(name)])
        elif tarfile.is_tarfile(source):
            with tarfile.open(source) as archive:
                archive.extractall(scratch, [m for m in archive if m.isfile() and _belongs(m.name)], filter="data")
        else:
            raise ValueError(f"{source}: neither a folder nor a zip or tar archive")
        return _import_folder(Path(scratch), destination)


def _belongs(name: str) -> bool:
    file = PurePosixPath(name).name
    return file in {GAME, "traj_data.json", DOMAIN, GRAMMAR} or file in {f"games_{split}.jsonl.xz" for split in SPLITS}


def _import_folder(source: Path, destination: Path) -> dict[str, int]:
    packed = [path for split in SPLITS for path in sorted(source.rglob(f"games_{split}.jsonl.xz"))]
    official = [path for path in source.rglob(GAME) if path.parents[2].name in SPLITS]
    if packed:
        root = packed[0].parent
        _refuse_mixture(root, destination)
        names = [DOMAIN, GRAMMAR, *(path.name for path in packed if path.parent == root)]
        targets = {destination / name: root / name for name in names}
    elif official:
        files = [path for game in official for path in (game, game.with_name("traj_data.json")) if path.is_file()]
        targets = {destination / OFFICIAL / Path(*path.parts[-4:]): path for path in files}
    else:
        raise ValueError(f"{source}: holds neither games_<split>.jsonl.xz nor <split>/<task>/<trial>/{GAME}")
    for target, path in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".partial")
        shutil.copyfile(path, partial)
        os.replace(partial, target)
    counts = {split: len(_tasks(destination, split)) for split in SPLITS}
    return {split: count for split, count in counts.items() if count}


def _refuse_mixture(root: Path, destination: Path) -> None:
    """Packed games share one domain and grammar, so games of another one may not lie beside them."""
    for name, text in zip((DOMAIN, GRAMMAR), _shared_texts(str(root)), strict=True):
        present = destination / name
        if present.is_file() and present.read_text(encoding="utf-8") != text:
            raise ValueError(f"{present}: differs from {root / name}; choose another destination for these games")
