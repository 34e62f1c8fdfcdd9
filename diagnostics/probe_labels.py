"""What probes read for: the labels of every turn, the folds that keep tasks apart, and what labels could as well be."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int
from sklearn.model_selection import StratifiedGroupKFold

from diagnostics.records import Trajectory

OUTER, INNER = 5, 4  # folds; fewer where there are fewer groups
MIN_GROUPS = 5  # that can be held out
MIN_CLASS_GROUPS = 3  # that hold a class: one to test, one to choose C, one to train
_ATTEMPTS = 20  # splits tried until every training part holds every class

Turns = Sequence[tuple[str, int]]  # (trajectory id, turn) of each row of features


class NotEstimable(ValueError):
    """No held-out accuracy can be given; the message is the reason, in one sentence."""


@dataclass(frozen=True, eq=False)
class Labels:
    """What is read for. Samples of one group are never on both sides of a split."""

    name: str
    classes: tuple[str, ...]
    value: Int[np.ndarray, "n"]  # index into classes
    row: Int[np.ndarray, "n"]  # of the features
    trajectory: Int[np.ndarray, "n"]  # index into trajectories
    group: Int[np.ndarray, "n"]
    trajectories: tuple[Trajectory, ...]
    within: bool  # a trajectory holds several labels

    @property
    def task(self) -> np.ndarray:
        """Number of the task of each sample."""
        names = [t.task_id for t in self.trajectories]
        return np.unique(names, return_inverse=True)[1][self.trajectory]


@dataclass(frozen=True, eq=False)
class Folds:
    outer: Int[np.ndarray, "n"]  # the fold in which a sample is held out
    inner: tuple[Int[np.ndarray, "n"], ...]  # of each outer fold: folds of its training part, -1 outside it


def own_labels(turns: Turns, trajectories: Mapping[str, Trajectory], group: Mapping[str, int]) -> Labels:
    """Own skill (1) against another trajectory's (0): rows are all turns under the own one, then all under the other.

    Args: group, of each task, see derangement.task_groups: both uses of a skill lie in one group, so that knowing a
    skill again says nothing about a held-out sample.
    """
    named = ["own_skill"] * len(turns) + ["other_skill"] * len(turns)
    return _labels("own_skill", named, [*turns, *turns], trajectories, group, within=True)


def student_labels(turns: Turns, trajectories: Mapping[str, Trajectory]) -> list[Labels]:
    """Success of the episode (errors left out), task type, and third of the episode (from three turns up), by turn."""
    played = [trajectories[id] for id, _ in turns]
    group = {task: index for index, task in enumerate(sorted({t.task_id for t in played}))}
    success = [None if t.error else "success" if t.success else "failure" for t in played]
    last: dict[str, int] = defaultdict(int)
    for id, turn in turns:
        last[id] = max(last[id], turn, len(trajectories[id].turns) - 1)
    thirds = [("first", "middle", "last")[3 * turn // (last[id] + 1)] if last[id] >= 2 else None for id, turn in turns]
    return [
        _labels("success", success, turns, trajectories, group, within=False),
        _labels("task_type", [t.task_type for t in played], turns, trajectories, group, within=False),
        _labels("turn_third", thirds, turns, trajectories, group, within=True),
    ]


def _labels(
    name: str,
    named: Sequence[str | None],
    turns: Turns,
    trajectories: Mapping[str, Trajectory],
    group: Mapping[str, int],
    within: bool,
) -> Labels:
    """Rows without a class are left out; so are classes in too few groups, if two others remain."""
    groups: dict[str, set[int]] = defaultdict(set)
    for kind, (id, _) in zip(named, turns, strict=True):
        if kind is not None:
            groups[kind].add(group[trajectories[id].task_id])
    common = sorted(kind for kind in groups if len(groups[kind]) >= MIN_CLASS_GROUPS)
    classes = common if len(common) > 1 else sorted(groups)
    row = [index for index, kind in enumerate(named) if kind in classes]
    place = {id: index for index, id in enumerate(dict.fromkeys(turns[index][0] for index in row))}
    return Labels(
        name=name,
        classes=tuple(classes),
        value=np.array([classes.index(str(named[index])) for index in row], np.int64),
        row=np.array(row, np.int64),
        trajectory=np.array([place[turns[index][0]] for index in row], np.int64),
        group=np.array([group[trajectories[turns[index][0]].task_id] for index in row], np.int64),
        trajectories=tuple(trajectories[id] for id in place),
        within=within,
    )


def split(labels: Labels, rng: np.random.Generator) -> Folds:
    """Outer and inner folds of whole groups, classes spread as evenly as groups allow.

    Source: scikit-learn StratifiedGroupKFold, drawn anew until every training part, also the inner ones, holds every
    class. Raises: NotEstimable with the reason when there are too few groups, or a class lies in too few of them.
    """
    n_groups = len(np.unique(labels.group))
    if len(labels.classes) < 2:
        only = (
            f"every sample is {labels.classes[0]!r}" if labels.classes else "no turn was read in the contexts it needs"
        )
        raise NotEstimable(only)
    if n_groups < MIN_GROUPS:
        raise NotEstimable(f"too few groups of tasks: {n_groups}, at least {MIN_GROUPS} are needed")
    for index, kind in enumerate(labels.classes):
        held = len(np.unique(labels.group[labels.value == index]))
        if held < MIN_CLASS_GROUPS:
            raise NotEstimable(f"class {kind!r} lies in {held} of {n_groups} groups, {MIN_CLASS_GROUPS} are needed")
    for _ in range(_ATTEMPTS):
        outer = _deal(labels.value, labels.group, OUTER, rng)
        if outer is None:
            continue
        inner = []
        for fold in range(outer.max() + 1):
            train = outer != fold
            dealt = _deal(labels.value[train], labels.group[train], INNER, rng)
            if dealt is None:
                break
            inner.append(np.full(len(outer), -1))
            inner[-1][train] = dealt
        else:
            return Folds(outer, tuple(inner))
    raise NotEstimable(f"no split of the {n_groups} groups leaves every class in every training part")


def _deal(value: np.ndarray, group: np.ndarray, folds: int, rng: np.random.Generator) -> np.ndarray | None:
    """Fold of each sample; None when a class is missing from some training part."""
    folds, n_classes = min(folds, len(np.unique(group))), len(np.unique(value))
    splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=int(rng.integers(2**31)))
    fold = np.full(len(value), -1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a class in fewer samples than folds: checked below
        for index, (train, test) in enumerate(splitter.split(value, value, group)):
            if len(np.unique(value[train])) < n_classes:
                return None
            fold[test] = index
    return fold


def shuffled(labels: Labels, outer: Int[np.ndarray, "n"], rng: np.random.Generator) -> Int[np.ndarray, "n"]:
    """Labels that are as likely as the real ones when the features say nothing about them.

    Where a trajectory holds several labels, their names are permuted within each trajectory, as a block: own and other
    are swapped for all of its turns or for none. Where it holds one, labels move between the tasks of an outer fold,
    which leaves every fold as balanced as it is for the real labels: whole tasks where all trajectories of a task share
    theirs; else the sequences of the tasks are shuffled whole and dealt out again, so that like outcomes stay together.
    Source: ours (what is exchangeable under the null); Hewitt & Liang 2019 for control labels as labels of a unit.
    """
    if labels.within:
        names = np.tile(np.arange(len(labels.classes)), (len(labels.trajectories), 1))
        return rng.permuted(names, axis=1)[labels.trajectory, labels.value]
    _, first = np.unique(labels.trajectory, return_index=True)
    label, task, fold = labels.value[first], labels.task[first], outer[first]  # of each trajectory
    drawn = label.copy()
    for held in np.unique(fold):
        members = [np.flatnonzero((fold == held) & (task == name)) for name in np.unique(task[fold == held])]
        runs = [label[members[index]] for index in rng.permutation(len(members))]
        if all(len(np.unique(run)) == 1 for run in runs):
            runs = [np.repeat(run[0], len(to)) for to, run in zip(members, runs, strict=True)]
        drawn[np.concatenate(members)] = np.concatenate(runs)
    return drawn[labels.trajectory]
