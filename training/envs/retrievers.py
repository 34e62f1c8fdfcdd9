"""Where passages come from: BM25 over a local passage file, or a retrieval server.

A server speaks the protocol that search agents are trained with (Search-R1's retrieval_server): POST
{"queries": [text], "topk": k, "return_scores": true} to /retrieve, answered with
{"result": [[{"document": {"contents": "\"Title\"\ntext"}, "score": s}, ...]]}.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from training.cache import cache_dir, made_once
from training.envs import bm25
from training.envs.base import OutsideError
from training.envs.passages import Passage, PassageStore, line_ends, passage_of, read_passages

TRIES = 3  # requests to a server before it counts as out of reach
PAUSE = 0.5  # seconds before the second request, doubled before the third
LARGEST = 16 * 2**20  # bytes of an answer
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@runtime_checkable
class Retriever(Protocol):
    """Finds passages, best first. Raises OutsideError where it could not look; [] means there is nothing."""

    def search(self, query: str, k: int) -> list[Passage]: ...


class Bm25Retriever:
    """BM25 over the titles and texts of a plain passage file."""

    def __init__(self, passages: Path) -> None:
        folder = passage_index(passages)
        self._index = bm25.Index(folder)
        self._passages = PassageStore(passages, np.load(folder / "ends.npy", mmap_mode="r"))

    def search(self, query: str, k: int) -> list[Passage]:
        return [self._passages[row] for row, _ in self._index.search(query, k)]


class HttpRetriever:
    """Passages of a retrieval server.

    Args: url, of the server; without a path, /retrieve is asked. timeout, seconds of one request; failures of the
    network and of the server are tried again, two times.
    Raises: ValueError for what is no http(s) address.
    """

    def __init__(self, url: str, timeout: float) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"retriever {url!r} is no address like http://127.0.0.1:8000/retrieve")
        self.url = parts._replace(path="/retrieve").geturl() if parts.path in ("", "/") else url
        self.timeout = timeout
        proxies = [urllib.request.ProxyHandler({})] if parts.hostname in LOOPBACK else []  # never to our own machine
        self._opener = urllib.request.build_opener(*proxies)

    def search(self, query: str, k: int) -> list[Passage]:
        asked = json.dumps({"queries": [query], "topk": k, "return_scores": True}).encode()
        request = urllib.request.Request(self.url, asked, {"Content-Type": "application/json"})
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE * 2 ** (attempt - 1))
            try:
                with self._opener.open(request, timeout=self.timeout) as answer:
                    body = answer.read(LARGEST + 1)
                break
            except urllib.error.HTTPError as error:
                error.close()
                reason, again = f"status {error.code}", error.code >= 500 or error.code == 429
            except (OSError, http.client.HTTPException) as error:  # refused, out of time, cut; URLError is an OSError
                reason, again = f"{type(error).__name__}: {getattr(error, 'reason', error)}", True
            if not again or attempt == TRIES - 1:
                raise OutsideError(f"retrieval server {self.url}: {reason} (request {attempt + 1} of {TRIES})")
        if len(body) > LARGEST:
            raise OutsideError(f"retrieval server {self.url} answered with more than {LARGEST >> 20} MiB")
        return self._passages(body)[:k]

    def _passages(self, body: bytes) -> list[Passage]:
        try:
            (found,) = json.loads(body)["result"]
            if not isinstance(found, list):  # an empty object would read as a search that found nothing
                raise TypeError(f"{type(found).__name__} in the place of a list")
            return [self._passage(entry) for entry in found]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            shown = body[:80].decode(errors="replace")
            raise OutsideError(f"retrieval server {self.url} gave no passages of a known form: {shown!r}") from error

    def _passage(self, entry: Mapping[str, Any]) -> Passage:
        return passage_of(entry.get("document", entry), self.url)


def passage_index(passages: Path) -> Path:
    """The folder with the BM25 index of a plain passage file, built when it is asked for first.

    Its name follows from the content of the file and from bm25s' version; processes that ask at the same time wait for
    the one that builds.
    """
    with passages.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(f"bm25s {version('bm25s')}".encode())
    digest.update(Path(bm25.__file__).read_bytes())

    def build(folder: Path) -> None:
        if not any(bm25.words(f"{passage.title} {passage.text}") for passage in read_passages(passages)):
            raise ValueError(f"{passages}: there are no words to search in; bring passages in again")
        bm25.build((f"{passage.title} {passage.text}" for passage in read_passages(passages)), folder)
        np.save(folder / "ends.npy", line_ends(passages))

    return made_once(cache_dir() / f"bm25-{digest.hexdigest()[:12]}", build)


@lru_cache(maxsize=2)
def open_retriever(where: str, timeout: float) -> Retriever:
    """The retriever of a process, shared by its environments. Args: where, a passage file or an address."""
    return HttpRetriever(where, timeout) if "://" in where else Bm25Retriever(Path(where))
