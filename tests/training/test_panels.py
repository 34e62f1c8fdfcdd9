"""Panels and the training order depend on ids and seeds, on nothing else."""

from __future__ import annotations

import hashlib
import random
from collections import Counter as Tally
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.fake_envs import Counter, task
from training.envs.base import Task
from training.envs.panels import Panel, disjoint, panel, train_order
from training.envs.pool import EnvPool

TASKS = [task(f"game-{number}") for number in range(40)]


def ids(tasks: list[Task]) -> list[str]:
    return [task.id for task in tasks]


@given(st.permutations(TASKS), st.integers(0, 40), st.integers(0, 3))
def test_a_panel_does_not_depend_on_the_order_of_files(shuffled: list[Task], size: int, seed: int) -> None:
    assert panel(shuffled, size, seed) == panel(TASKS, size, seed)


def test_a_panel_by_hand() -> None:
    """Three ids, ordered by the sha256 of "panel <seed> <id>"."""
    expected = sorted("abc", key=lambda name: hashlib.sha256(f"panel 5 {name}".encode()).hexdigest())
    chosen = panel([task("c"), task("a"), task("b")], 2, seed=5)
    assert chosen.ids == tuple(expected[:2])
    assert chosen.sha256 == hashlib.sha256("\n".join(expected[:2]).encode()).hexdigest()


def test_size_seed_and_digest() -> None:
    whole = panel(TASKS, 0, seed=0)
    assert sorted(whole.ids) == sorted(ids(TASKS))
    assert panel(TASKS, 40, seed=0) == whole
    assert panel(TASKS, 8, seed=0).ids == whole.ids[:8]
    assert panel(TASKS, 8, seed=1).ids != whole.ids[:8]
    assert panel(TASKS, 8, seed=0).sha256 != panel(TASKS, 9, seed=0).sha256
    assert list(whole.ids) != ids(TASKS)


@pytest.mark.parametrize("size", [41, -1])
def test_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"panel of {size} tasks .* train has 40"):
        panel(TASKS, size, seed=0)


def test_an_id_that_occurs_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'game-3' occurs twice"):
        panel([*TASKS, task("game-3")], 8, seed=0)
    with pytest.raises(ValueError, match="'game-3' occurs twice"):
        train_order([*TASKS, task("game-3")], 0, 0, 8)


def test_select_gives_the_panels_tasks_in_its_order() -> None:
    chosen = panel(TASKS, 8, seed=0)
    assert ids(chosen.select(reversed(TASKS))) == list(chosen.ids)
    with pytest.raises(ValueError, match=f"'{chosen.ids[0]}' of the panel is not among the 0 tasks"):
        chosen.select([])


def test_train_and_test_are_disjoint_over_all_workers() -> None:
    """Case B46: goals 0..9, each worker lists them in an order of its own, test = a panel of 3.

    Cutting each worker's own list by position would leak; a panel by id is the same in every worker.
    """
    goals = [task(str(number)) for number in range(10)]
    workers = [random.Random(seed).sample(goals, 10) for seed in (0, 1)]
    by_position = [set(ids(goals[:3])) for goals in workers]
    assert by_position[0] & set(ids(workers[1][3:]))  # the fault
    panels = {panel(goals, 3, seed=0) for goals in workers}
    assert len(panels) == 1
    (test,) = panels
    for goals in workers:
        train = [goal for goal in goals if goal.id not in test.ids]
        assert len(train) == 7
        disjoint(train, test)
        with pytest.raises(ValueError, match=f"task '{min(test.ids)}' is in the training split"):
            disjoint(goals, test)


def test_eight_groups_are_eight_tasks() -> None:
    """Case B49: 8 groups x 8 rollouts, seed 0."""
    step = train_order(TASKS, seed=0, step=0, count=8)
    rollouts = [task.id for task in step for _ in range(8)]
    assert Tally(Tally(rollouts).values()) == {8: 8}
    assert ids(train_order(TASKS, seed=0, step=0, count=8)) == ids(step)
    assert set(ids(train_order(TASKS, seed=1, step=0, count=8))) != set(ids(step))
    with EnvPool(Counter, workers=2, timeout=30.0) as pool:
        starts = pool.reset(dict(enumerate(task for task in step for _ in range(8))))
    observations = [starts[slot].observation for slot in range(64)]
    assert all(len(set(observations[group * 8 : group * 8 + 8])) == 1 for group in range(8))
    assert len(set(observations)) == 8


def test_an_epoch_visits_every_task_once_and_the_next_is_shuffled_anew() -> None:
    epochs = [[ids(train_order(TASKS, 0, epoch * 5 + step, 8)) for step in range(5)] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(chain.from_iterable(epoch)) == sorted(ids(TASKS))
    assert epochs[0] != epochs[1] != epochs[2]


@given(st.permutations(TASKS), st.integers(0, 200), st.integers(1, 40))
def test_a_step_has_distinct_tasks_whatever_the_order_of_files(shuffled: list[Task], step: int, count: int) -> None:
    chosen = ids(train_order(shuffled, seed=3, step=step, count=count))
    assert len(set(chosen)) == count
    assert chosen == ids(train_order(TASKS, seed=3, step=step, count=count))


@pytest.mark.parametrize("count", [0, 41])
def test_an_impossible_number_of_tasks_a_step_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"tasks_per_step is {count}, but the training split has 40"):
        train_order(TASKS, seed=0, step=0, count=count)


def test_the_same_wins_at_any_batch_size() -> None:
    """Case B42: a scripted policy with known wins on 7 games at batch 1, 3 and 7; the last batch may be short."""
    games = [task(f"game-{number}") for number in range(7)]
    winners = {"game-1", "game-4", "game-6"}
    order: Panel = panel(games, 0, seed=0)
    results = []
    for batch in (1, 3, 7):
        played: list[tuple[str, bool]] = []
        with EnvPool(Counter, workers=2, timeout=30.0) as pool:
            chosen = order.select(games)
            for start in range(0, len(chosen), batch):
                wave = dict(enumerate(chosen[start : start + batch]))
                pool.reset(wave)
                for _ in range(3):
                    answers = pool.step({slot: "win" if game.id in winners else "wait" for slot, game in wave.items()})
                played += [(game.id, answers[slot].won) for slot, game in wave.items()]
        results.append(played)
    assert results[0] == results[1] == results[2]
    assert [name for name, _ in results[0]] == list(order.ids)
    assert {name for name, won in results[0] if won} == winners
