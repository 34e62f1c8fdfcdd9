"""When an answer is right, by hand."""

from __future__ import annotations

import pytest

from training.envs.answers import exact_match, f1, normalise


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("The  Hunchback of\nNotre-Dame!", "hunchback of notredame"),
        ("an Apple a day", "apple day"),
        ("Theatre", "theatre"),  # an article is a word of its own
        ("U.S.A.", "usa"),
        ("Röntgen", "röntgen"),
        ("The The", "the the"),  # nothing else would be left
        ("?", "?"),
        ("", ""),
    ],
)
def test_normalise(text: str, plain: str) -> None:
    assert normalise(text) == plain


def test_exact_match() -> None:
    assert exact_match("the Beatles.", ["Rolling Stones", "Beatles"])
    assert not exact_match("Beatles band", ["Beatles"])
    assert not exact_match("", ["The"]) and not exact_match("!", ["?"])
    assert not exact_match("Beatles", [])


@pytest.mark.parametrize(
    ("answer", "right", "value"),
    [
        ("Barack Obama", ["President Barack Obama"], 2 * 2 / (2 + 3)),
        ("the Obama", ["Barack Obama"], 2 * 1 / (1 + 2)),
        ("new york new", ["New York"], 2 * 2 / (3 + 2)),  # a word counts as often as in both
        ("Paris", ["London", "Paris, France", "paris"], 1.0),  # the nearest of the right answers
        ("Paris", ["London"], 0.0),
        ("", ["London"], 0.0),
        ("Paris", [], 0.0),
    ],
)
def test_f1(answer: str, right: list[str], value: float) -> None:
    assert f1(answer, right) == pytest.approx(value)
    assert (f1(answer, right) == 1.0) or not exact_match(answer, right)
