from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from tests.training.clockwork import GOOD, TASKS, ClockworkPool, ScriptedSampler, task
from training.envs.base import Task
from training.evaluate import Count, evaluate, summarise

LIMITS = {"seed": 0, "max_turns": 9, "max_context": 4000}


def wins(tasks: list[Task], batch_size: int, **given: int) -> list[tuple[str, int, bool]]:
    sampler = ScriptedSampler(lambda key: GOOD, batch_size=batch_size)
    return [(t.task_id, t.attempt, t.success) for t in evaluate(sampler, ClockworkPool(), tasks, **LIMITS, **given)]


def test_the_same_wins_at_any_batch_size_and_order_of_the_list() -> None:  # case B42
    shuffled = random.Random(3).sample(TASKS, len(TASKS))
    right = [(t.id, 0, t.source.startswith("won")) for t in TASKS]
    assert [wins(TASKS, n) for n in (1, 3, 7)] == [right] * 3
    assert wins(shuffled, 3) == right


def test_attempts_lie_next_to_each_other() -> None:
    assert [row[:2] for row in wins(TASKS[:2], 3, attempts=2)] == [
        ("task 0", 0),
        ("task 0", 1),
        ("task 1", 0),
        ("task 1", 1),
    ]


def test_a_task_listed_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="listed twice"):
        wins([TASKS[0], TASKS[0]], 3)


def test_counts_by_type_and_errors_apart() -> None:  # cases B38, B50
    tasks = [task("a", "won 2"), task("b", "lost 2"), task("c", "won 1"), task("d", "crash 1"), task("e", "crash 0")]
    sampler = ScriptedSampler(lambda key: GOOD if key[3] == 0 else "mumble")
    summary = summarise(evaluate(sampler, ClockworkPool(), tasks, **LIMITS))
    assert summary.total == Count(wins=2, n=3, errors=2)
    assert summary.by_type == {"crash": Count(0, 0, 2), "lost": Count(0, 1, 0), "won": Count(2, 2, 0)}
    assert summary.total.success == pytest.approx(2 / 3)
    assert math.isnan(summary.by_type["crash"].success)
    assert summary.turns == pytest.approx(5 / 3)  # 2, 2 and 1 turns; the crashed episodes do not count
    assert summary.invalid == pytest.approx(2 / 5)
    assert summary.score is None  # this environment tells success alone


def test_the_mean_score_of_episodes_that_are_graded() -> None:
    played = evaluate(ScriptedSampler(lambda key: GOOD), ClockworkPool(), TASKS[:3], **LIMITS)
    graded = [replace(t, score=score) for t, score in zip(played, (1.0, 0.25, 0.0), strict=True)]
    assert summarise(graded).score == pytest.approx(1.25 / 3)
    crashed = replace(graded[0], score=None, stop_reason="error", success=False)
    assert summarise([crashed, *graded[1:]]).score == pytest.approx(0.25 / 2)


def test_nothing_played() -> None:
    summary = summarise([])
    assert summary.total == Count() and summary.by_type == {}
    assert math.isnan(summary.total.success) and math.isnan(summary.invalid)
