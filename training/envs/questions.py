"""Question files: what Search-QA asks, with the right answers; of the seven data sets of the papers or generated.

A folder holds `passages.jsonl` (left out where a retrieval server has them) and `questions_<split>.jsonl` with
{"id", "dataset", "question", "answers", "gold_ids"} a line. train and valid_seen ask questions of the same data sets,
those of valid_unseen occur in no training. `Task.source` is "<file>#<line>", its task type the name of the data set.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from training.cache import replaced
from training.envs.base import Task
from training.envs.passages import read_json_lines, read_passages

SPLITS = ("train", "valid_seen", "valid_unseen")
PASSAGES = "passages.jsonl"
TRAINED = ("nq", "hotpotqa")  # the data sets that the papers train on; the others are for evaluation alone
DATASETS = (*TRAINED, "triviaqa", "popqa", "2wikimultihopqa", "musique", "bamboogle")
HELD_OUT = 8  # of questions of the trained data sets whose file does not say train or test, one in so many is held out
_TABLES = (".parquet", ".jsonl", ".jsonl.gz")


def load_questions(folder: Path, split: str) -> list[Task]:
    """All questions of a split, in the order of the file. Raises ValueError where there are none."""
    path = folder / f"questions_{split}.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder}: no questions of split {split!r}; expected {path.name} there")
    records = _records(str(path), path.stat().st_mtime_ns)
    return [
        Task(r["id"], "searchqa", split, r["dataset"], r["question"], f"{path}#{number}")
        for number, r in enumerate(records)
    ]


def read_question(task: Task) -> Mapping[str, Any]:
    """The record of a task's question. Raises ValueError naming the file where it cannot be read."""
    path, _, line = task.source.rpartition("#")
    try:
        return _records(path, os.stat(path).st_mtime_ns)[int(line)]
    except (OSError, ValueError, IndexError) as error:
        raise ValueError(f"{task.source}: there is no such question ({error})") from error


@lru_cache(8)
def _records(path: str, stamp: int) -> tuple[dict[str, Any], ...]:
    return tuple(_question(record, where) for where, record in read_json_lines(Path(path)))


def _question(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A record in our form, whichever of the usual names its fields have. Raises ValueError naming `where`."""
    answers = record.get("answers", record.get("golden_answers"))
    dataset, text = record.get("dataset", record.get("data_source")), record.get("question")
    if isinstance(answers, str):
        answers = [answers]
    if not isinstance(text, str) or not text.strip() or not isinstance(dataset, str) or not isinstance(answers, list):
        raise ValueError(
            f"{where} is no question; expected question, answers (or golden_answers) and dataset (or data_source)"
        )
    if not all(isinstance(answer, str | int | float) for answer in answers):
        raise ValueError(f"{where} has an answer that is no text; expected a list of texts")
    answers = [answer for answer in map(str, answers) if answer.strip()]
    if not answers:
        raise ValueError(f"{where} has no answers; leave the question out")
    gold = record.get("gold_ids") or []
    if not isinstance(gold, list):
        raise ValueError(f"{where} has gold_ids {gold!r:.60}; expected a list of passage ids")
    dataset = dataset.removeprefix("searchR1_").lower()
    digest = hashlib.sha256(f"{text} {answers}".encode()).hexdigest()[:12]
    name = str(record.get("id") or digest)
    return {
        "id": name if name.startswith(f"{dataset}:") else f"{dataset}:{name}",
        "dataset": dataset,
        "question": " ".join(text.split()),
        "answers": answers,
        "gold_ids": [str(id) for id in gold],
    }


def import_questions(source: str | Path, destination: str | Path) -> dict[str, int]:
    """Bring questions, and passages where there are any, into `destination`; questions per split.

    Read are files named *question*, train*, test*, dev* or valid* (.jsonl, .jsonl.gz, .parquet) and a passage file
    named *corpus* or *passages* (.jsonl, .jsonl.gz), also the files that Search-R1 and SDAR prepare. A question of NQ
    or HotpotQA is a training question where its file or its `source_split` says train, and held out where it says
    test; where neither says, and where there is only one of the two for a data set, one in eight is held out by the
    hash of its id. The other data sets are valid_unseen.
    What an earlier import brought, passages too, is replaced once everything is read.
    Raises: ValueError where the folder holds no questions, a line is none, an id stands for two questions, or
    `destination` holds something else.
    """
    source, destination = Path(source), Path(destination)
    if not source.is_dir():
        raise ValueError(f"{source}: no such folder; give one with questions.jsonl(.gz) and corpus.jsonl(.gz)")
    ours = {PASSAGES, *(f"questions_{split}.jsonl" for split in SPLITS)}
    if destination.is_dir() and {path.name for path in destination.iterdir()} - ours:
        raise ValueError(f"{destination} is there and holds other files; choose another folder")
    files = sorted(path for path in source.rglob("*") if path.name.endswith(_TABLES) and path.is_file())
    files = [path for path in files if destination.resolve() not in path.resolve().parents]
    asked = [path for path in files if _is_questions(path.name.lower())]
    passages = [path for path in files if any(word in path.name.lower() for word in ("corpus", "passages"))]
    found: dict[str, tuple[dict[str, Any], str]] = {}
    for path in asked:
        for record, said in _with_split(path):
            if record["id"] in found and record != found[record["id"]][0]:
                raise ValueError(f"{path}: the id {record['id']!r} stands for two questions; give each its own")
            found[record["id"]] = record, said
    if not found:
        raise ValueError(f"{source}: no questions; expected questions.jsonl(.gz), or train and test .parquet")
    if len(passages) > 1:
        raise ValueError(f"{source}: two passage files, {passages[0].name} and {passages[1].name}; leave one")
    splits = _split(found)

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        if passages:
            write_lines(folder / PASSAGES, map(asdict, read_passages(passages[0])))
        for split in SPLITS:
            if splits[split]:
                write_lines(folder / f"questions_{split}.jsonl", splits[split])

    replaced(destination, write)
    return {split: len(records) for split, records in splits.items() if records}


def _is_questions(name: str) -> bool:
    return "question" in name or name.startswith(("train", "test", "dev", "valid"))


def _with_split(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Each question of a file, with what is said of its split: "train", "test" or ""."""
    of_file = "train" if path.name.startswith("train") else "" if "question" in path.name.lower() else "test"
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        table = pq.read_table(path).to_pylist()
        rows = iter([(f"{path}:{n}", row) for n, row in enumerate(table, start=1)])
    else:
        rows = read_json_lines(path)
    named = {"dataset": path.parent.name} if path.parent.name in DATASETS else {}  # a folder a data set, as FlashRAG
    for where, row in rows:
        row = row if {"dataset", "data_source"} & row.keys() else {**row, **named}
        said = str(row.get("source_split") or row.get("split") or of_file).lower()
        yield _question(row, where), "train" if "train" in said else "test" if said else ""


def _split(found: Mapping[str, tuple[dict[str, Any], str]]) -> dict[str, list[dict[str, Any]]]:
    said: dict[str, set[str]] = {}
    for record, where in found.values():
        said.setdefault(record["dataset"], set()).add(where)
    splits: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for record, where in found.values():
        if record["dataset"] not in TRAINED:
            splits["valid_unseen"].append(record)
            continue
        if said[record["dataset"]] != {"train", "test"}:
            number = int(hashlib.sha256(record["id"].encode()).hexdigest(), 16)
            where = "train" if number % HELD_OUT else "test"
        splits["train" if where == "train" else "valid_seen"].append(record)
    return splits


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line, in one step."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    os.replace(partial, path)
