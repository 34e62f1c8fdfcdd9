"""Question files in their usual forms, and the splits they make."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from training.envs.panels import disjoint, panel
from training.envs.passages import read_json_lines, read_passages
from training.envs.questions import DATASETS, PASSAGES, import_questions, load_questions, read_question, write_lines

SEARCHQA = "data/searchqa"


def asked(id: str, dataset: str, **more: Any) -> dict[str, Any]:
    return {"id": id, "dataset": dataset, "question": f"Who is  {id}?", "answers": [id], **more}


def test_records_and_tasks(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "questions_train.jsonl",
        [
            asked("nq:1", "nq"),
            {"question": "Why?", "golden_answers": "so", "data_source": "searchR1_hotpotqa", "id": 7},
            {"question": "Why not?", "golden_answers": ["so", " ", "thus"], "dataset": "nq", "gold_ids": None},
        ],
    )
    tasks = load_questions(tmp_path, "train")
    assert [task.id for task in tasks[:2]] == ["nq:1", "hotpotqa:7"]
    assert tasks[2].id.startswith("nq:") and len(tasks[2].id) == 15  # without an id, by its content
    assert [task.task_type for task in tasks] == ["nq", "hotpotqa", "nq"]
    assert tasks[0].description == "Who is nq:1?"
    records = [read_question(task) for task in tasks]
    assert [record["answers"] for record in records] == [["nq:1"], ["so"], ["so", "thus"]]
    assert records[2]["gold_ids"] == []
    with pytest.raises(ValueError, match="no questions of split 'valid_seen'"):
        load_questions(tmp_path, "valid_seen")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"dataset": "nq", "answers": ["a"]}, "is no question; expected question, answers"),
        ({"question": "Why?", "answers": ["a"]}, "is no question"),
        ({"question": "Why?", "dataset": "nq", "answers": [" "]}, "has no answers"),
    ],
)
def test_a_line_that_is_no_question(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    write_lines(tmp_path / "questions_train.jsonl", [asked("nq:1", "nq"), record])
    with pytest.raises(ValueError, match=f"questions_train.jsonl:2 {message}"):
        load_questions(tmp_path, "train")


def test_prepared_tables_import(tmp_path: Path) -> None:
    """What Search-R1 and SDAR prepare: train and test .parquet, and a corpus with `contents`."""
    source = tmp_path / "source"
    source.mkdir()
    for name, datasets in (("train", ("nq", "hotpotqa")), ("test", ("nq", "hotpotqa", "musique", "bamboogle"))):
        rows = [
            {"id": f"{name}_{n}", "question": f"Who {n}?", "golden_answers": ["x"], "data_source": dataset}
            for n, dataset in enumerate(datasets)
        ]
        pq.write_table(pa.Table.from_pylist(rows), source / f"{name}.parquet")
    with gzip.open(source / "wiki_corpus.jsonl.gz", "wt") as file:
        file.write(json.dumps({"id": 3, "contents": '"Ada"\nShe counted.'}) + "\n")
    counts = import_questions(source, tmp_path / "there")
    assert counts == {"train": 2, "valid_seen": 2, "valid_unseen": 2}
    assert [task.task_type for task in load_questions(tmp_path / "there", "valid_unseen")] == ["musique", "bamboogle"]
    assert [p.title for p in read_passages(tmp_path / "there" / PASSAGES)] == ["Ada"]
    assert import_questions(source, tmp_path / "there") == counts  # again: the same
    (source / "train.parquet").unlink()
    (source / "test.parquet").unlink()
    with pytest.raises(ValueError, match="no questions; expected"):
        import_questions(source, tmp_path / "there")
    with pytest.raises(ValueError, match="no such folder"):
        import_questions(tmp_path / "nowhere", tmp_path / "there")


def test_a_folder_a_data_set(tmp_path: Path) -> None:
    for dataset in ("triviaqa", "popqa"):
        (tmp_path / dataset).mkdir()
        write_lines(tmp_path / dataset / "test.jsonl", [{"question": "Who?", "golden_answers": ["x"], "id": "t"}])
    assert import_questions(tmp_path, tmp_path / "there") == {"valid_unseen": 2}


def test_a_data_set_without_a_training_part_is_divided_by_id(tmp_path: Path) -> None:
    questions = [asked(f"nq:{n}", "nq", source_split="dev(open)") for n in range(400)]
    for name, rows in (("a", questions), ("b", questions[::-1])):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "questions.jsonl", rows)
        counts = import_questions(tmp_path / name, tmp_path / name / "there")
        assert counts.keys() == {"train", "valid_seen"} and 25 <= counts["valid_seen"] <= 80
    held = [{t.id for t in load_questions(tmp_path / name / "there", "valid_seen")} for name in ("a", "b")]
    assert held[0] == held[1]


def test_the_gathered_questions(shared: Path, tmp_path: Path) -> None:
    if not (shared / SEARCHQA).is_dir():
        pytest.skip("the gathered questions (../shared/data/searchqa) are not beside this checkout")
    counts = import_questions(shared / SEARCHQA, tmp_path)
    assert sum(counts.values()) == 4072 and counts["valid_unseen"] == 225
    tasks = {split: load_questions(tmp_path, split) for split in counts}
    assert {task.task_type for split in tasks for task in tasks[split]} <= set(DATASETS)
    disjoint(tasks["train"], panel(tasks["valid_seen"], 0, 0))
    disjoint(tasks["train"], panel(tasks["valid_unseen"], 0, 0))
    assert sum(1 for _ in read_passages(tmp_path / PASSAGES)) == 22173
    known = {passage.id for passage in read_passages(tmp_path / PASSAGES)}
    gold = [read_question(task)["gold_ids"] for split in tasks for task in tasks[split]]
    assert {id for ids in gold for id in ids} <= known and sum(map(bool, gold)) == 3655


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"answers": [None]}, "has an answer that is no text"),
        ({"gold_ids": "12"}, "has gold_ids '12'; expected a list"),  # never read letter by letter
        ({"gold_ids": 5}, "has gold_ids 5; expected a list"),
    ],
)
def test_a_field_of_another_form_is_named(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    write_lines(tmp_path / "questions_train.jsonl", [{**asked("nq:1", "nq"), **more}])
    with pytest.raises(ValueError, match=f"questions_train.jsonl:1 {message}"):
        load_questions(tmp_path, "train")


def test_one_id_for_two_questions_is_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "questions.jsonl", [asked("nq:1", "nq"), asked("nq:1", "nq"), asked("nq:2", "nq")])
    assert import_questions(tmp_path, tmp_path / "there") == {"train": 2}
    write_lines(tmp_path / "more_questions.jsonl", [{**asked("nq:1", "nq"), "answers": ["another"]}])
    with pytest.raises(ValueError, match=r"questions.jsonl: the id 'nq:1' stands for two questions"):
        import_questions(tmp_path, tmp_path / "there")


def test_an_import_is_replaced_by_a_complete_one_only(tmp_path: Path) -> None:
    """What failed leaves nothing behind; passages of an earlier import never stay beside other questions."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    write_lines(source / "questions.jsonl", [asked("nq:1", "nq")])
    (source / "corpus.jsonl").write_text('{"title": "T", "text": "word"}\n\n')
    import_questions(source, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert set(before) == {PASSAGES, "questions_train.jsonl"}
    for wrong in ('{"title": "T"}', '{"title": "T", "te', "[1]"):
        (source / "corpus.jsonl").write_text(wrong)
        with pytest.raises(ValueError, match=r"corpus.jsonl:1 is no"):
            import_questions(source, out)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (source / "corpus.jsonl").unlink()
    import_questions(source, out)
    assert [path.name for path in out.iterdir()] == ["questions_train.jsonl"]
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files; choose another folder"):
        import_questions(source, out)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_a_line_that_is_no_object_is_named_with_its_file(tmp_path: Path) -> None:
    for text, message in (("[1]", r"a.jsonl:1 is no JSON object"), ("{}\n{", r"a.jsonl:2 is no JSON object")):
        (tmp_path / "a.jsonl").write_text(text)
        with pytest.raises(ValueError, match=message):
            list(read_json_lines(tmp_path / "a.jsonl"))
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}\n\n')
    assert [record["a"] for _, record in read_json_lines(tmp_path / "a.jsonl")] == [1, 2]
    packed = bytearray(gzip.compress(b'{"a": 1}\n' * 500))
    packed[20:30] = bytes(10)
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    with pytest.raises(ValueError, match=r"a.jsonl.gz cannot be read"):
        list(read_json_lines(tmp_path / "a.jsonl.gz"))
