"""Passages found locally and by a server; a server that fails is an error, never a search without results."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import socket
from pathlib import Path

import numpy as np
import pytest

from tests.training.retrieval_server import found, serving
from training.envs import bm25, retrievers
from training.envs.base import OutsideError
from training.envs.passages import Passage, PassageStore, line_ends, passage_of, read_passages
from training.envs.questions import write_lines
from training.envs.retrievers import Bm25Retriever, HttpRetriever, open_retriever, passage_index

TEXTS = ["the cat sat", "a cat and a cat", "dogs bark", "cat sat sat on a long mat of wool", "the cat sat"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(retrievers, "PAUSE", 0.0)
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def passages(tmp_path: Path) -> Path:
    path = tmp_path / "passages.jsonl"
    write_lines(path, [{"id": f"p{n}", "title": f"T{n} é", "text": text} for n, text in enumerate(TEXTS)])
    return path


# BM25


def test_scores_are_lucenes(tmp_path: Path) -> None:
    bm25.build(TEXTS, tmp_path / "index")
    split = [bm25.words(text) for text in TEXTS]
    assert split[1] == ["cat", "cat"]  # no stop words

    def score(words: list[str], text: list[str]) -> float:
        total, mean = 0.0, np.mean([len(other) for other in split])
        for word in words:
            holders, often = sum(word in other for other in split), text.count(word)
            idf = np.log(1 + (len(split) - holders + 0.5) / (holders + 0.5))
            total += idf * often / (often + 1.5 * (1 - 0.75 + 0.75 * len(text) / mean))
        return total

    index = bm25.Index(tmp_path / "index")
    for query in ("cat sat", "Dogs!", "wool cat unknown"):
        expected = {row: score(bm25.words(query), text) for row, text in enumerate(split)}
        hits = index.search(query, 5)
        assert {row: pytest.approx(value, rel=1e-5) for row, value in hits} == {r: v for r, v in expected.items() if v}
        assert [value for _, value in hits] == sorted((value for _, value in hits), reverse=True)


def test_ties_keep_the_order_and_nothing_is_found_for_strange_words(tmp_path: Path) -> None:
    bm25.build(TEXTS, tmp_path / "index")
    index = bm25.Index(tmp_path / "index")
    assert [row for row, _ in index.search("cat sat", 2)] == [0, 4]
    assert [row for row, _ in index.search("cat sat", 1)] == [0]
    assert index.search("zebra", 3) == index.search("the of", 3) == index.search("", 3) == []
    assert len(index.search("bark", 3)) == 1
    with pytest.raises(ValueError, match="no words"):
        bm25.build(["the", ""], tmp_path / "none")


def test_local_passages_by_line(passages: Path) -> None:
    retriever = Bm25Retriever(passages)
    assert retriever.search("dogs", 3) == [Passage("p2", "T2 é", "dogs bark")]
    assert [p.id for p in retriever.search("cat sat", 3)] == ["p0", "p4", "p3"]
    store = PassageStore(passages, line_ends(passages))
    assert [store[row] for row in range(5)] == list(read_passages(passages))


def test_empty_lines_are_no_passages(tmp_path: Path) -> None:
    lines = [json.dumps({"title": f"T{n}", "text": text}) for n, text in enumerate(TEXTS)]
    path = tmp_path / "gaps.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(lines).encode() + b"\n\n")
    retriever = Bm25Retriever(path)
    assert retriever.search("dogs", 3) == [Passage("", "T2", "dogs bark")]
    assert [p.title for p in retriever.search("cat sat", 3)] == ["T0", "T4", "T3"]
    for text in ("", "\n", '{"title": "the", "text": "of"}\n'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"gaps.jsonl: there are no words to search in"):
            passage_index(path)


def test_an_index_belongs_to_the_content(passages: Path, tmp_path: Path) -> None:
    folder = passage_index(passages)
    copy = tmp_path / "elsewhere.jsonl"
    copy.write_bytes(passages.read_bytes())
    stamps = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert passage_index(copy) == folder
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == stamps  # nothing was made again
    passages.unlink()
    assert Bm25Retriever(copy).search("dogs", 1)[0].id == "p2"
    copy.write_text(json.dumps({"title": "", "text": "dogs"}) + "\n")
    assert passage_index(copy) != folder


def _build(path: Path) -> tuple[Path, float]:
    folder = passage_index(path)
    return folder, (folder / "ends.npy").stat().st_mtime_ns


def test_an_index_is_built_once_by_processes_that_ask_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    write_lines(path, [{"title": f"t{n}", "text": f"word{n % 97} and word{n}"} for n in range(4000)])
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert len(set(pool.map(_build, [path] * 6, chunksize=1))) == 1
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.suffix == ".partial"] == []


def test_passages_in_either_form(tmp_path: Path) -> None:
    assert passage_of({"id": 7, "contents": '"A title"\nText\nmore'}, "x") == Passage("7", "A title", "Text\nmore")
    assert passage_of({"text": "only"}, "x") == Passage("", "", "only")
    with pytest.raises(ValueError, match="x is no passage"):
        passage_of({"title": "only"}, "x")
    with gzip.open(tmp_path / "p.jsonl.gz", "wt") as file:
        file.write('{"title": "a", "text": "b"}\n{"title": ')
    with pytest.raises(ValueError, match=r"p.jsonl.gz:2 is no JSON object .*; the file may be cut"):
        list(read_passages(tmp_path / "p.jsonl.gz"))


# A server


def test_a_server_in_the_usual_protocol() -> None:
    with serving(found('"Ada"\nShe counted.', "Bare")) as told:
        hits = HttpRetriever(told.url, 5.0).search("who", 3)
    assert hits == [Passage("0", "Ada", "She counted."), Passage("1", "Bare", "")]
    assert told.asked == [{"queries": ["who"], "topk": 3, "return_scores": True}]
    assert told.paths == ["/retrieve"]


def test_its_other_forms() -> None:
    plain = {"result": [[{"title": "Ada", "text": "She counted."}] * 5]}
    with serving(plain, {"result": [[]]}) as told:
        retriever = HttpRetriever(f"{told.url}/v1/find", 5.0)
        assert retriever.search("who", 3) == [Passage("", "Ada", "She counted.")] * 3  # no more than were asked for
        assert retriever.search("who", 3) == []  # it looked, and there is nothing
    assert told.paths == ["/v1/find"] * 2


def test_a_failure_that_passes_is_not_seen() -> None:
    with serving(503, b"", found("a\nb")) as told:
        with pytest.raises(OutsideError, match="no passages of a known form"):
            HttpRetriever(told.url, 5.0).search("who", 3)  # an empty answer is not asked for again
        assert len(told.asked) == 2
        assert HttpRetriever(told.url, 5.0).search("who", 3) == [Passage("0", "a", "b")]
    with serving(500, 429, found("a\nb")) as told:
        assert len(HttpRetriever(told.url, 5.0).search("who", 3)) == 1
        assert len(told.asked) == 3


@pytest.mark.parametrize(
    ("reply", "reason", "requests"),
    [
        (500, r"status 500 \(request 3 of 3\)", 3),
        (404, r"status 404 \(request 1 of 3\)", 1),
        (1.0, "timed out", 3),
        (b"<html>", "gave no passages of a known form: '<html>'", 1),
        ({"results": []}, "gave no passages of a known form", 1),
        ({"result": []}, "gave no passages of a known form", 1),
        ({"result": [[{"document": {"body": "x"}}]]}, "gave no passages of a known form", 1),
        ({"result": [["text"]]}, "gave no passages of a known form", 1),
        ({"result": [{}]}, "gave no passages of a known form", 1),  # nothing in it, and yet not "nothing found"
        ({"result": [""]}, "gave no passages of a known form", 1),
        ({"result": None}, "gave no passages of a known form", 1),
        (b'{"result": ' + b"[" * 10**5, "gave no passages of a known form", 1),
    ],
)
def test_a_failure_is_an_error(reply: object, reason: str, requests: int) -> None:
    with serving(reply) as told, pytest.raises(OutsideError, match=reason):
        HttpRetriever(told.url, 0.2).search("who", 3)
    assert len(told.asked) == requests


def test_nobody_there() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(OutsideError, match="refused"):
            HttpRetriever(f"http://127.0.0.1:{bound.getsockname()[1]}", 1.0).search("who", 3)


def test_a_proxy_is_never_asked_for_our_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving(found("a\nb")) as told:
        assert len(HttpRetriever(told.url, 5.0).search("who", 3)) == 1


@pytest.mark.parametrize("url", ["ftp://somewhere/x", "file:///etc/passwd", "http://"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ValueError, match="is no address like"):
        open_retriever(url, 1.0)
