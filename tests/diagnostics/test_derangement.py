"""The wrong skills: a permutation over other tasks, closed in blocks that are as small and as alike as can be."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from diagnostics.derangement import other_sources, task_groups
from diagnostics.records import Trajectory


def play(id: str, task: str, kind: str = "pick", success: bool = False) -> Trajectory:
    fixed = {"env": "household", "split": "train", "description": "d", "group": 0, "attempt": 0, "seed": 0, "step": 0}
    fixed |= {"turns": (), "segments": (), "reward": 0.0, "stop_reason": "done", "first_observation_sha256": ""}
    return Trajectory(id=id, task_id=task, task_type=kind, success=success, **fixed)


def random_plays(seed: int, one_a_task: bool) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    sizes = np.ones(23, int) if one_a_task else rng.integers(1, 7, 23)
    kinds = rng.choice(["pick", "heat", "clean"], 23, p=[0.6, 0.35, 0.05])
    return [
        play(f"t{k}.{i}", f"task{k}", kinds[k], bool(rng.random() < 0.4)) for k in range(23) for i in range(sizes[k])
    ]


@pytest.mark.parametrize("one_a_task", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_a_permutation_over_other_tasks_closed_in_small_groups(seed: int, one_a_task: bool) -> None:
    plays = random_plays(seed, one_a_task)
    skills = {t.id: f"skill {t.id}" for t in plays}
    sources, by_id = other_sources(plays, skills, seed), {t.id: t for t in plays}
    assert sources.keys() == skills.keys() and sorted(sources.values()) == sorted(skills)
    assert all(by_id[id].task_id != by_id[source].task_id for id, source in sources.items())
    groups = task_groups(plays, sources)
    assert all(groups[by_id[id].task_id] == groups[by_id[source].task_id] for id, source in sources.items())
    assert len(set(groups.values())) >= (8 if one_a_task else 5)
    kinds = Counter(t.task_type for t in {t.task_id: t for t in plays}.values())
    strange = [id for id, source in sources.items() if by_id[id].task_type != by_id[source].task_type]
    if one_a_task:  # the only task of its type has to give and to take
        assert max(Counter(groups.values()).values()) <= 3
        assert len(strange) <= 2 * sum(count == 1 for count in kinds.values())
    assert other_sources(plays[::-1], skills, seed) == sources


def test_type_comes_before_outcome_and_both_before_chance() -> None:
    plays = [
        play(f"{kind}{won}{i}", f"{kind}{won}{i}", kind, won)
        for kind in "ab"
        for won in (False, True)
        for i in range(4)
    ]
    sources, by_id = other_sources(plays, {t.id: t.id for t in plays}, 0), {t.id: t for t in plays}
    for id, source in sources.items():
        assert (by_id[id].task_type, by_id[id].success) == (by_id[source].task_type, by_id[source].success)
    few = [play("a", "a", "x", True), play("b", "b", "x", False), play("c", "c", "y", True), play("d", "d", "y", False)]
    assert other_sources(few, {t.id: t.id for t in few}, 0) == {"a": "b", "b": "a", "c": "d", "d": "c"}


def test_inside_a_block_outcomes_meet() -> None:
    """Two tasks of four trajectories, two won each: winners are given winners' skills."""
    plays = [play(f"{k}{i}", f"task{k}", success=i < 2) for k in range(2) for i in range(4)]
    sources, by_id = other_sources(plays, {t.id: t.id for t in plays}, 3), {t.id: t for t in plays}
    assert all(by_id[id].success == by_id[source].success for id, source in sources.items())


def test_a_task_with_more_than_half_swaps_inside_itself_as_little_as_it_must() -> None:
    plays = [play(f"big{i}", "big") for i in range(5)] + [play(f"small{i}", f"small{i}") for i in range(3)]
    sources, by_id = other_sources(plays, {t.id: t.id for t in plays}, 0), {t.id: t for t in plays}
    same = [id for id, source in sources.items() if by_id[id].task_id == by_id[source].task_id]
    assert len(same) == 2 and all(id != source for id, source in sources.items())
    assert len(set(task_groups(plays, sources).values())) == 1


def test_without_a_skill_or_with_the_same_text_there_is_no_source() -> None:
    plays = [play(id, id) for id in "abcd"]
    assert other_sources(plays, {"a": "x"}, 0) == {}
    assert other_sources(plays, {"a": "x", "b": "x"}, 0) == {}
    assert other_sources(plays, {"a": "x", "b": "y", "c": " "}, 0) == {"a": "b", "b": "a"}
    texts = {"a": "x", "b": "x", "c": "y", "d": "z"}
    assert all(texts[id] != texts[source] for id, source in other_sources(plays, texts, 0).items())


def test_groups_of_tasks_follow_the_swaps() -> None:
    plays = [play(id, task) for id, task in (("a", "1"), ("b", "2"), ("c", "2"), ("d", "3"), ("e", "4"))]
    groups = task_groups(plays, {"a": "b", "b": "a", "c": "d", "d": "c"})
    assert groups["1"] == groups["2"] == groups["3"] != groups["4"]
