"""Where questions and passages of Search-QA lie: a folder that was given, or an invented world, made once and kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from training.cache import cache_dir, made_once
from training.config import EnvConfig
from training.envs import fact_world


def search_folder(env: EnvConfig) -> Path:
    """The folder that `env.data` names, else the generated world. Raises ValueError when it is no folder."""
    if env.data is None:
        return fact_world_folder()
    if not Path(env.data).is_dir():
        raise ValueError(f"env.data is {env.data!r}, which is no folder; give one with questions, see `undertow data`")
    return Path(env.data)


def imported_folder() -> Path:
    """Where `undertow data searchqa --from DIR` puts questions unless told otherwise; name it with --env.data."""
    return cache_dir() / "searchqa"


def fact_world_folder(out: Path | None = None, sizes: Mapping[str, int] | None = None, seed: int = 0) -> Path:
    """The invented world in `out`, or in the cache under a name that follows from the arguments and the generator.

    Raises: ValueError where `out` is there already with something else.
    """
    wanted = {**fact_world.SIZES, **(sizes or {})}
    source = Path(fact_world.__file__).read_bytes() + fact_world.PARTS.read_bytes()  # another version, another world
    recipe = {"sizes": wanted, "seed": seed, "generator": hashlib.sha256(source).hexdigest()}
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
    text = json.dumps(recipe, indent=1) + "\n"

    def make(folder: Path) -> None:
        fact_world.generate(folder, wanted, seed=seed)
        (folder / "recipe.json").write_text(text, encoding="utf-8")

    folder = made_once(cache_dir() / f"searchqa-{digest}" if out is None else out, make)
    kept = folder / "recipe.json"
    if not kept.is_file() or kept.read_text(encoding="utf-8") != text:
        raise ValueError(f"{folder} is there but holds no questions of these sizes and seed; choose another")
    return folder
