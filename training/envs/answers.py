"""When an answer is right: exact match and F1 of words after the usual normalisation of question answering."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and doubled whitespace.

    Source: SQuAD's evaluation (Rajpurkar et al. 2016). Departures: a text of which nothing is left ("The The", "?")
    keeps its lower-case form, so that an empty answer is never right.
    """
    lowered = text.lower()
    plain = " ".join(_ARTICLES.sub(" ", lowered.translate(_PUNCTUATION)).split())
    return plain or " ".join(lowered.split())


def exact_match(answer: str, right: Sequence[str]) -> bool:
    """Whether the answer is one of the right ones after `normalise`."""
    return normalise(answer) in {normalise(text) for text in right}


def f1(answer: str, right: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of words, against the nearest right answer; in [0, 1].

    F1 = 2 c / (words of the answer + words of the right one), c = words in common, each as often as in both.
    Source: SQuAD's evaluation.
    """
    return max((_overlap(normalise(answer).split(), normalise(text).split()) for text in right), default=0.0)


def _overlap(words: Sequence[str], other: Sequence[str]) -> float:
    common = sum((Counter(words) & Counter(other)).values())
    return 2 * common / (len(words) + len(other)) if common else 0.0
