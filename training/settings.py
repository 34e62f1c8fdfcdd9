"""From recipes, files and command-line words to a Config, and back: nothing that is unknown is passed over."""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from training.config import RECIPES, Config
from training.method import is_loaded, load_method

# What may change when a run is continued: its length, and what never changes a result.
FREE = ("steps", "save_every", "env.workers", "env.timeout", "env.search.timeout", "optim.micro_batch_tokens")

T = TypeVar("T")


def recipe(name: str) -> Config:
    """The preset of that name. Raises ValueError with the nearest name when there is none."""
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; {suggestion(name, RECIPES)}")
    return RECIPES[name]


def with_method(config: Config, name: str) -> Config:
    """`config` with a method and that method's own configuration: what it had if it is the same method, else defaults.

    Raises: ValueError with the nearest name for an unknown method.
    """
    kind, own = load_method(name).config, config.method_config
    if isinstance(own, Mapping) and name == config.method:  # a recipe says settings by name, without the method's file
        own = put(kind(), own, f"recipe {config.recipe}", "method_config.")
    elif not isinstance(own, kind):
        own = kind()
    return dataclasses.replace(config, method=name, method_config=own)


def from_document(base: Config, document: Mapping[str, Any], where: str) -> Config:
    """`base` with the values of a JSON document put in (a config file, or a run's config.json).

    A method file that nothing has loaded yet stays a name, without its settings: a document never runs code.
    Args: where, the name of the document, for messages.
    Raises: ValueError naming section, key and nearest key for an unknown key; and for a value of the wrong type.
    """
    name = document.get("method", base.method)
    if not isinstance(name, str):
        raise ValueError(f"{where}: method is {name!r}, expected the name of a method")
    if not is_loaded(name):
        rest = {key: value for key, value in document.items() if key != "method_config"}
        return put(dataclasses.replace(base, method_config=None), rest, where)
    own = document.get("method_config")
    return put(with_method(base, name), {**document, "method_config": {} if own is None else own}, where)


def read_config(path: str | Path, base: Config) -> Config:
    """from_document of a JSON file. Raises ValueError when it is no JSON object."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config file {path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"config file {path} is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise ValueError(f"config file {path} must hold one JSON object, like a run's config.json")
    return from_document(base, document, str(path))


def put(base: T, values: Mapping[str, Any], where: str, section: str = "", known: Iterable[str] = ()) -> T:
    """A dataclass with new values; nested mappings go into nested dataclasses. `known`: all keys, for suggestions."""
    hints, names = get_type_hints(type(base)), [f.name for f in dataclasses.fields(base)]  # type: ignore[arg-type]
    known = list(known) or [*keys(base), *names]
    changed: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{section}{name}"
        if name not in names:
            place = f"section {section.rstrip('.')!r}" if section else "the top level"
            raise ValueError(f"{where}: unknown key {key!r} in {place}; {suggestion(key, known)}")
        current = getattr(base, name)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, Mapping):
                raise ValueError(f"{where}: {key} is {value!r}, expected an object with the keys of that section")
            changed[name] = put(current, value, where, f"{key}.", known)
        else:
            value = tuple(value) if isinstance(value, list) else value
            if not fits(value, hints[name]):
                raise ValueError(f"{where}: {key} is {value!r}, expected {_describe(hints[name])}")
            changed[name] = value
    return dataclasses.replace(base, **changed)  # type: ignore[type-var]


def fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value has the type of a field; an int stands where a float is asked for."""
    if hint is Any:
        return True
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in arguments
    if origin in (Union, types.UnionType):
        return any(fits(value, argument) for argument in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(item, arguments[0]) for item in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def keys(kind: Any, section: str = "") -> Iterable[str]:
    """Dotted names of all fields of a dataclass value, sections included only through their fields."""
    for field in dataclasses.fields(kind):
        value = getattr(kind, field.name)
        if dataclasses.is_dataclass(value):
            yield from keys(value, f"{section}{field.name}.")
        else:
            yield f"{section}{field.name}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """`did you mean ...?`: the known name that is nearest, by its whole or by its last part."""
    leaf = name.rpartition(".")[2]
    initials = "".join(part[:1] for part in leaf.replace("-", "_").split("_"))

    def likeness(other: str) -> float:
        end = other.rpartition(".")[2]
        if end == initials:  # learning_rate -> lr
            return 1.0
        return max(difflib.SequenceMatcher(None, name, other).ratio(), difflib.SequenceMatcher(None, leaf, end).ratio())

    return f"did you mean {max(sorted(known), key=likeness)!r}?"


def refuse_changes(config: Config, run: str | Path) -> None:
    """Raises ValueError, naming the first difference, when the run folder was started with other settings."""
    path = Path(run) / "config.json"
    if not path.is_file():
        return
    before, now = _flat(read_config(path, Config())), _flat(config)
    for key in sorted(before.keys() | now.keys()):
        if key not in FREE and before.get(key) != now.get(key):
            raise ValueError(
                f"{run} was started with {key} {before.get(key)!r}, not {now.get(key)!r}; "
                "choose another folder with --out, or repeat the command it was started with"
            )


def _flat(config: Config) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in keys(config):
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        found[key] = value
    return found


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(argument) for argument in get_args(hint))
    if get_args(hint) and get_origin(hint) is not tuple:
        return " or ".join(_describe(argument) for argument in get_args(hint))
    return "null" if hint is type(None) else getattr(hint, "__name__", str(hint))
