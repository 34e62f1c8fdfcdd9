"""An expert at the questions of the invented world: it reads them and the passages by pattern, and never guesses.

It searches for what the question names, takes the fact that is asked for from that thing's own passage, and follows
the chain; after a search that did not bring the passage it searches for the bare name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from training.envs.fact_world import SEEN, UNSEEN, Form

READ = {  # relation -> how a passage tells it
    "birthplace": re.compile(r"was born in (\S+) in \d+"),
    "year": re.compile(r"was born in \S+ in (\d+)"),
    "teacher": re.compile(r"was taught by (\S+ \S+) and"),
    "author": re.compile(r"is a \S+ by (\S+ \S+?)\. "),
    "country": re.compile(r"is a city in (\S+?)\. "),
}
WANTED = {"birthplace": "born", "year": "born", "teacher": "taught", "author": "by", "country": "city"}
LINE = re.compile(r"^\d+\. (.*?): (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Move:
    """One turn: a thought, and a search or an answer with its tags."""

    thought: str
    action: str

    @property
    def reply(self) -> str:
        return f"<think>{self.thought}</think>{self.action}"


def read_question(question: str) -> tuple[Form, str] | None:
    """The kind of a question of the invented world and what it names; None for any other question."""
    for form in sorted((*SEEN, *UNSEEN), key=lambda form: -len(form.wording)):  # "the author of X" is no name
        before, after = form.wording.split("{}")
        if question.startswith(before) and question.endswith(after):
            return form, question[len(before) : len(question) - len(after)]
    return None


def read_chain(
    question: str, observations: Sequence[str], known: Mapping[tuple[str, str], str] | None = None
) -> tuple[list[tuple[str, str, str]], tuple[str, str] | None]:
    """The facts (relation, name, fact) on the way to the answer, as far as they were seen, and the first that was not.

    Args: observations, the answers to the searches so far, oldest first; known, (relation, name) -> fact, from
    elsewhere.
    Raises: ValueError for a question that is not of the invented world.
    """
    parsed = read_question(question)
    if parsed is None:
        raise ValueError(f"question {question!r} is not of the invented world")
    form, name = parsed
    found: list[tuple[str, str, str]] = []
    for relation in form.chain:
        fact = (known or {}).get((relation, name)) or _fact(name, relation, observations)
        if fact is None:
            return found, (relation, name)
        found.append((relation, name, fact))
        name = fact
    return found, None


def expert_move(question: str, observations: Sequence[str], known: Mapping[tuple[str, str], str] | None = None) -> Move:
    """The next turn. Args and Raises: as `read_chain`."""
    found, missing = read_chain(question, observations, known)
    told = f"The {found[-1][0]} of {found[-1][1]} is {found[-1][2]}." if found else ""
    if missing is None:
        return Move(told, f"<answer>{found[-1][2]}</answer>")
    relation, name = missing
    missed = any("<information>" in text and name in text for text in observations)
    query = name if missed else f"{name} {WANTED[relation]}"
    return Move(f"{told} I need the {relation} of {name}.".strip(), f"<search>{query}</search>")


def misstep(question: str, observations: Sequence[str], rng: np.random.Generator) -> Move:
    """A turn that is lost: a search for a single word of the question or for another thing that was read, or a reply
    without search and answer. None ends the episode."""
    words = [word for word in re.findall(r"\w+", question) if len(word) > 3]
    titles = [title for seen in observations for title, _ in LINE.findall(seen)]
    queries = [names[int(rng.integers(len(names)))] for names in (words, titles) if names]
    options = [Move(f"I need {query}.", f"<search>{query}</search>") for query in queries]
    options.append(Move("It must stand in a passage.", ""))
    return options[int(rng.integers(len(options)))]


def _fact(name: str, relation: str, observations: Sequence[str]) -> str | None:
    for title, text in (line for seen in observations for line in LINE.findall(seen)):
        if title == name and (match := READ[relation].search(f"{text} ")):
            return match[1]
    return None
