"""What a study compares, read from YAML: arms (a method and its settings) and what all of them share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

PLAN = "ablation.json"  # of a study folder: what is compared there, in steps
READY = Path(__file__).parent / "studies"
_STUDY = ("about", "base", "paper", "eval_seeds", "unseen", "common", "arms")
_ARM = ("method", "start", "length", "base", "paper")
# Settled by the study, or equal in all arms, for without that the arms would not be matched.
_OURS = ("out", "seed", "init_from", "steps", "save_every", "eval.every", "eval.seed", "config")
_SHARED = ("recipe", "tasks_per_step")
_SHARED_SECTIONS = ("env", "eval", "model")


@dataclass(frozen=True)
class Arm:
    """A method with settings of its own, trained from a Stage-I checkpoint."""

    name: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # dotted key -> value, as on the command line
    start: Fraction = Fraction(1)  # share of Stage I behind the first weights
    length: str = "1"  # a multiple of the recipe's Stage II, or "end": to the step where Stage I + II ends
    base: str = ""  # the arm it is compared with; its own name: with none
    paper: str = ""  # quantity of analysis.reference drawn beside it


@dataclass(frozen=True)
class Study:
    """Arms to compare. `common` settings hold for Stage I and every arm."""

    name: str
    arms: tuple[Arm, ...]
    about: str = ""
    common: Mapping[str, Any] = field(default_factory=dict)
    paper: str = ""  # only published values whose source starts so
    eval_seeds: int | None = None  # None: the recipe's
    unseen: bool = False  # whether every arm also plays tasks in rooms that no training task has


def ready_studies() -> dict[str, Path]:
    """Name -> file of the studies that come with the package."""
    return {path.stem: path for path in sorted(READY.glob("*.yaml"))}


def find_study(word: str) -> Study:
    """A ready study by its name, or a study by the path of its YAML file. Raises ValueError when there is neither."""
    ready = ready_studies()
    if word in ready:
        return read_study(ready[word])
    if not Path(word).is_file():
        near = f" (nearest: {_nearest(word, ready)})"
        raise ValueError(f"there is no study {word!r}{near}; give a YAML file, or one of {', '.join(ready)}")
    return read_study(Path(word))


def read_study(path: Path) -> Study:
    """A study from its file. The settings themselves are checked by whoever knows the methods.

    Raises: ValueError in one sentence for what is no study: an unknown, doubled or missing key, a setting that belongs
    to all arms, an arm compared with one that does not exist.
    """
    where = f"study {path}"
    try:
        text = path.read_text(encoding="utf-8")
        _refuse_doubles(yaml.compose(text, Loader=yaml.SafeLoader), where)
        document = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} is not YAML ({' '.join(str(error).split())})") from None
    _keys(document, where, _STUDY)
    if "arms" not in document:
        raise ValueError(f"{where} has no arms; list them under the key arms, each with its method")
    common = _settings(document.get("common") or {}, f"common settings of {where}", ("method", *_OURS))
    arms = document["arms"]
    if not isinstance(arms, Mapping) or not arms:
        raise ValueError(f"{where}: arms is {arms!r}, expected a name and below it the settings of each arm")
    base = str(document.get("base", next(iter(arms))))
    found = tuple(_arm(str(name), given, base, where) for name, given in arms.items())
    for arm in found:
        if arm.base not in [other.name for other in found]:
            raise ValueError(
                f"arm {arm.name!r} of {where} is compared with {arm.base!r}, which is no arm "
                f"(nearest: {_nearest(arm.base, [other.name for other in found])})"
            )
    seeds = document.get("eval_seeds")
    if seeds is not None and not (isinstance(seeds, int) and seeds > 0):
        raise ValueError(f"{where}: eval_seeds is {seeds!r}, expected how many evaluations end an arm")
    unseen = document.get("unseen", False)
    if not isinstance(unseen, bool):
        raise ValueError(f"{where}: unseen is {unseen!r}, expected true or false")
    words = {name: str(document.get(name, "")).strip() for name in ("about", "paper")}
    return Study(path.stem, found, common=common, eval_seeds=seeds, unseen=unseen, **words)


def _arm(name: str, given: Any, base: str, where: str) -> Arm:
    place = f"arm {name!r} of {where}"
    if not name.replace("_", "").replace("-", "").replace(".", "").isalnum() or name == "stage1" or name[0] in ".-":
        raise ValueError(f"{place} needs another name: letters, digits, _, - and . make a folder, and stage1 is taken")
    if not isinstance(given, Mapping) or not isinstance(given.get("method"), str):
        raise ValueError(f"{place} has no method; give it one, e.g. method: grpo")
    own = {key: value for key, value in given.items() if key not in _ARM}
    own = _settings(own, place, (*_OURS, *_SHARED), _SHARED_SECTIONS)
    length = str(given.get("length", 1))
    try:
        start = Fraction(str(given.get("start", 1)))
        fits = 0 < start <= 1 and (length == "end" or Fraction(length) > 0)
    except (ValueError, ZeroDivisionError):
        fits = False
    if not fits:
        raise ValueError(
            f"{place}: expected start as a share of Stage I in (0, 1], and length as a multiple of Stage II above 0, "
            f"or end; got start {given.get('start', 1)!r} and length {length!r}"
        )
    return Arm(name, given["method"], own, start, length, str(given.get("base", base)), str(given.get("paper", "")))


def _settings(given: Any, place: str, refused: tuple[str, ...], sections: tuple[str, ...] = ()) -> dict[str, Any]:
    """The settings with underscores in their keys, which the command line takes for dashes."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{place}: expected keys with dots and their values, got {given!r}")
    found = {}
    for key, value in given.items():
        if not isinstance(key, str) or isinstance(value, Mapping):
            raise ValueError(f"{place}: write {key!r} with dots, as on the command line, e.g. method_config.beta: 5")
        plain = key.replace("-", "_")
        if plain in refused or plain.partition(".")[0] in sections:
            ours = (
                "the study settles it" if plain in _OURS else "it must be equal in all arms, so write it under common"
            )
            raise ValueError(f"{place} sets {key}: {ours}")
        found[plain] = value
    return found


def _keys(given: Any, where: str, known: tuple[str, ...]) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: expected the keys {', '.join(known)}, got {type(given).__name__}")
    for key in given:
        if key not in known:
            raise ValueError(f"unknown key {key!r} in {where}; did you mean {_nearest(str(key), known)}?")


def _refuse_doubles(node: yaml.Node | None, where: str) -> None:
    """YAML would let the last of two equal keys win without a word."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if key.value in seen:
                raise ValueError(f"{where} has {key.value!r} twice, line {key.start_mark.line + 1}; rename one")
            seen.add(key.value)
            _refuse_doubles(value, where)


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    return repr(max(names, key=lambda other: difflib.SequenceMatcher(None, name, other).ratio()))
