"""Libraries of skills: both public forms, what ours say, what no skill may say, and one sentence for what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from training.envs.fact_world import HOPS
from training.envs.questions import DATASETS
from training.envs.rooms import DESCRIPTIONS
from training.skills.library import load_library, packaged, save_json, save_markdown
from training.skills.schema import Library, Mistake, Rule, entries, given_away, validate

OURS = {
    "alfworld": {"look_at_obj_in_light", "heat", "cool", "clean", "pick_two_obj_and_place", "pick_and_place"},
    "webshop": {"apparel", "footwear", "home_decor", "electronics", "accessories", "beauty_health", "other"},
    "search_qa": {"direct_retrieval", "multi_hop_reasoning", "entity_attribute_lookup", "comparison"},
}
SMALL = Library(
    general=(Rule("general_001", "Look", "Look around.", "At the start."),),
    sections={"heat": (Rule("heat_001", "Heat: or not", "Heat it."), Rule("heat_002", "Then", "Move it.", "TV on."))},
    mistakes=(Mistake("mistake_001", "Waiting.", "It is easy.", "Act."),),
    task_to_skill={"pick_heat": "heat"},
    keywords={"pick_heat": ("hot",)},
)
PUBLIC = {
    "SDAR/skills/alfworld": (12, {"pick_and_place": 5, "look_at_obj_in_light": 10, "clean": 6, "heat": 5, "cool": 5}),
    "SDAR/skills/search": (
        10,
        {"direct_retrieval": 5, "multi_hop_reasoning": 5, "entity_attribute_lookup": 5, "compare": 5},
    ),
    "SDAR/skills/webshop": (
        15,
        {
            "apparel": 6, "footwear": 5, "home_decor": 6, "electronics": 6, "accessories": 5, "beauty_health": 5,
            "other": 6,
        },
    ),
    "SkillRL/memory_data/alfworld": (
        12,
        {"pick_and_place": 5, "look_at_obj_in_light": 5, "clean": 6, "heat": 5, "cool": 5, "examine": 6},
    ),
    "SkillRL/memory_data/search/claude_style_skills_search.json": (
        10,
        {"direct_retrieval": 5, "multi_hop_reasoning": 5, "entity_attribute_lookup": 5, "comparison": 5},
    ),
    "SkillRL/memory_data/webshop": (
        15,
        {
            "apparel": 6, "footwear": 5, "home_decor": 6, "electronics": 6, "accessories": 5, "beauty_health": 5,
            "other": 6,
        },
    ),
}  # fmt: skip


def sentences(library: Library) -> Iterator[str]:
    return (entry.line for _, entry in entries(library))


# --- ours


@pytest.mark.parametrize("name", OURS)
def test_our_markdown_is_the_export_of_our_json(name: str, tmp_path: Path) -> None:
    library = load_library(name)
    assert library == load_library(packaged(name)) == load_library(packaged(name) / "skills.json")
    save_markdown(library, tmp_path)
    kept = {file.name: file.read_text() for file in packaged(name).iterdir() if file.name != "skills.json"}
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == kept
    save_json(library, tmp_path / "skills.json")
    assert load_library(tmp_path / "skills.json") == library


@pytest.mark.parametrize("name", OURS)
def test_our_libraries_are_whole_and_short(name: str) -> None:
    library = load_library(name)
    assert set(library.sections) == OURS[name] and library.general and library.mistakes
    assert set(library.task_to_skill.values()) == OURS[name]
    assert len(library.text(*library.sections, mistakes=True).split()) < 650
    assert max(len(line.split()) for line in sentences(library)) <= 35


def test_household_games_have_the_library_of_alfworld() -> None:
    assert load_library("household") == load_library("alfworld")


def test_our_alfworld_skills_say_the_engines_commands() -> None:
    library = load_library("alfworld")
    said = library.text(*library.sections, mistakes=True)
    for command in ("take X from Y", "move X to Y", "heat X with Y", "cool X with Y", "clean X with Y", "use"):
        assert f"`{command}`" in said
    assert not re.search(r"\b(?:put|pick up|drop|toggle|turn on)\b", said, re.IGNORECASE)


def test_every_game_leads_to_its_section_by_type_and_by_sentence() -> None:
    library = load_library("household")
    for kind, templates in DESCRIPTIONS.items():
        section = library.section(kind)
        assert section is not None
        for template in templates:
            assert library.section_of_sentence(template.format(o="mug", r="cabinet")) == section


@pytest.mark.parametrize(
    ("sentence", "section"),
    [
        ("i need a pair of women's hiking boots, size 8, and price lower than 60 dollars", "footwear"),
        ("find me a machine washable long sleeve t-shirt in navy", "apparel"),
        ("i am looking for a wooden computer desk for the living room", "home_decor"),
        ("buy a fast charging usb cable", "electronics"),
        ("i want spare batteries", "electronics"),
        ("a leather crossbody bag", "accessories"),
        ("cruelty free shampoo for dry scalp", "beauty_health"),
        ("gluten free crackers that I chat about", "other"),  # "hat" inside a word is no keyword
        ("", None),
    ],
)
def test_a_request_leads_to_its_product_family(sentence: str, section: str | None) -> None:
    assert load_library("webshop").section_of_sentence(sentence) == section


@pytest.mark.parametrize(
    ("question", "section"),
    [
        ("Which of the two films came out earlier?", "comparison"),
        ("What is the capital of that country?", "entity_attribute_lookup"),
        ("Where was the director of film X educated?", "multi_hop_reasoning"),
        ("Who was the wife of the man who founded the club?", "multi_hop_reasoning"),
        ("When did the war end?", "direct_retrieval"),
    ],
)
def test_a_question_leads_to_its_kind(question: str, section: str) -> None:
    library = load_library("search_qa")
    assert library.section_of_sentence(question) == section
    assert library.section("hotpotqa") == "multi_hop_reasoning"  # where the data set is known, it decides


def test_every_data_set_of_search_qa_leads_to_a_section() -> None:
    library = load_library("searchqa")
    assert library == load_library("search_qa")
    assert "query_type_skills" in json.loads((packaged("searchqa") / "skills.json").read_text())  # the public key
    assert all(library.section(dataset) is not None for dataset in (*DATASETS, *HOPS))
    assert library.section("one_hop") != library.section("two_hop")
    assert library.section("no data set") is None


@pytest.mark.parametrize("name", OURS)
def test_our_texts_share_no_run_of_seven_words_with_the_public_ones(name: str, shared: Path) -> None:
    def runs(lines: Iterator[str]) -> set[tuple[str, ...]]:
        words = [re.findall(r"[a-z']+", line.lower()) for line in lines]
        return {tuple(line[k : k + 7]) for line in words for k in range(len(line) - 6)}

    public = set().union(*(runs(sentences(load_library(shared / "data/skills" / source))) for source in PUBLIC))
    assert len(public) > 3000
    assert runs(sentences(load_library(name))) & public == set()


# --- the public ones


@pytest.mark.parametrize("source", PUBLIC)
def test_public_libraries_import(source: str, shared: Path) -> None:
    general, sections = PUBLIC[source]
    library = load_library(shared / "data/skills" / source)
    assert len(library.general) == general
    assert {name: len(rules) for name, rules in library.sections.items()} == sections
    assert bool(library.mistakes) == source.startswith("SkillRL")
    assert all(rule.when_to_apply for _, rule in entries(library) if isinstance(rule, Rule))


def test_both_public_forms_of_one_library_agree(shared: Path) -> None:
    markdown = load_library(shared / "data/skills/SDAR/skills/webshop")
    document = load_library(shared / "data/skills/SDAR/skills/webshop/claude_style_skills.json")
    assert list(markdown.sections) == list(document.sections)
    pairs = list(zip(entries(markdown), entries(replace(document, mistakes=())), strict=True))
    assert len(pairs) == 15 + 39
    for (name, one), (other_name, other) in pairs:
        assert isinstance(one, Rule) and isinstance(other, Rule)
        assert name == other_name and one.title.replace("and", "&") == other.title.replace("and", "&")


@pytest.mark.parametrize("source", [source for source in PUBLIC if source.startswith("SkillRL")])
def test_a_public_json_library_goes_through_markdown_unchanged(source: str, shared: Path, tmp_path: Path) -> None:
    library = load_library(shared / "data/skills" / source)
    save_markdown(library, tmp_path)
    read = load_library(tmp_path)
    assert [entry.line for _, entry in entries(read)] == [entry.line for _, entry in entries(library)]
    assert list(read.sections) == list(library.sections)


@pytest.mark.parametrize(
    ("source", "kind", "section"),
    [
        ("SDAR/skills/alfworld", "pick_heat_then_place_in_recep", "heat"),
        ("SDAR/skills/alfworld", "pick_two_obj_and_place", "pick_and_place"),
        ("SDAR/skills/alfworld", "pick_and_place_simple", "pick_and_place"),  # not in its mapping
        ("SkillRL/memory_data/alfworld", "pick_cool_then_place_in_recep", "cool"),  # no mapping at all
        ("SkillRL/memory_data/alfworld", "look_at_obj_in_light", "look_at_obj_in_light"),
        ("SkillRL/memory_data/alfworld", "pick_two_obj_and_place", None),
    ],
)
def test_task_types_lead_to_public_sections(shared: Path, source: str, kind: str, section: str | None) -> None:
    assert load_library(shared / "data/skills" / source).section(kind) == section


# --- forms


def test_both_forms_hold_everything(tmp_path: Path) -> None:
    library = replace(SMALL, sections={"heat": (Rule("heat_001", "Heat", "Heat it."), SMALL.sections["heat"][1])})
    save_json(library, tmp_path / "a.json")
    save_markdown(library, tmp_path / "b")
    assert load_library(tmp_path / "a.json") == load_library(tmp_path / "b") == library
    assert load_library(tmp_path) == library  # the one JSON library of a folder
    assert "2. Then: Move it. Apply this TV on." in (tmp_path / "b" / "heat.md").read_text().splitlines()


def test_the_other_key_of_search_qa(tmp_path: Path) -> None:
    save_json(SMALL, tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    document["query_type_skills"] = document.pop("task_specific_skills")
    (tmp_path / "b.json").write_text(json.dumps(document))
    assert load_library(tmp_path / "b.json") == SMALL


def test_what_markdown_cannot_hold_is_refused_and_nothing_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"heat_001 in heat cannot be written as Markdown"):
        save_markdown(SMALL, tmp_path / "a")  # a title with a colon
    assert not (tmp_path / "a").exists()


def test_text_and_ids_of_a_section() -> None:
    assert SMALL.text("heat", mistakes=True).splitlines() == [
        "General:",
        "- Look: Look around. Apply this at the start.",
        "Heat:",
        "- Heat: or not: Heat it.",
        "- Then: Move it. Apply this TV on.",
        "Mistakes to avoid:",
        "- Waiting. Why: It is easy. Instead: Act.",
    ]
    assert SMALL.ids("heat", mistakes=True) == ("general_001", "heat_001", "heat_002", "mistake_001")
    assert SMALL.text() == "General:\n- Look: Look around. Apply this at the start."
    assert replace(SMALL, general=(), mistakes=()).text(mistakes=True) == ""


# --- refusals


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"general": (), "sections": {}}, "x holds no skills"),
        ({"general": (Rule("heat_001", "a", "b"),)}, "an id in heat is 'heat_001' for the second time"),
        ({"general": (Rule("", "a", "b"),)}, "an id in general_skills is empty"),
        ({"general": (Rule("a", " ", "b"),)}, "a in general_skills has an empty title"),
        ({"general": (Rule("a", "b", ""),)}, "a in general_skills has an empty principle"),
        ({"mistakes": (Mistake("m", "a", "", "c"),)}, "m in common_mistakes has an empty why_it_happens"),
        ({"sections": {"heat": ()}}, "section 'heat' has no skills"),
        ({"task_to_skill": {"boil": "stove"}}, "task_to_skill leads 'boil' to 'stove', which is not a section"),
        ({"keywords": {"fry": ("fry",)}}, "task_keywords has 'fry', which leads to no section"),
        ({"general": (Rule("a", "b", "The mug 2 is hot."),)}, "a in general_skills names 'mug 2'"),
    ],
)
def test_a_library_that_cannot_be_used_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as refusal:
        validate(replace(SMALL, **changed), "x")
    assert str(refusal.value).startswith("x") and "\n" not in str(refusal.value)
    assert validate(SMALL, "x") is SMALL


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Look at mug 2 first", "mug 2"),
        ("It is in CoffeeTable 1.", "CoffeeTable 1"),
        ("go to footstool 3", "to footstool 3"),  # a kind that only ALFWorld's own games have
        ("Say <answer>Paris</answer>", "<answer>Paris</answer>"),
        ("The answer is Paris", "answer is Paris"),
        ("answer: 1912", "answer: 1912"),
        ("click[B07XYZ1234]", "B07XYZ1234"),
        ("Use `take X from Y`; the mug is listed with its number", None),
        ("Answer inside <answer>...</answer>, a short one", None),
        ("The answer is a name, a date or a number", None),
        ("Keep the top 3 results, at most 15 steps, size 8", None),
        ("Add the year, such as (entity) release date 2023", None),
    ],
)
def test_what_gives_a_task_away(text: str, found: str | None) -> None:
    assert given_away(text) == found


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "holds 0 skill libraries"),
        ({"a.json": {"general_skills": []}, "b.json": {"general_skills": []}}, "holds 2 skill libraries"),
        ({"a.json": "{"}, "a.json is not JSON"),
        ({"a.json": {"general_skills": []}}, "must hold one object of skills by task type"),
        ({"a.json": {"general_skills": {}, "query_type_skills": {}}}, "general_skills is not a list"),
        (
            {"a.json": {"general_skills": [{"title": "a"}], "query_type_skills": {}}},
            "entry 0 of general_skills must be an object of the texts skill_id, title, principle, when_to_apply",
        ),
        ({"a.json": {"general_skills": [], "query_type_skills": {}, "task_to_skill": []}}, "task_to_skill is not an"),
        ({"a.json": {"general_skills": [], "query_type_skills": {}, "task_keywords": {"a": "b"}}}, "task_keywords is"),
        ({"skill_mapping.json": {}}, "has no skill_files with general_skills"),
        ({"skill_mapping.json": {"skill_files": {"general_skills": "../a.md"}}}, "expected the name of a file beside"),
        ({"skill_mapping.json": {"skill_files": {"general_skills": "a.md"}}}, "a.md cannot be read (No such file"),
        (
            {"skill_mapping.json": {"skill_files": {"general_skills": "a.md"}}, "a.md": "1. no colon"},
            "'1. no colon' is not of the form `Title: principle. Apply this when.`",
        ),
        ({"skill_mapping.json": {"skill_files": {"general_skills": "a.md"}}, "a.md": "# none"}, "holds no skills"),
    ],
)
def test_files_that_are_no_library_are_refused(files: dict[str, Any], said: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(said)) as refusal:
        load_library(tmp_path)
    assert "\n" not in str(refusal.value) and str(tmp_path) in str(refusal.value)


def test_a_library_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no skill library at alfwrld; did you mean 'alfworld'\?"):
        load_library("alfwrld")
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(ValueError, match=r"a\.json is no skill library"):
        load_library(tmp_path / "a.json")
