"""Where the games lie: a folder that was given, $ALFWORLD_DATA, or household games made once and kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from diagnostics.progress import progress
from training.cache import cache_dir
from training.config import EnvConfig
from training.envs import household, rooms
from training.envs.games import OFFICIAL


def games_folder(env: EnvConfig) -> Path:
    """The folder with an environment's games; household games are generated when they are asked for first.

    Raises: ValueError when there is none, saying how to get one.
    """
    if env.data is not None:
        if not Path(env.data).is_dir():
            raise ValueError(f"env.data is {env.data!r}, which is no folder; give a folder with games")
        return Path(env.data)
    if env.kind == "household":
        return household_games(workers=env.workers)
    folder = alfworld_folder()
    if not folder.is_dir():
        raise ValueError(
            f"no ALFWorld games at {folder}; bring them in with `undertow data alfworld --from ARCHIVE_OR_FOLDER`, "
            "or name their folder in $ALFWORLD_DATA or --env.data"
        )
    return folder


def alfworld_folder() -> Path:
    """$ALFWORLD_DATA, else where alfworld's own download lies, else where `undertow data alfworld` puts games."""
    chosen, own = os.environ.get("ALFWORLD_DATA"), Path.home() / ".cache" / "alfworld"
    if chosen and Path(chosen) != own:  # importing alfworld sets the variable to its own folder, whatever is there
        return Path(chosen)
    return own if (own / OFFICIAL).is_dir() else cache_dir() / "alfworld"


def household_games(
    out: Path | None = None, sizes: Mapping[str, int] | None = None, seed: int = 0, workers: int = 2
) -> Path:
    """Household games in `out`, or in the cache under a name that follows from the arguments and the generator.

    They are made beside their place and renamed; a folder that is there is complete and is not made again.
    """
    wanted = {**household.SIZES, **(sizes or {})}
    recipe = {"sizes": wanted, "seed": seed, "generator": _generator_digest()}
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
    folder = cache_dir() / f"household-{digest}" if out is None else out
    if folder.is_dir():
        kept = folder / "recipe.json"
        if not kept.is_file() or json.loads(kept.read_text(encoding="utf-8")) != recipe:
            raise ValueError(f"{folder} is there but holds no household games of these sizes and seed; choose another")
        return folder
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        with progress("games", sum(wanted.values())) as report:
            household.generate(partial, wanted, seed=seed, workers=workers, progress=lambda done, _: report(done))
        (partial / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")
        if not folder.is_dir():  # another process may have been quicker
            os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _generator_digest() -> str:
    """Of the generator itself: games that another version made are others."""
    sources = [Path(module.__file__ or "") for module in (household, rooms)]
    sources.append(Path(rooms.__file__ or "").parent / "data" / "rooms.json")
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
