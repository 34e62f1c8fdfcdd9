"""Data of an environment brought into place, or made: what `undertow data` does for each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from training.envs.folders import alfworld_folder, household_games
from training.envs.games import import_games
from training.envs.questions import import_questions
from training.envs.search_folders import fact_world_folder
from training.envs.search_folders import imported_folder as questions_folder
from training.envs.webshop.folders import Wording, generated_shop, import_shop


@dataclass(frozen=True)
class Request:
    """What a user asks for: where from (None: make it), where to (None: the usual place), how much."""

    source: str | None
    out: Path | None
    sizes: Mapping[str, int]
    seed: int
    workers: int
    goals: Wording


def bring(kind: str, request: Request) -> str:
    """Import the data of that kind, or make them; what lies where, in words.

    Raises: ValueError where a kind cannot be had in this way, saying how it can.
    """
    way = (_IMPORTED if request.source else _MADE).get(kind)
    if way is None:
        raise ValueError(
            f"say `undertow data KIND --from PATH` with {', '.join(_IMPORTED)} to bring data in, or "
            f"`undertow data --generate KIND` with {', '.join(_MADE)} to make new ones"
        )
    return way(request)


def _alfworld(request: Request) -> str:
    folder = request.out or alfworld_folder()
    return f"games: {folder} ({_counts(import_games(str(request.source), folder))})"


def _questions(request: Request) -> str:
    folder = request.out or questions_folder()
    counts = _counts(import_questions(str(request.source), folder))
    return f"questions: {folder} ({counts}); name it with --env.data"


def _shop(request: Request) -> str:
    folder, told = import_shop(str(request.source), request.out, request.goals)
    return f"shop: {folder} ({told}); name it with --env.data"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{split} {count}" for split, count in counts.items())


_IMPORTED: dict[str, Callable[[Request], str]] = {"alfworld": _alfworld, "searchqa": _questions, "webshop": _shop}
_MADE: dict[str, Callable[[Request], str]] = {
    "household": lambda r: f"games: {household_games(r.out, r.sizes, r.seed, r.workers)}",
    "searchqa": lambda r: f"questions: {fact_world_folder(r.out, r.sizes, r.seed)}",
    "webshop": lambda r: f"shop: {generated_shop(r.out, seed=r.seed)}",
}
