"""Reading and writing a library of skills in both public forms, and the packaged libraries of ours.

JSON, one file: `general_skills`, `task_specific_skills` (Search-QA: `query_type_skills`) and `common_mistakes`, as
SkillRL has them; ours adds `task_to_skill` and `task_keywords`. Markdown, one folder: `general_skills.md`, a file a
section, and `skill_mapping.json` with those two, as SDAR has it; ours adds `common_mistakes.md`.
Of the packaged ones, data/<environment>/skills.json is the source and the Markdown beside it its `save_markdown`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from training.skills.schema import GENERAL, MISTAKES, Library, Mistake, Rule, entries, validate

PACKAGED = {"alfworld": "alfworld", "household": "alfworld", "webshop": "webshop"}
PACKAGED |= {"searchqa": "search_qa", "search_qa": "search_qa"}
MAPPING = "skill_mapping.json"
SECTIONS = ("task_specific_skills", "query_type_skills")

_ITEM = re.compile(r"\d+\.\s+(.*)")
_RULE = re.compile(r"(.+?): (.*?)(?: Apply this (.*))?")
_MISTAKE = re.compile(r"(.*) Why: (.*) Instead: (.*)")

E = TypeVar("E", Rule, Mistake)


def load_library(source: str | Path) -> Library:
    """The library of an environment (ours, by the environment's name), of a JSON file, or of a folder in either form.

    A folder with skill_mapping.json is read as Markdown; another one must hold exactly one JSON library.
    Raises: ValueError in one sentence where there is none, the form is neither of the two, or `validate` refuses it.
    """
    path = Path(source)
    if str(source) in PACKAGED:
        path = packaged(str(source)) / "skills.json"
    if (path / MAPPING).is_file():
        return _from_markdown(path)
    if path.is_dir():
        found = [file for file in sorted(path.glob("*.json")) if GENERAL in _object(file)]
        if len(found) != 1:
            raise ValueError(
                f"{path} holds {len(found)} skill libraries; expected Markdown with {MAPPING}, or one JSON file with "
                f"{GENERAL}"
            )
        path = found[0]
    if not path.is_file():
        near = difflib.get_close_matches(str(source), PACKAGED, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"give a file, a folder, or one of {', '.join(PACKAGED)}"
        raise ValueError(f"no skill library at {source}; {hint}")
    document = _object(path)
    if GENERAL not in document:
        raise ValueError(f"{path} is no skill library: it is not a JSON object with {GENERAL}")
    return _from_json(document, str(path))


def packaged(environment: str) -> Path:
    """The folder of our own library for an environment, in both forms."""
    return Path(__file__).parent / "data" / PACKAGED[environment]


def save_json(library: Library, path: str | Path) -> None:
    """Write the JSON form. Raises ValueError when `validate` refuses the library."""
    validate(library, str(path))
    _write(Path(path), _json(_to_json(library)))


def save_markdown(library: Library, folder: str | Path) -> None:
    """Write the Markdown form into a folder. It has no ids: whoever reads it numbers the rules of each file.

    Raises: ValueError when `validate` refuses the library, or a text would not be read back as it is.
    """
    folder = Path(folder)
    validate(library, str(folder))
    texts = {GENERAL: _block("GENERAL SKILLS", library.general)}
    texts |= {name: _block(f"TASK: {name}", rules) for name, rules in library.sections.items()}
    texts |= {MISTAKES: _block("COMMON MISTAKES", library.mistakes)} if library.mistakes else {}
    mapping = {"skill_files": {name: f"{name}.md" for name in texts}, **_leading(library)}
    for (name, entry), (_, read) in zip(entries(library), entries(_from_texts(texts, mapping, "")), strict=True):
        if entry.line != read.line or list(asdict(entry).values())[1:] != list(asdict(read).values())[1:]:
            raise ValueError(
                f"{folder}: {next(iter(asdict(entry).values()))} in {name} cannot be written as Markdown: sentences "
                "start with a capital letter and stand on one line, and a title has no ': '"
            )
    for name, text in texts.items():
        _write(folder / f"{name}.md", f"{text}\n")
    _write(folder / MAPPING, _json(mapping))


def _block(title: str, found: Sequence[Rule | Mistake]) -> str:
    return "\n".join([f"### {title} ###", *(f"{n}. {entry.line}" for n, entry in enumerate(found, start=1))])


def _from_markdown(folder: Path) -> Library:
    mapping = _object(folder / MAPPING)
    files = mapping.get("skill_files")
    if not isinstance(files, Mapping) or GENERAL not in files:
        raise ValueError(f"{folder / MAPPING} has no skill_files with {GENERAL}")
    texts = {}
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(
                f"{folder / MAPPING}: {name!r} has the file {file!r}, expected the name of a file beside it"
            )
        texts[name] = _read(folder / file)
    return validate(_from_texts(texts, mapping, str(folder)), str(folder))


def _from_texts(texts: Mapping[str, str], mapping: Mapping[str, Any], where: str) -> Library:
    sections = {
        name: _rules(text, name, f"{where}/{name}.md")
        for name, text in texts.items()
        if name not in (GENERAL, MISTAKES)
    }
    found = _items(texts.get(MISTAKES, ""), _MISTAKE, f"{where}/{MISTAKES}.md", "what. Why: why. Instead: what to do.")
    return Library(
        general=_rules(texts[GENERAL], "general", f"{where}/{GENERAL}.md"),
        sections=sections,
        mistakes=tuple(Mistake(f"mistake_{n:03}", *groups) for n, groups in enumerate(found, start=1)),
        **_leads(mapping, where),
    )


def _rules(text: str, name: str, where: str) -> tuple[Rule, ...]:
    found = _items(text, _RULE, where, "Title: principle. Apply this when.")
    return tuple(
        Rule(f"{name}_{n:03}", title, principle, when[:1].upper() + when[1:] if when else "")
        for n, (title, principle, when) in enumerate(found, start=1)
    )


def _items(text: str, form: re.Pattern[str], where: str, expected: str) -> list[tuple[Any, ...]]:
    """The groups of each numbered line; titles and sentences around the list are not skills."""
    found = []
    for line in text.splitlines():
        if item := _ITEM.fullmatch(line.strip()):
            match = form.fullmatch(item[1])
            if match is None:
                raise ValueError(f"{where}: {line.strip()[:60]!r} is not of the form `{expected}`")
            found.append(match.groups())
    return found


def _from_json(document: Mapping[str, Any], where: str) -> Library:
    sections = [document[key] for key in SECTIONS if key in document]
    if len(sections) != 1 or not isinstance(sections[0], Mapping):
        raise ValueError(f"{where} must hold one object of skills by task type, {' or '.join(SECTIONS)}")
    library = Library(
        general=_entries_of(Rule, document[GENERAL], GENERAL, where),
        sections={name: _entries_of(Rule, rules, name, where) for name, rules in sections[0].items()},
        mistakes=_entries_of(Mistake, document.get(MISTAKES, []), MISTAKES, where),
        **_leads(document, where),
    )
    return validate(library, where)


def _entries_of(kind: type[E], items: Any, name: str, where: str) -> tuple[E, ...]:
    if not isinstance(items, list):
        raise ValueError(f"{where}: {name} is not a list of skills")
    keys = [f.name for f in fields(kind)]
    for number, item in enumerate(items):
        if (
            not isinstance(item, Mapping)
            or set(item) != set(keys)
            or not all(isinstance(v, str) for v in item.values())
        ):
            raise ValueError(f"{where}: entry {number} of {name} must be an object of the texts {', '.join(keys)}")
    return tuple(kind(**item) for item in items)


def _leads(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What leads a task to its section, in either form."""
    mapped, words = document.get("task_to_skill", {}), document.get("task_keywords", {})
    if not isinstance(mapped, Mapping) or not all(isinstance(name, str) for name in mapped.values()):
        raise ValueError(f"{where}: task_to_skill is not an object of task type -> section")
    if not isinstance(words, Mapping) or not all(
        isinstance(listed, list | tuple) and all(isinstance(word, str) for word in listed) for listed in words.values()
    ):
        raise ValueError(f"{where}: task_keywords is not an object of task type -> list of words")
    return {"task_to_skill": dict(mapped), "keywords": {name: tuple(listed) for name, listed in words.items()}}


def _leading(library: Library) -> dict[str, Any]:
    return {"task_to_skill": library.task_to_skill, "task_keywords": library.keywords}


def _to_json(library: Library) -> dict[str, Any]:
    return {
        GENERAL: [asdict(rule) for rule in library.general],
        SECTIONS[0]: {name: [asdict(rule) for rule in rules] for name, rules in library.sections.items()},
        MISTAKES: [asdict(mistake) for mistake in library.mistakes],
        **_leading(library),
    }


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where it holds something else. Raises ValueError when it is no JSON."""
    try:
        document = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    return document if isinstance(document, dict) else {}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"skills file {path} cannot be read ({reason})") from error


def _json(document: Any) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _write(path: Path, text: str) -> None:
    """In one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
