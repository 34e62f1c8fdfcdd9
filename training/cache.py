"""Where what can be made again is kept between runs: translations, generated games, unpacked models."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Made = TypeVar("Made")


def cache_dir() -> Path:
    """$UNDERTOW_CACHE, else undertow/ in the user's cache folder."""
    chosen = os.environ.get("UNDERTOW_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "undertow")


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """`folder`, which is complete when it is there; otherwise `make` fills a new one beside it, which is then renamed.

    Of processes that ask at the same time one makes it and the others wait.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.partial")
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a process that dies lets go of it
        if not folder.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
            try:
                partial.mkdir()
                make(partial)
                os.replace(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder


def replaced(folder: Path, make: Callable[[Path], Made]) -> Made:
    """What `make` returns; it fills a new folder beside `folder`, which takes its place once it is complete."""
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        made = make(partial)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return made
