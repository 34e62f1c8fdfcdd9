"""The invented world: decided by its arguments, split by entities, answerable from its passages alone."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from training.envs.fact_world import SEEN, SIZES, UNSEEN, generate, parts
from training.envs.passages import Passage, read_passages
from training.envs.questions import PASSAGES, SPLITS, load_questions, read_question
from training.envs.search_folders import fact_world_folder
from training.models.search_expert import expert_move
from training.models.search_expert import read_question as parse

NAME = re.compile(r"(?:The )?[A-Z]\w+(?: [A-Z]\w+)?")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate(tmp_path_factory.mktemp("world"), seed=5)


@pytest.fixture(scope="module")
def passages(world: Path) -> dict[str, Passage]:
    return {passage.id: passage for passage in read_passages(world / PASSAGES)}


def test_same_arguments_same_bytes(world: Path, tmp_path: Path) -> None:
    again, other = generate(tmp_path / "again", seed=5), generate(tmp_path / "other", seed=6)
    for file in sorted(world.iterdir()):
        assert (again / file.name).read_bytes() == file.read_bytes()
        assert (other / file.name).read_bytes() != file.read_bytes()


def test_sizes_and_as_many_of_either_hop(world: Path) -> None:
    for split in SPLITS:
        tasks = load_questions(world, split)
        assert Counter(task.task_type for task in tasks) == {"one_hop": SIZES[split] / 2, "two_hop": SIZES[split] / 2}
        assert len({task.id for task in tasks}) == len({task.description for task in tasks}) == SIZES[split]
    with pytest.raises(ValueError, match="at most .* names of a kind"):
        generate(world / "large", {"train": 5000})


def test_splits_share_no_entity(world: Path, passages: dict[str, Passage]) -> None:
    def names(split: str) -> set[str]:
        records = [read_question(task) for task in load_questions(world, split)]
        texts = [passages[id].text for record in records for id in record["gold_ids"]]
        named = {name for text in texts for name in NAME.findall(text) if name != "It"}
        return {name.split()[-1] if name.split()[0] in parts()["first"] else name for name in named}

    found = {split: names(split) for split in SPLITS}
    assert all(len(found[split]) > 20 for split in SPLITS)
    for one, other in (("train", "valid_seen"), ("train", "valid_unseen"), ("valid_seen", "valid_unseen")):
        assert not found[one] & found[other]


def test_the_gold_passages_lead_to_the_answer_and_no_other_does(world: Path, passages: dict[str, Passage]) -> None:
    for split in SPLITS:
        for task in load_questions(world, split):
            record = read_question(task)
            gold = [passages[id] for id in record["gold_ids"]]
            assert len(gold) == (2 if task.task_type == "two_hop" else 1)
            assert gold[0].title in task.description and record["answers"][0] in gold[-1].text
            if len(gold) == 2:
                assert gold[1].title in gold[0].text and gold[1].title not in task.description
            seen = ["<information>\n" + "\n".join(f"{n}. {p.title}: {p.text}" for n, p in enumerate(gold, 1))]
            assert expert_move(task.description, seen).action == f"<answer>{record['answers'][0]}</answer>"
            rest = [line for line in seen[0].splitlines() if not line.endswith(gold[-1].text)]
            assert "<search>" in expert_move(task.description, ["\n".join(rest)]).action
    titles = Counter(passage.title for passage in passages.values())
    assert set(titles.values()) == {1}  # a name is one thing


def test_unseen_questions_are_other_chains_or_other_words(world: Path) -> None:
    kinds = {split: {parse(task.description)[0] for task in load_questions(world, split)} for split in SPLITS}  # type: ignore[index]
    assert kinds["train"] == kinds["valid_seen"] == set(SEEN)
    assert kinds["valid_unseen"] == set(UNSEEN)
    assert not {form.wording for form in SEEN} & {form.wording for form in UNSEEN}
    chains = [{form.chain for form in forms if len(form.chain) == 2} for forms in (SEEN, UNSEEN)]
    assert not chains[0] & chains[1]


def test_the_expert_is_of_this_world_only() -> None:
    with pytest.raises(ValueError, match="not of the invented world"):
        expert_move("Why is the sky blue?", [])
    assert expert_move("Who wrote The Red Sea?", []).reply == (
        "<think>I need the author of The Red Sea.</think><search>The Red Sea by</search>"
    )


def test_a_folder_is_made_once_and_is_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path))
    sizes = {"train": 12, "valid_seen": 8, "valid_unseen": 8}
    folder = fact_world_folder(sizes=sizes)
    stamp = (folder / PASSAGES).stat().st_mtime_ns
    assert fact_world_folder(sizes=sizes) == folder and (folder / PASSAGES).stat().st_mtime_ns == stamp
    assert fact_world_folder(sizes=sizes, seed=1) != folder
    chosen = fact_world_folder(tmp_path / "chosen", sizes)
    assert (chosen / PASSAGES).read_bytes() == (folder / PASSAGES).read_bytes()
    with pytest.raises(ValueError, match="holds no questions of these sizes and seed"):
        fact_world_folder(tmp_path / "chosen", sizes, seed=1)
