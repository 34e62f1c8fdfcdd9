"""PDDL -> SAS translation of a game, kept in memory and on disk by content: the slow part of a cold reset.

A translation depends on nothing but the domain and problem texts, so a game is translated once per machine.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sys
import threading
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fast_downward
from fast_downward.translate.pddl.conditions import Atom
from fast_downward.translate.pddl.f_expression import Assign

MEMORY_GAMES = 256  # translations kept in memory, about 0.2 MB each
_LOCK = threading.RLock()  # the translator works through module globals and replaces sys.stdout


@dataclass(frozen=True)
class Translation:
    """What the engine needs of a translated game; texts and tuples only, so that it round-trips through JSON."""

    key: str  # sha256 of translator version, domain and problem
    sas: str
    objects: dict[str, str]  # name -> type
    types: list[tuple[str, tuple[str, ...]]]  # name, supertypes
    actions: dict[str, list[tuple[str, str]]]  # name -> (parameter without "?", type)
    facts: list[tuple[str, tuple[str, ...]]]  # the problem's initial facts: name, arguments

    @cached_property
    def sas_bytes(self) -> bytes:
        return self.sas.encode()


def cache_dir() -> Path:
    """$UNDERTOW_CACHE, else undertow/ in the user's cache folder."""
    base = os.environ.get("UNDERTOW_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "undertow"


def _sas(domain: str, problem: str, optimize: bool) -> tuple[Any, str]:
    with _LOCK:
        argv = sys.argv
        try:
            return fast_downward.pddl2sas(domain, problem, optimize=optimize)
        finally:
            sys.argv = argv  # the translator overwrites it


def _initial_fact(atom: Any) -> tuple[str, tuple[str, ...]] | None:
    """The filter of PddlState.__init__: no equality, no cost, no distances."""
    if isinstance(atom, Atom):
        return None if atom.predicate == "=" else (atom.predicate, tuple(atom.args))
    if isinstance(atom, Assign) and atom.fluent.symbol != "total-cost":
        name = str(atom.expression.value)
        return None if name.isdigit() else (name, tuple(atom.fluent.args))
    return None


def _translate(key: str, domain: str, problem: str) -> Translation:
    task, sas = _sas(domain, problem, optimize=False)
    return Translation(
        key=key,
        sas=sas,
        objects={o.name: o.type_name for o in task.objects},
        types=[(t.name, tuple(t.supertype_names)) for t in task.types],
        actions={a.name: [(p.name.strip("?"), p.type_name) for p in a.parameters] for a in task.actions},
        facts=[fact for fact in map(_initial_fact, task.init) if fact],
    )


def _pairs(rows: list[Any]) -> list[Any]:
    return [(name, tuple(rest) if isinstance(rest, list) else rest) for name, rest in rows]


def _read(path: Path) -> Translation | None:
    """The stored translation, or None where there is none or the file is damaged (it is then written anew)."""
    try:
        fields = json.loads(gzip.decompress(path.read_bytes()))
        fields["types"], fields["facts"] = _pairs(fields["types"]), _pairs(fields["facts"])
        fields["actions"] = {name: _pairs(rows) for name, rows in fields["actions"].items()}
        translation = Translation(**fields)
    except (OSError, EOFError, ValueError, TypeError, KeyError, gzip.zlib.error):
        return None
    return translation if path.name == f"{translation.key}.json.gz" else None


def _write(path: Path, translation: Translation) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(gzip.compress(json.dumps(asdict(translation)).encode(), 6, mtime=0))
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # a cache that cannot be written is no reason to stop


@lru_cache(MEMORY_GAMES)
def _cached(key: str, domain: str, problem: str) -> Translation:
    path = cache_dir() / "translations" / f"{key}.json.gz"
    translation = _read(path)
    if translation is None:
        translation = _translate(key, domain, problem)
        _write(path, translation)
    return translation


def translate(domain: str, problem: str) -> Translation:
    """The translation of one game: from memory, else from disk, else from the translator (then stored)."""
    text = "\0".join(("1", version("fast-downward-textworld"), domain, problem))
    return _cached(hashlib.sha256(text.encode()).hexdigest(), domain, problem)


def translate_for_planning(domain: str, problem: str) -> str:
    """The planner's SAS text: pruned for search, so it is of no use for playing. Not kept."""
    return _sas(domain, problem, optimize=True)[1]
