"""Where a shop lies: a folder that was given, built or still in WebShop's own files, or the generated one, kept."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from training.cache import cache_dir, made_once, replaced
from training.config import EnvConfig
from training.envs import bm25
from training.envs.webshop import catalogue, goals, products, shop
from training.envs.webshop.shop import RECORD, Wording, build, source_files

FILES = "files"  # of a generated shop: its catalogue, in WebShop's own form


def shop_folder(env: EnvConfig) -> Path:
    """The built shop of an environment; one that is not built yet is built into the cache, before any step.

    Raises: ValueError when `env.data` is no folder with a shop or with WebShop's files, or these are broken.
    """
    if env.data is None:
        return generated_shop()
    folder = Path(env.data)
    if (folder / RECORD).is_file():
        return folder
    if not folder.is_dir():
        raise ValueError(
            f"env.data is {env.data!r}, which is no folder; give one with WebShop's files, or a built shop"
        )
    files = source_files(folder)
    stamps = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files.values()]
    name = _digest({"files": stamps, "builder": _builder()})
    return made_once(cache_dir() / f"webshop-{name}", lambda partial: build(folder, partial))


def imported_folder() -> Path:
    """Where `undertow data webshop --from DIR` builds a shop unless told otherwise; name it with --env.data."""
    return cache_dir() / "webshop"


def import_shop(source: str | Path, out: Path | None = None, wording: Wording = "synthetic") -> tuple[Path, str]:
    """Build the shop of a folder with WebShop's files; where it is, and what it holds in words.

    A shop that is there already is replaced once the new one is complete.
    Raises: ValueError as `build`, or where `out` holds something else.
    """
    folder = out or imported_folder()
    if not Path(source).is_dir():
        raise ValueError(
            f"{source} is no folder; give the one with WebShop's items_shuffle*.json and items_ins_v2*.json"
        )
    if folder.is_dir() and any(folder.iterdir()) and not (folder / RECORD).is_file():
        raise ValueError(f"{folder} is there but holds no shop; choose another folder")
    counts = replaced(folder, lambda partial: build(Path(source), partial, wording))
    return folder, f"{counts['products']} products, {counts['goals']} {wording} goals"


def generated_shop(out: Path | None = None, count: int = catalogue.PRODUCTS, seed: int = 0) -> Path:
    """The generated shop in `out`, or in the cache under a name that follows from the arguments and the generator.

    Raises: ValueError where `out` is there already with something else.
    """
    recipe = {"products": count, "seed": seed, "builder": _builder()}
    text = json.dumps(recipe, indent=1) + "\n"

    def make(folder: Path) -> None:
        build(catalogue.generate(folder / FILES, count, seed), folder)
        (folder / "recipe.json").write_text(text, encoding="utf-8")

    folder = made_once(cache_dir() / f"webshop-{_digest(recipe)}" if out is None else out, make)
    kept = folder / "recipe.json"
    if not kept.is_file() or kept.read_text(encoding="utf-8") != text:
        raise ValueError(f"{folder} is there but holds no generated shop of this size and seed; choose another")
    return folder


def _builder() -> str:
    """Of what decides a shop besides its source: another version builds another one."""
    sources = [Path(module.__file__ or "") for module in (bm25, catalogue, goals, products, shop)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in [*sources, catalogue.WORDS])).hexdigest()


def _digest(document: object) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:12]
