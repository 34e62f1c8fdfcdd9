"""What a library of retrieved skills is: general rules, rules by kind of task, common mistakes; and what it may say."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache

GENERAL, MISTAKES = "general_skills", "common_mistakes"

_GIVEN_AWAY = (
    re.compile(r"\b(?:take|from|move|to|open|close|use|heat|cool|clean|with|examine) [a-z]+ \d+\b"),
    re.compile(r"<answer>\s*\w[^<]*</answer>"),
    re.compile(r"\b[Aa]nswer(?: is|:) [\"'“]?(?:[A-Z]|\d)[^\s.,;]*"),
    re.compile(r"\bB0[0-9A-Z]{8}\b"),  # a product of WebShop
)


@dataclass(frozen=True)
class Rule:
    """One skill, in sentences."""

    skill_id: str
    title: str
    principle: str
    when_to_apply: str = ""

    @property
    def line(self) -> str:
        when = f" Apply this {_lower(self.when_to_apply)}" if self.when_to_apply else ""
        return f"{self.title}: {self.principle}{when}"


@dataclass(frozen=True)
class Mistake:
    """One mistake that is often made, in sentences."""

    mistake_id: str
    description: str
    why_it_happens: str
    how_to_avoid: str

    @property
    def line(self) -> str:
        return f"{self.description} Why: {self.why_it_happens} Instead: {self.how_to_avoid}"


@dataclass(frozen=True)
class Library:
    """`sections` holds the rules of one kind of task each; `task_to_skill` and `keywords` lead tasks to them."""

    general: tuple[Rule, ...]
    sections: dict[str, tuple[Rule, ...]]
    mistakes: tuple[Mistake, ...] = ()
    task_to_skill: dict[str, str] = field(default_factory=dict)  # task type -> section
    keywords: dict[str, tuple[str, ...]] = field(default_factory=dict)  # task type or section -> words; (): all others

    def section(self, task_type: str) -> str | None:
        """The section of a task type: the one it is mapped to, the one of that name, or the longest one whose name is
        part of the type's ("heat" of pick_heat_then_place_in_recep); None for a type without skills."""
        if task_type in self.task_to_skill:
            return self.task_to_skill[task_type]
        if task_type in self.sections:
            return task_type
        return max((name for name in self.sections if f"_{name}_" in f"_{task_type}_"), key=len, default=None)

    def section_of_sentence(self, sentence: str) -> str | None:
        """The first section with a keyword in the sentence, as whole words (a plural counts); without any, the section
        whose keywords are empty (WebShop's "other"), if the library has one; None for an empty sentence."""
        if not sentence.strip():
            return None
        rest = None
        for name, words in self.keywords.items():
            if any(re.search(rf"\b{re.escape(word)}(?:s|es)?\b", sentence, re.IGNORECASE) for word in words):
                return self.section(name)
            rest = rest if words else self.section(name)
        return rest

    def text(self, *sections: str, mistakes: bool = False) -> str:
        """What a teacher reads: the general rules, those of the named sections and, if asked, the mistakes."""
        parts: list[tuple[str, Sequence[Rule | Mistake]]] = [("General", self.general)]
        parts += [(name.replace("_", " ").capitalize(), self.sections[name]) for name in sections]
        parts += [("Mistakes to avoid", self.mistakes)] if mistakes else []
        lines = [line for title, found in parts if found for line in (f"{title}:", *(f"- {e.line}" for e in found))]
        return "\n".join(lines)

    def ids(self, *sections: str, mistakes: bool = False) -> tuple[str, ...]:
        """The ids of the skills in `text` of the same arguments."""
        rules = [*self.general, *(rule for name in sections for rule in self.sections[name])]
        return (*(r.skill_id for r in rules), *(m.mistake_id for m in self.mistakes if mistakes))


def validate(library: Library, where: str) -> Library:
    """The library itself, if it can be used and gives nothing away.

    Source: ours (METHODS, skills: never the answer or an object's place).
    Raises: ValueError in one sentence, naming `where` and the id: no skill at all, an id that is empty or used twice,
    an empty text, a section without skills, a mapping to a section that is not there, or a skill that names one object
    of a game ("mug 2"), a product of the shop, or an answer.
    """
    if not library.general and not library.sections:
        raise ValueError(f"{where} holds no skills; expected general ones or those of a task type")
    seen: set[str] = set()
    for name, entry in entries(library):
        id, *texts = asdict(entry).values()
        if not id or id in seen:
            raise ValueError(f"{where}: an id in {name} is {f'{id!r} for the second time' if id else 'empty'}")
        seen.add(id)
        for key, text in asdict(entry).items():
            if not text.strip() and key != "when_to_apply":
                raise ValueError(f"{where}: {id} in {name} has an empty {key}; write it or leave the skill out")
        if leak := given_away(" ".join(texts)):
            raise ValueError(f"{where}: {id} in {name} names {leak!r}; a skill holds for every task, so leave it out")
    for name, rules in library.sections.items():
        if not rules:
            raise ValueError(f"{where}: section {name!r} has no skills; fill it or leave it out")
    for kind, section in library.task_to_skill.items():
        if section not in library.sections:
            raise ValueError(f"{where}: task_to_skill leads {kind!r} to {section!r}, which is not a section")
    for kind in library.keywords:
        if library.section(kind) is None:
            raise ValueError(f"{where}: task_keywords has {kind!r}, which leads to no section")
    return library


def given_away(text: str) -> str | None:
    """What a text says that holds for one task only: "mug 2", a command with it, an answer, a product; else None."""
    found = (pattern.search(text) for pattern in (*_GIVEN_AWAY, _instance()))
    return next((match[0] for match in found if match), None)


@lru_cache(maxsize=1)
def _instance() -> re.Pattern[str]:
    """A thing or a receptacle of the games, with its number."""
    from training.envs.rooms import rooms

    table = rooms()
    names = sorted({name.lower() for key in ("places", "holds", "pickupable") for name in table[key]})
    return re.compile(rf"\b(?:{'|'.join(names)}) \d+\b", re.IGNORECASE)


def entries(library: Library) -> Iterator[tuple[str, Rule | Mistake]]:
    """Every rule and mistake, with the part of the library it stands in."""
    yield from ((GENERAL, rule) for rule in library.general)
    yield from ((name, rule) for name, rules in library.sections.items() for rule in rules)
    yield from ((MISTAKES, mistake) for mistake in library.mistakes)


def _lower(sentence: str) -> str:
    """Lower-case first letter, unless the first word is an abbreviation."""
    return sentence if sentence[1:2].isupper() else sentence[:1].lower() + sentence[1:]
