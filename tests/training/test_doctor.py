"""The doctor's check of action words (case B39); what its command prints is in test_cli.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnostics.artifact import save_skills
from diagnostics.records import Skill
from training import doctor
from training.doctor import dialect_mismatches
from training.envs.questions import write_lines
from training.envs.webshop import catalogue
from training.envs.webshop.folders import import_shop

HOLDING = ("go to desk 1", "move mug 1 to desk 1", "look")


@pytest.mark.parametrize(
    "text",
    [
        "Then put apple 1 in/on fridge 1.",
        "commands: put (object) in/on (receptacle)",
        "Then Put mug 1 on desk 1, do not move it to the fridge.",
        "put the mug in/on the desk",
        "Take it and place it at once.",
        "Put it there, then move to the next shelf.",
        "Then place the object.",
        "Put the clean mug on the desk.",
    ],
)
def test_other_words_than_the_engines_are_reported(text: str) -> None:
    (fault,) = dialect_mismatches(HOLDING, [("a skill", text)])
    assert fault.startswith("a skill says ") and fault.endswith("the engine says `move X to Y`")


@pytest.mark.parametrize(
    "text",
    [
        "Then move apple 1 to fridge 1.",
        "Take the mug, then move it to the desk. Put it there, then look around in the room.",
        "The task is to put a clean apple in fridge: clean it, then move it to the fridge.",
        "Go to the first place and look; the second place comes next.",
        "",
    ],
)
def test_the_engines_words_are_not(text: str) -> None:
    assert dialect_mismatches(HOLDING, [("a skill", text)]) == []


def test_engines_of_another_dialect() -> None:
    assert "put X in/on Y" in dialect_mismatches(("put mug 1 in/on desk 1",), [("a skill", "move it to the desk")])[0]
    assert "neither" in dialect_mismatches(("look",), [])[0]


@pytest.mark.parametrize("name", ["household", "alfworld"])
def test_our_own_library_is_clean_for_every_kind_of_task(name: str) -> None:
    texts = list(doctor._skill_texts(name))
    assert len(texts) == 7  # six kinds of task, and the whole
    assert dialect_mismatches(HOLDING, texts) == []


@pytest.mark.parametrize(
    "source",
    [
        "SDAR/skills/alfworld",  # Markdown
        "SDAR/skills/alfworld/claude_style_skills.json",
        "SkillRL/memory_data/alfworld",  # JSON, beside a file that is no library
    ],
)
def test_the_public_libraries_are_reported_in_any_form(shared: Path, source: str) -> None:
    texts = list(doctor._skill_texts(str(shared / "data/skills" / source)))
    faults = dialect_mismatches(HOLDING, texts)
    assert len(faults) == len(texts) >= 6
    assert any("alfworld" in fault and "for heat" in fault for fault in faults)


def test_skills_of_an_artifact(tmp_path: Path) -> None:
    skills = {"t1": Skill("Put it in/on the desk.", "hindsight", "a"), "t2": Skill("Move it to it.", "hindsight", "b")}
    save_skills(tmp_path / "skills", skills)
    (fault,) = dialect_mismatches(HOLDING, doctor._skill_texts(str(tmp_path / "skills")))
    assert fault.startswith("skill t1")


def test_something_is_bought_and_imported_shops_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "cache"))
    assert "the invented shop works" in doctor._webshop()
    files = catalogue.generate(tmp_path / "files", 70)
    folder, told = import_shop(files)
    assert doctor._webshop().startswith(f"{folder}: {told} (test 500")


def test_search_qa_is_asked_a_question_and_imports_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path))
    assert "the invented world works" in doctor._search_qa()
    (tmp_path / "searchqa").mkdir()
    with pytest.raises(ValueError, match="searchqa holds no questions"):
        doctor._search_qa()
    question = {"id": "a", "dataset": "nq", "question": "Who?", "answers": ["x"]}
    write_lines(tmp_path / "searchqa" / "questions_train.jsonl", [question])
    assert doctor._search_qa().endswith("searchqa: train 1, without passages: name a server")


def test_our_own_texts_speak_the_engines_dialect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path))
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    found = {finding.name: finding for finding in doctor.examine()}
    assert found["dialect"].well, found["dialect"].text
