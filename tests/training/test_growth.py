"""A library that grows: from which attempts, by how much, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from diagnostics.records import Skill, Trajectory, Turn
from training.skills.growth import Growth, failures, grow
from training.skills.schema import Library, Rule, validate

GROWTH = Growth(threshold=0.4, per_step=3, keep=5)
LIBRARY = Library(
    general=(Rule("g1", "Look", "Search every room."),),
    sections={
        "heat": (Rule("h1", "Oven", "Open the microwave first."),),
        "clean": (Rule("c1", "Sink", "Find a sink."),),
    },
    task_to_skill={"pick_clean": "clean"},
)


def attempt(kind: str, task: str, number: int, won: bool, error: str | None = None) -> Trajectory:
    return Trajectory(
        id=f"{task}.{number}", task_id=task, task_type=kind, env="household", split="train", description="do it",
        group=0, attempt=number, seed=0, step=0, turns=(Turn("A room.", (), "x", "x", True),), segments=(),
        reward=10.0 * won, success=won, stop_reason="error" if error else "done", first_observation_sha256="",
        error=error,
    )  # fmt: skip


def played(kind: str, wins: Sequence[Sequence[bool]]) -> list[Trajectory]:
    """Attempts at several tasks of one type. Args: wins by task and attempt."""
    return [attempt(kind, f"{kind} {t}", n, won) for t, task in enumerate(wins) for n, won in enumerate(task)]


def wrote(trajectories: Sequence[Trajectory], text: str = "Say {}.") -> dict[str, Skill]:
    return {t.id: Skill(text.format(t.id), "hindsight", t.task_id, t.id, t.success) for t in trajectories}


def test_weak_types_one_failure_a_task_in_turn() -> None:
    trajectories = [
        *played("heat", [[True, False], [False, False], [False, False]]),  # 1/6
        *played("clean", [[False, False]]),  # 0
        *played("cool", [[True, False], [False, True]]),  # 1/2: not weak
    ]
    found = failures(trajectories, GROWTH)
    assert [t.id for t in found] == ["clean 0.0", "heat 0.1", "heat 1.0", "heat 2.0"]
    assert failures(trajectories[::-1], GROWTH) == found  # whatever the order they came in
    assert {t.task_type for t in failures(trajectories, Growth(0.6, 3, 5))} == {"clean", "heat", "cool"}
    assert failures(trajectories, Growth(0.0, 3, 5)) == []


def test_the_threshold_itself_is_not_weak_and_crashes_do_not_count() -> None:
    two_of_five = played("heat", [[True, True, False, False, False]])
    assert failures(two_of_five, GROWTH) == []
    crashed = [attempt("heat", "heat 9", n, False, "the worker died") for n in range(4)]
    assert failures([*two_of_five, *crashed], GROWTH) == []
    assert len(failures([*two_of_five, attempt("heat", "heat 9", 0, False)], GROWTH)) == 2


def test_at_most_so_many_a_step_each_in_its_section() -> None:
    failed = failures([*played("heat", [[False]] * 4), *played("pick_clean", [[False]])], GROWTH)
    grown = grow(LIBRARY, failed, wrote(failed), GROWTH, step=7)
    assert [r.skill_id for r in grown.sections["heat"]] == ["h1", "grown_7_0", "grown_7_2"]
    assert [r.principle for r in grown.sections["clean"]] == ["Find a sink.", "Say pick_clean 0.0."]
    assert grown.general == LIBRARY.general and len(LIBRARY.sections["heat"]) == 1  # the old one stays as it was
    validate(grown, "grown")
    assert len(grow(LIBRARY, failed, wrote(failed), Growth(0.4, 10, 10), 7).sections["heat"]) == 5


def test_a_type_without_a_section_gets_one() -> None:
    failed = played("dance", [[False]])
    grown = grow(LIBRARY, failed, wrote(failed), GROWTH, 0)
    assert grown.section("dance") == "dance" and len(grown.sections["dance"]) == 1


def test_the_oldest_grown_skills_make_room() -> None:
    library = LIBRARY
    for step in range(9):
        failed = [attempt("heat", f"heat {step}", 0, False)]
        library = grow(library, failed, wrote(failed, f"Way number{step}."), GROWTH, step)
    assert [r.skill_id for r in library.sections["heat"]] == ["h1", *(f"grown_{step}_0" for step in range(4, 9))]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("A mug 2 was in drawer 3. Go there first.", "A mug was in drawer. Go there first."),
        ("take mug 12 from desk 1, then look.", "take mug from desk, then look."),
        ("After step 3 look at 2 places.", "After step 3 look at 2 places."),
        ("open the MICROWAVE first.", None),  # said already
        ("Search every room.", None),  # said in general
        ("Buy B01ABCDEF2 at once.", None),  # one product
        ("<answer>Paris</answer> is right.", None),  # an answer
    ],
)
def test_what_is_taken_in(text: str, kept: str | None) -> None:
    failed = played("heat", [[False]])
    grown = grow(LIBRARY, failed, wrote(failed, text), GROWTH, 0)
    if kept is None:
        assert grown is LIBRARY
    else:
        assert grown.sections["heat"][-1].principle == kept


def test_a_refused_skill_takes_nobodys_place() -> None:
    failed = played("heat", [[False]] * 5)
    written = wrote(failed)
    written["heat 0.0"] = Skill("Open the microwave first.", "hindsight", "heat 0", "heat 0.0")
    del written["heat 1.0"]  # could not be parsed
    grown = grow(LIBRARY, failed, written, GROWTH, 0)
    assert [r.principle for r in grown.sections["heat"]][1:] == [f"Say heat {n}.0." for n in (2, 3, 4)]
    assert grow(LIBRARY, failed, {}, GROWTH, 0) is LIBRARY
