"""Command-line words to a dataclass: every unknown word is refused, and every refusal is one sentence."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import Any, TypeVar

from training.config import Config
from training.method import is_loaded, load_method
from training.settings import keys, read_config, recipe, suggestion, with_method

T = TypeVar("T")
_BOX = re.compile(r"[│╭╮╰╯─]+")


def parse(default: T, words: Sequence[str], program: str) -> T:
    """The dataclass `default` with the fields that the words set; --help prints them all and ends the program.

    A field named `target` is positional, and asked for.
    Raises: ValueError in one sentence naming the word, its section and the nearest key.
    """
    import tyro

    _refuse_unknown(words, default, program)
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            parsed = tyro.cli(type(default), prog=program, args=list(words), default=default)
    except SystemExit as stop:
        if not stop.code:
            raise
        lines = [line for line in (_BOX.sub(" ", line).strip() for line in said.getvalue().split("\n")) if line]
        raise ValueError(f"{' '.join(_reason(lines))} ({program} --help lists all options)") from None
    if getattr(parsed, "target", None) == "":
        raise ValueError(f"{program} needs one more word: what to work on ({program} --help lists all options)")
    return parsed


def parse_config(default: Any, words: Sequence[str], program: str) -> Any:
    """Words for a command whose dataclass extends Config: a recipe, then a file (--config), then single fields.

    Returns: the dataclass, with the method's own configuration in `method_config`.
    """
    base: Config = recipe(_value(words, "recipe") or default.recipe)
    if method := _value(words, "method"):
        load_method(method)  # a file of one's own: the config file may hold its settings
    if file := _value(words, "config"):
        base = read_config(file, base)
    if not is_loaded(base.method) and not method:
        raise ValueError(
            f"the config file names the method file {base.method}, which is run only when the command line names it, "
            f"too: say --method {base.method}"
        )
    base = with_method(base, method or base.method)
    kind = type(base.method_config)
    extended = dataclasses.make_dataclass(
        type(default).__name__,
        [("method_config", kind, dataclasses.field(default_factory=kind))],
        bases=(type(default),),
        frozen=True,
        namespace={"__doc__": type(default).__doc__},
    )
    values = {field.name: getattr(base, field.name) for field in dataclasses.fields(Config)}
    return parse(extended(**values), words, program)


def check_training(default: Any, trusted: str | None, words: Sequence[str]) -> None:
    """Refuse the words of a training command that a study made, as the command itself would.

    Args: default, as in parse_config; trusted, the method file that the user named on the command line: a study is
    data, and no file runs because a study names it.
    """
    method = _value(words, "method") or ""
    if trusted is not None:
        load_method(trusted)
    if not is_loaded(method):
        raise ValueError(f"a study cannot name code to run; if you trust {method}, say --method {method}")
    parse_config(default, words, "undertow train")


def plain_config(parsed: Any) -> Config:
    """The Config inside a dataclass that extends it."""
    return Config(**{field.name: getattr(parsed, field.name) for field in dataclasses.fields(Config)})


def _value(words: Sequence[str], name: str) -> str | None:
    """What `--name VALUE` or `--name=VALUE` says, the last time it is said."""
    found = None
    for index, word in enumerate(words):
        if word == f"--{name}" and index + 1 < len(words):
            found = words[index + 1]
        elif word.startswith(f"--{name}="):
            found = word.partition("=")[2]
    return found


def _refuse_unknown(words: Sequence[str], default: Any, program: str) -> None:
    named = {"source": "from"}  # a word of the language cannot be a field
    known = {named.get(key, key).replace("_", "-") for key in keys(default)}
    for word in words:
        if not word.startswith(("--", "+")) or word == "--help":
            continue
        key = word.lstrip("-+").partition("=")[0].replace("_", "-")
        section, _, leaf = key.rpartition(".")
        positive = f"{section}.{leaf.removeprefix('no-')}".lstrip(".")
        if word.startswith("+") or (key not in known and positive not in known):
            place = f"section {section!r} of {program}" if section else program
            raise ValueError(f"unknown key {key!r} in {place}; {suggestion(key, known)}")


def _reason(lines: Sequence[str]) -> list[str]:
    """The message in a printed box: what stands between its title and the help text."""
    kept: list[str] = []
    for line in lines[1:]:
        if line.startswith(("Argument helptext", "For full helptext", "Perhaps you meant")):
            break
        kept.append(line)
    return kept or list(lines[:1])


def numbers(text: str, name: str) -> list[int]:
    """Whole numbers with commas between them, as the word behind `name` says them."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise ValueError(f"{name} has {text!r}, expected whole numbers with commas between them, e.g. 0,1,2")
    return [int(part) for part in parts]


def data_words(words: Sequence[str]) -> list[str]:
    """`data webshop` is short for --kind webshop; --generate alone makes what was named, or household games."""
    kind = words[0] if words and not words[0].startswith("-") else ""
    made = kind if kind not in ("", "alfworld") else "household"
    out = ["--kind", kind] if kind else []
    rest = words[bool(kind) :]
    for word, after in zip(rest, [*rest[1:], "-"], strict=False):
        out += [word, made] if word == "--generate" and after.startswith("-") else [word]
    return out


def sampler_words(words: Sequence[str]) -> list[str]:
    """`--sampler vllm` is short for --sampler.engine vllm."""
    short = {"--sampler": "--sampler.engine"}
    split = [word.partition("=") for word in words]
    return [f"{short.get(name, name)}{equals}{value}" for name, equals, value in split]
