"""Copies of Fast Downward's shared library, one for each game that is live in this process.

The library keeps one game in its globals, so the stock engine loads a private 34 MB file for every environment, and
the space returns only when the process ends. The loadable part of the file is 1 MB (the rest is debug information),
states are numbered, and `set_state_id` moves between them: so one small copy serves every live episode of its game,
and a copy without episodes is given another game.
"""

from __future__ import annotations

import ctypes
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fast_downward.interface import DOWNWARD_LIB_PATH, Atom, Operator

_LOCK = threading.RLock()
_COPIES: deque[Library] = deque()  # least recently used first; never unloaded (the dynamic loader keeps them anyway)


@dataclass(frozen=True, slots=True)
class Applicable:
    """A ground operator that can be applied: `text` is its name and arguments, separated by spaces."""

    id: int
    text: str
    n_effects: int


class Library:
    """One loaded copy. A game's states are named by the ids that `initial` and `apply` give."""

    def __init__(self) -> None:
        self.c = _load_copy()
        self.lock = threading.RLock()  # ctypes lets other threads run during a call
        self.game: str | None = None  # key of the loaded game
        self.episodes = 0  # live ones; the game stays while there are any
        self.initial = 0
        self._operators: dict[int, Applicable] = {}

    def load(self, game: str | None, sas: bytes) -> None:
        with self.lock:
            self.game = None
            self.c.load_sas(sas)
            self.initial = self.c.get_state_id()
            self._operators.clear()
            self.game = game

    @contextmanager
    def at(self, state: int) -> Iterator[Any]:
        """The C functions, standing at `state`."""
        with self.lock:
            self.c.set_state_id(state)
            yield self.c

    def atoms(self, state: int) -> list[str]:
        """Texts of all atoms of a state; slow in the library itself (quadratic in their number)."""
        with self.at(state) as c:
            atoms = (Atom * c.get_state_size())()
            c.get_state(atoms)
        return [atom.name for atom in atoms]

    def applicable(self, state: int) -> list[Applicable]:
        with self.at(state) as c:
            operators = (Operator * c.get_applicable_operators_count())()
            c.get_applicable_operators(operators)
        found = []
        for operator in operators:
            known = self._operators.get(operator.id)
            if known is None:
                known = Applicable(operator.id, operator.name, operator.nb_effect_atoms)
                self._operators[known.id] = known
            found.append(known)
        return found

    def apply(self, state: int, operator: int, n_effects: int) -> tuple[int, list[str]]:
        """The next state and the texts of the atoms that became true."""
        effects = (Atom * n_effects)()
        with self.at(state) as c:
            c.apply_operator(operator, effects)
            return c.get_state_id(), [effect.name for effect in effects]

    def won(self, state: int) -> bool:
        with self.at(state) as c:
            return bool(c.check_goal())


def borrow(game: str | None, sas: bytes) -> Library:
    """The copy that holds this game, else the longest idle one, else a new one; give it back after the episode.

    Args: game: names the SAS text; None: it is used once and shared with nobody.
    """
    with _LOCK:
        library = next((copy for copy in _COPIES if game and copy.game == game), None)
        if library is None:
            library = next((copy for copy in _COPIES if not copy.episodes), None) or Library()
            library.load(game, sas)
            if library not in _COPIES:
                _COPIES.append(library)
        library.episodes += 1
        return library


def give_back(library: Library) -> None:
    with _LOCK:
        library.episodes -= 1
        _COPIES.remove(library)
        _COPIES.append(library)


def _loadable_bytes(path: Path) -> bytes:
    """The file up to the end of its last loadable segment (ELF, 64 bit); any other kind of file as it is."""
    with path.open("rb") as file:
        head = file.read(64)
        if head[:5] != b"\x7fELF\x02":
            return head + file.read()
        (table,) = struct.unpack_from("<Q", head, 32)
        size, count = struct.unpack_from("<HH", head, 54)
        file.seek(table)
        rows = [file.read(size) for _ in range(count)]
        end = max(sum(struct.unpack_from("<8xQ16xQ", row)) for row in rows)  # offset and size within the file
        file.seek(0)
        return file.read(end)


def _load_copy() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:  # the loader tells libraries apart by file
        path = Path(folder, "libdownward.so")
        path.write_bytes(_loadable_bytes(Path(DOWNWARD_LIB_PATH)))
        library = ctypes.CDLL(str(path))
    for name in ("check_goal", "replan"):
        getattr(library, name).restype = ctypes.c_bool
    return library
