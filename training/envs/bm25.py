"""BM25 over texts through bm25s: built once into a folder, read from there memory-mapped.

Equal scores keep the order of the texts, so that a search gives the same rows in every process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np

_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """Lower-case words without English stop words."""
    return [word for word in _WORD.findall(text.lower()) if word not in _stop_words()]


def build(texts: Iterable[str], folder: Path) -> None:
    """Write the index of some texts (Lucene's BM25, k1 1.5, b 0.75). Raises ValueError when they hold no words."""
    import bm25s

    split = [words(text) for text in texts]
    if not any(split):
        raise ValueError("there are no words to search in")
    index = bm25s.BM25()
    index.index(split, show_progress=False)
    index.save(folder, show_progress=False)


class Index:
    """An index that `build` has written."""

    def __init__(self, folder: Path) -> None:
        import bm25s

        self._index = bm25s.BM25.load(folder, mmap=True, show_progress=False)

    def search(self, query: str, k: int) -> list[tuple[int, float]]:
        """(row, score) of the best texts, at most k of them, best first; texts that share no word are left out."""
        known = [word for word in words(query) if word in self._index.vocab_dict]
        if not known:
            return []
        scores = self._index.get_scores(known)
        found = np.flatnonzero(scores > 0)
        best = found[np.argsort(-scores[found], kind="stable")[:k]]
        return [(int(row), float(scores[row])) for row in best]


@lru_cache(maxsize=1)
def _stop_words() -> frozenset[str]:
    from bm25s.stopwords import STOPWORDS_EN

    return frozenset(STOPWORDS_EN)
