"""What BM25 finds of the gathered questions, over all of them that have gold passages."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.retrieval import gold_found
from training.envs.passages import Passage
from training.envs.questions import PASSAGES, import_questions, write_lines
from training.envs.retrievers import open_retriever

SHARES = {
    "nq": (2655, 0.797),
    "hotpotqa": (900, 0.919),
    "musique": (100, 0.84),
}  # questions, share with one in the top 3


def test_shares_of_the_gathered_questions(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = shared / "data" / "searchqa"
    if not source.is_dir():
        pytest.skip("the gathered questions (../shared/data/searchqa) are not beside this checkout")
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "cache"))
    import_questions(source, tmp_path)
    found = gold_found(tmp_path, open_retriever(str(tmp_path / PASSAGES), 1.0), 3)
    assert {name: len(hits) for name, hits in found.items()} == {name: n for name, (n, _) in SHARES.items()}
    for name, (_, share) in SHARES.items():
        assert sum(one for one, _ in found[name]) / len(found[name]) == pytest.approx(share, abs=0.005)
    assert sum(every for _, every in found["musique"]) < 20  # one search is not enough for several hops


def test_what_is_counted(tmp_path: Path) -> None:
    rows = [("nq:1", ["a"]), ("nq:2", ["a", "b"]), ("nq:3", ["c"]), ("nq:4", [])]
    questions = [{"id": i, "dataset": "nq", "question": i, "answers": ["x"], "gold_ids": gold} for i, gold in rows]
    write_lines(tmp_path / "questions_train.jsonl", questions)

    class Always:
        def search(self, query: str, k: int) -> list[Passage]:
            return [Passage("a", "", ""), Passage("z", "", "")]

    found = gold_found(tmp_path, Always(), 3)
    assert sorted(found["nq"]) == [(False, False), (True, False), (True, True)]
    assert len(gold_found(tmp_path, Always(), 3, limit=2)["nq"]) == 2
