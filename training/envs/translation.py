"""PDDL -> SAS translation of a game, kept in memory and on disk by content: the slow part of a cold reset.

A translation depends on nothing but the domain and problem texts, so a game is translated once per machine.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import sys
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fast_downward
from fast_downward.translate.pddl.conditions import Atom
from fast_downward.translate.pddl.f_expression import Assign

from training.cache import cache_dir
from training.envs.facts import Row, Signature, Types
from training.envs.library import borrow, give_back

FORMAT = f"1 fast-downward-textworld {version('fast-downward-textworld')}"  # part of the key of what is stored
MEMORY_GAMES = 64  # about 0.4 MB each
_LOCK = threading.RLock()  # the translator works through module globals and replaces sys.stdout


@dataclass(frozen=True, eq=False)
class Translation:
    """What the engine needs of a translated game."""

    key: str  # sha256 of translator version, domain and problem
    sas: bytes
    objects: Mapping[str, str]  # name -> type
    types: Types
    actions: Mapping[str, tuple[tuple[str, str], ...]]  # name -> its parameters: (name without "?", type)
    initial: Mapping[Signature, frozenset[Row]]  # facts before the first command


def parse_atom(text: str, types: Mapping[str, str]) -> tuple[Signature, Row]:
    """Signature and arguments of Fast Downward's "Atom name(a, b)" or "NegatedAtom name(a, b)"."""
    kind, rest = text.split(" ", 1)
    name, arguments = rest[:-1].split("(", 1)
    row = tuple([a for a in arguments.split(", ") if a])
    signature = ("not_" + name if kind == "NegatedAtom" else name), tuple([types[a] for a in row])
    return signature, tuple([a.upper() if a in ("i", "p") else a for a in row])  # as TextWorld spells these two


def translate(domain: str, problem: str) -> Translation:
    """The translation of one game: from memory, else from disk, else from the translator (then stored)."""
    return _remembered(hashlib.sha256("\0".join((FORMAT, domain, problem)).encode()).hexdigest(), domain, problem)


@lru_cache(MEMORY_GAMES)
def _remembered(key: str, domain: str, problem: str) -> Translation:
    path = cache_dir() / "translations" / f"{key}.json.gz"
    translation = _read(path, key)
    if translation is None:
        content = _translate(domain, problem)
        _write(path, {"key": key, **content})
        translation = _build(key, content)
    return translation


def translate_for_planning(domain: str, problem: str) -> str:
    """The planner's SAS text: pruned for search, so of no use for playing. Not stored."""
    return _pddl_to_sas(domain, problem, optimize=True)[1]


def _pddl_to_sas(domain: str, problem: str, optimize: bool) -> tuple[Any, str]:
    with _LOCK:
        arguments = sys.argv
        try:
            return fast_downward.pddl2sas(domain, problem, optimize=optimize)
        finally:
            sys.argv = arguments  # the translator puts its own in place


def _translate(domain: str, problem: str) -> dict[str, Any]:
    """The content of a translation, as it is stored: JSON types only."""
    task, sas = _pddl_to_sas(domain, problem, optimize=False)
    library = borrow(None, sas.encode())
    try:
        atoms = library.atoms(library.initial)
    finally:
        give_back(library)
    return {
        "sas": sas,
        "objects": {thing.name: thing.type_name for thing in task.objects},
        "types": [(kind.name, kind.supertype_names) for kind in task.types],
        "actions": {a.name: [(p.name.strip("?"), p.type_name) for p in a.parameters] for a in task.actions},
        "facts": [fact for fact in map(_initial_fact, task.init) if fact],
        "atoms": [atom for atom in atoms if not atom.startswith("NegatedAtom")],
    }


def _initial_fact(atom: Any) -> tuple[str, Row] | None:
    """What PddlState takes of a problem's initial facts: no equality, no cost, no distances."""
    if isinstance(atom, Atom):
        return None if atom.predicate == "=" else (atom.predicate, tuple(atom.args))
    if isinstance(atom, Assign) and atom.fluent.symbol != "total-cost":
        name = str(atom.expression.value)
        return None if name.isdigit() else (name, tuple(atom.fluent.args))
    return None


def _build(key: str, content: Mapping[str, Any]) -> Translation:
    objects = {sys.intern(name): sys.intern(kind) for name, kind in content["objects"].items()}
    rows: dict[Signature, set[Row]] = defaultdict(set)
    for name, arguments in content["facts"]:
        rows[name, tuple([objects[a] for a in arguments])].add(tuple(map(sys.intern, arguments)))
    for atom in content["atoms"]:
        signature, row = parse_atom(atom, objects)
        rows[signature].add(tuple(map(sys.intern, row)))
    return Translation(
        key=key,
        sas=content["sas"].encode(),
        objects=objects,
        types=_pairs((name, tuple(supertypes)) for name, supertypes in content["types"]),
        actions={name: _pairs(parameters) for name, parameters in content["actions"].items()},
        initial={signature: frozenset(found) for signature, found in rows.items()},
    )


def _pairs(rows: Iterable[Iterable[Any]]) -> tuple[Any, ...]:
    return tuple(tuple(row) for row in rows)


def _read(path: Path, key: str) -> Translation | None:
    """The stored translation, or None where there is none or the file is damaged (it is then written anew)."""
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
        return _build(key, content) if content["key"] == key else None
    except (OSError, EOFError, ValueError, TypeError, KeyError, AttributeError, zlib.error):
        return None


def _write(path: Path, content: Mapping[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(gzip.compress(json.dumps(content).encode(), 3, mtime=0))
        os.replace(partial, path)
    except OSError:  # a cache that cannot be written is no reason to stop
        with contextlib.suppress(OSError):
            partial.unlink()
