"""Whose skill a trajectory gets as the wrong one: every skill once, among a few tasks as alike as can be. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from diagnostics.records import Trajectory

_OWN, _SAME_TASK, _SAME_TEXT, _OTHER_TYPE, _OTHER_OUTCOME = 1e9, 1e7, 1e5, 1e3, 1.0  # each outweighs all below it


def other_sources(trajectories: Sequence[Trajectory], skills: Mapping[str, str], seed: int) -> dict[str, str]:
    """The trajectory whose skill each one is given instead of its own.

    Tasks are divided into the smallest blocks in which no task holds more than half of the trajectories, of one task
    type and outcome where there are enough; inside a block the sources are a permutation: every skill is once the own
    one and once the other one, and no skill leaves its block, so that blocks are what a split must keep whole.
    Source: PR-OPD Fig. 5 (own against another trajectory's skill); blocks and matching ours.
    Args: skills, text by trajectory id; trajectories without one take no part; seed, breaks ties; the order of the
    trajectories does not matter.
    Returns: id -> id of another task wherever no task holds more than half of all trajectories; of another
    trajectory where that is all there is. A trajectory that would be left with its own text has none.
    """
    taking = sorted((t for t in trajectories if skills.get(t.id, "").strip()), key=lambda t: t.id)
    rng = np.random.default_rng(seed)
    by_task: dict[str, list[Trajectory]] = defaultdict(list)
    for index in rng.permutation(len(taking)):
        by_task[taking[index].task_id].append(taking[index])
    sources = {}
    for block in _blocks(by_task):
        members = [trajectory for task in block for trajectory in by_task[task]]
        cost = np.array([[_cost(one, other, skills) for other in members] for one in members])
        _, chosen = linear_sum_assignment(cost + rng.uniform(0, 1e-3, cost.shape))
        for one, place in zip(members, chosen, strict=True):
            if skills[members[place].id] != skills[one.id]:
                sources[one.id] = members[place].id
    return sources


def task_groups(trajectories: Sequence[Trajectory], sources: Mapping[str, str]) -> dict[str, int]:
    """Task -> number of its group: tasks whose trajectories are given each other's skills are one group."""
    tasks = {t.id: t.task_id for t in trajectories}
    names = sorted(set(tasks.values()))
    place = {name: index for index, name in enumerate(names)}
    links = np.array([[place[tasks[id]], place[tasks[source]]] for id, source in sources.items()], int).reshape(-1, 2)
    graph = coo_array((np.ones(len(links)), (links[:, 0], links[:, 1])), shape=(len(names), len(names)))
    return dict(zip(names, connected_components(graph, directed=False)[1].tolist(), strict=True))


def _cost(one: Trajectory, other: Trajectory, skills: Mapping[str, str]) -> float:
    return (
        _OWN * (one.id == other.id)
        + _SAME_TASK * (one.task_id == other.task_id)
        + _SAME_TEXT * (skills[one.id] == skills[other.id])
        + _OTHER_TYPE * (one.task_type != other.task_type)
        + _OTHER_OUTCOME * (one.success != other.success)
    )


def _blocks(by_task: Mapping[str, Sequence[Trajectory]]) -> list[list[str]]:
    """Tasks in blocks; what is left over at one level of likeness joins a block there, or waits for the next."""
    size = {task: len(members) for task, members in by_task.items()}
    likeness: dict[str, tuple[Hashable, ...]] = {}
    for task, members in by_task.items():
        mostly_won = 2 * sum(t.success for t in members) > len(members)
        likeness[task] = (members[0].task_type, mostly_won)

    def fits(block: Sequence[str]) -> bool:
        return 2 * max(size[task] for task in block) <= sum(size[task] for task in block)

    blocks: list[list[str]] = []
    waiting = list(by_task)
    for level in (2, 1, 0):
        groups: dict[Hashable, list[str]] = defaultdict(list)
        for task in sorted(waiting, key=lambda task: -size[task]):  # like sizes meet, equal ones in their random order
            groups[likeness[task][:level]].append(task)
        waiting = []
        for key, tasks in groups.items():
            rest: list[str] = []
            for task in tasks:
                rest.append(task)
                if fits(rest):
                    blocks.append(rest)
                    rest = []
            at_home = [block for block in blocks if likeness[block[0]][:level] == key]
            for joined in range(len(at_home) + 1 if rest else 0):
                taken = at_home[len(at_home) - joined :]
                whole = [task for block in taken for task in block] + rest
                if fits(whole) or (level == 0 and joined == len(at_home)):  # at last one task may hold more than half
                    blocks = [block for block in blocks if block not in taken] + [whole]
                    break
            else:
                waiting += rest
    return blocks
