"""What an observation shows, read from its text."""

from __future__ import annotations

import pytest

from training.envs.sights import brief, closed, contents

SHELF = "You arrive at shelf 1. On the shelf 1, you see a mug 2, and a cd 1."
SAFE = "You open the safe 1. The safe 1 is open. In it, you see nothing."
SHUT = "You arrive at safe 1. The safe 1 is closed."


def test_contents_reads_open_and_opened_receptacles_and_no_closed_ones() -> None:
    assert contents(SHELF) == {"shelf 1": ("mug 2", "cd 1")}
    assert contents(SAFE) == {"safe 1": ()}
    assert contents(SHUT) == {}
    assert (closed(SHUT), closed(SAFE)) == ("safe 1", None)


@pytest.mark.parametrize(
    ("observation", "task", "expected"),
    [
        (SHELF, None, "a mug 2 in shelf 1, a cd 1 in shelf 1"),
        (SHELF, "put a mug in safe.", "a mug 2 in shelf 1"),
        (SHELF, "put a mugcake in safe.", "nothing needed in shelf 1"),  # whole words
        (SAFE, None, "nothing in safe 1"),
        (SAFE, "put a mug in safe.", "nothing in safe 1"),
        (SHUT, "put a mug in safe.", "safe 1 closed"),
        ("You pick up the mug 2 from the shelf 1.", "put a cd in safe.", "You pick up the mug 2 from the shelf 1."),
        ("", None, ""),
    ],
)
def test_brief_names_each_thing_with_its_place(observation: str, task: str | None, expected: str) -> None:
    assert brief(observation, task) == expected
