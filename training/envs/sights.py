"""What an observation of ALFWorld's engine shows: receptacles and the things in them, read from its text alone."""

from __future__ import annotations

import re

_SEEN = re.compile(r"(?:On the|The) ([a-z]+ \d+)(?:, you see| is open\. In it, you see) ([^.]*)\.")
_CLOSED = re.compile(r"The ([a-z]+ \d+) is closed")
_THING = re.compile(r"\ban? ([a-z]+ \d+)")
_RETRIEVED = re.compile(r"<information>(.*)</information>", re.DOTALL)
_ARRIVAL = re.compile(r"^You arrive at [^.]*\.\s*")


def things(text: str) -> tuple[str, ...]:
    """Instances that a text names with an article: "a mug 2, and a cd 1" -> ("mug 2", "cd 1")."""
    return tuple(_THING.findall(text))


def contents(observation: str) -> dict[str, tuple[str, ...]]:
    """Receptacles whose inside an observation shows -> the things in them."""
    return {place: things(seen) for place, seen in _SEEN.findall(observation)}


def closed(observation: str) -> str | None:
    """The receptacle that an observation says is closed."""
    found = _CLOSED.search(observation)
    return found[1] if found else None


def brief(observation: str, task: str | None = None) -> str:
    """An observation in few words, each thing with its place: "a mug 1 in shelf 2, a cd 1 in shelf 2".

    Texts that show no receptacle are kept, but for "You arrive at X."; passages that were retrieved lose their tags.
    Args: task, a task sentence: things that it does not name are left out.
    """
    if retrieved := _RETRIEVED.fullmatch(observation):
        return " ".join(retrieved[1].split())
    named = None if task is None else set(re.findall(r"[a-z]+", task.lower()))
    seen: list[str] = []
    for place, inside in contents(observation).items():
        kept = [thing for thing in inside if named is None or thing.rsplit(" ", 1)[0] in named]
        seen += [f"a {thing} in {place}" for thing in kept] or [f"nothing {'needed ' if inside else ''}in {place}"]
    if seen:
        return ", ".join(seen)
    shut = closed(observation)
    return f"{shut} closed" if shut else " ".join(_ARRIVAL.sub("", observation).split())
