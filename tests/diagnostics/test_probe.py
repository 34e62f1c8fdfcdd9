"""Probes: recovery with negative controls, scikit-learn as oracle, folds, permutations, what is not estimable."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsRestClassifier
from sklearn.preprocessing import StandardScaler

from diagnostics import probe as protocol
from diagnostics import probe_readers
from diagnostics.derangement import other_sources, task_groups
from diagnostics.probe import Probe, balanced_accuracy, permutation_p, probe
from diagnostics.probe_labels import INNER, OUTER, Labels, NotEstimable, own_labels, shuffled, split, student_labels
from diagnostics.probe_readers import GRID, Reader, components, held_out
from diagnostics.records import Trajectory
from tests.diagnostics.test_derangement import play

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_permutations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(protocol, "PERMUTATIONS", 39)
    monkeypatch.setattr(protocol, "CONTROLS", 1)
    yield


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def plays(count: int = 20, per_task: int = 1) -> list[Trajectory]:
    """Trajectories of alternating outcome and of two types."""
    return [play(f"t{i:03}", f"task{i // per_task:03}", ("heat", "pick")[i // 2 % 2], i % 2 == 0) for i in range(count)]


def turns_of(trajectories: list[Trajectory], count: int = 4) -> list[tuple[str, int]]:
    return [(t.id, turn) for t in trajectories for turn in range(count)]


def own_and_other(count: int = 20, turns: int = 4) -> Labels:
    trajectories = plays(count)
    groups = task_groups(trajectories, other_sources(trajectories, {t.id: t.id for t in trajectories}, 0))
    return own_labels(turns_of(trajectories, turns), {t.id: t for t in trajectories}, groups)


def student(name: str, trajectories: list[Trajectory], turns: int = 4) -> Labels:
    found = student_labels(turns_of(trajectories, turns), {t.id: t for t in trajectories})
    return next(labels for labels in found if labels.name == name)


def planted(labels: Labels, d: int, strength: float, seed: int = 0) -> np.ndarray:
    """Noise, with the class as one direction of the given strength; a noise of its own in each trajectory."""
    noise = rng(seed)
    x = (
        noise.standard_normal((len(labels.value), d))
        + noise.standard_normal((labels.trajectory.max() + 1, d))[labels.trajectory]
    )
    directions = noise.standard_normal((len(labels.classes), d))
    return x + strength * directions[labels.value]


def reader(x: np.ndarray, layer: str = "0", **options: Any) -> Reader:
    return Reader("hidden", layer, lambda: x, **options)


def run(labels: Labels, *readers: Reader, seed: int = 0) -> list[Probe]:
    return probe(labels, readers, rng(seed), CPU)


# --- recovery and negative controls ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["own_skill", "success", "task_type", "turn_third"])
def test_a_planted_direction_is_found_at_its_layer_and_nowhere_else(name: str) -> None:
    labels = own_and_other() if name == "own_skill" else student(name, plays(24), turns=6)
    layers = [reader(planted(labels, 6, 1.5 * (layer == 1), seed=layer), str(layer)) for layer in range(3)]
    found = run(labels, *layers)
    chance = 1 / len(labels.classes)
    assert found[1].accuracy > chance + 0.3 and found[1].p == found[1].p_max == 1 / 40
    assert found[1].accuracy - found[1].control_accuracy > 0.2
    for other in (found[0], found[2]):
        assert other.p_max > 0.1 and other.null.min() <= other.balanced_accuracy <= other.null.max()
    assert all(abs(each.null.mean() - chance) < 0.15 for each in found)
    assert all(each.reading.unconverged == 0 for each in found)


def test_shuffled_labels_of_a_readable_layer_are_not_read() -> None:
    """The same features as above, the labels swapped within trajectories at random: chance."""
    labels = own_and_other(30)
    x = planted(labels, 6, 1.5)
    swapped = dataclasses.replace(labels, value=shuffled(labels, labels.group, rng(5)))
    (found,) = run(swapped, reader(x))
    assert found.p > 0.05 and abs(found.accuracy - 0.5) < 0.25
    assert run(labels, reader(x))[0].accuracy > 0.8


@pytest.mark.parametrize("d", [3, 200])
def test_equal_contexts_score_exactly_chance(d: int) -> None:
    """The built-in control: features that are the same under both skills, e.g. `embed`, cannot be told apart."""
    labels = own_and_other()
    half = rng().standard_normal((len(labels.value) // 2, d)) * 50 + 1000
    (found,) = run(labels, reader(np.concatenate([half, half])))
    assert found.accuracy == found.balanced_accuracy == found.control_accuracy == 0.5
    assert (found.null == 0.5).all() and found.p == found.p_max == 1.0
    assert (found.reading.credit == 0.5).all()


def test_knowing_the_skill_again_gives_nothing() -> None:
    """Features that hold nothing but which skill stands in the context; in other folds it would be known again."""
    trajectories = plays(40)
    skills = {t.id: t.id for t in trajectories}
    sources, by_id = other_sources(trajectories, skills, 0), {t.id: t for t in trajectories}
    turns = turns_of(trajectories)
    code = {t.id: vector for t, vector in zip(trajectories, rng().standard_normal((40, 200)), strict=True)}
    x = np.array([code[id] for id, _ in turns] + [code[sources[id]] for id, _ in turns])
    kept = own_labels(turns, by_id, task_groups(trajectories, sources))
    (found,) = run(kept, reader(x))
    assert 0.35 < found.accuracy < 0.65
    apart = own_labels(turns, by_id, {t.task_id: i for i, t in enumerate(trajectories)})
    assert run(apart, reader(x))[0].accuracy < 0.3  # seen as own, met as other: worse than chance


def test_b60_a_random_label_of_each_trajectory_is_not_read_in_grouped_folds() -> None:
    trajectories = [dataclasses.replace(t, success=bool(rng(i).random() < 0.5)) for i, t in enumerate(plays(40))]
    labels = student("success", trajectories, turns=25)
    x = planted(labels, 256, 0.0)
    (found,) = run(labels, reader(x))
    assert 0.35 < found.accuracy < 0.65
    rows = dataclasses.replace(labels, group=np.arange(len(labels.value)))  # the mistake: rows as groups
    assert run(rows, reader(x))[0].accuracy > 0.9


def test_a_network_reads_what_no_line_can() -> None:
    labels = own_and_other(20, turns=3)
    sign = rng().choice([-1.0, 1.0], len(labels.value))
    x = np.stack([sign, sign * (2 * labels.value - 1)], 1) + 0.2 * rng(1).standard_normal((len(sign), 2))
    line, network = run(labels, reader(x), reader(x, network=True))
    assert line.accuracy < 0.65 and network.accuracy > 0.9
    assert network.control_accuracy < 0.7 and np.isnan(network.p) and len(network.null) == 0


# --- the oracle ------------------------------------------------------------------------------------------------------


def sklearn_held_out(x: np.ndarray, value: np.ndarray, outer: np.ndarray, inner: Any) -> tuple[np.ndarray, list[float]]:
    """The protocol as a plain loop: scaler, C by inner folds, refit, predict."""
    right, chosen = np.empty(len(value)), []
    many = len(np.unique(value)) > 2

    def model(c: float) -> Any:
        one = LogisticRegression(C=c, tol=1e-8, max_iter=10_000)
        return OneVsRestClassifier(one) if many else one

    for fold, parts in enumerate(inner):
        train = outer != fold
        z = StandardScaler().fit(x[train]).transform(x)
        losses = []
        for c in GRID:
            loss = 0.0
            for part in range(parts.max() + 1):
                fit, rest = train & (parts != part), parts == part
                scores = model(c).fit(z[fit], value[fit]).decision_function(z[rest])
                hot = value[rest, None] == (np.arange(scores.shape[1]) if many else 1)
                loss += np.logaddexp(0, np.where(hot, -1, 1) * scores.reshape(len(hot), -1)).sum()
            losses.append(loss)
        chosen.append(GRID[int(np.argmin(losses))])
        right[~train] = model(chosen[-1]).fit(z[train], value[train]).predict(z[~train]) == value[~train]
    return right, chosen


@pytest.mark.parametrize("name", ["own_skill", "turn_third"])
@pytest.mark.parametrize("d", [5, 90])
def test_held_out_answers_are_those_of_a_scikit_learn_loop(name: str, d: int) -> None:
    labels = own_and_other(16) if name == "own_skill" else student(name, plays(20), turns=4)
    folds = split(labels, rng())
    x = planted(labels, d, 0.5)
    other = shuffled(labels, folds.outer, rng(1))
    values = np.stack([labels.value, other], 1)
    reading = held_out(torch.from_numpy(x), values, len(labels.classes), folds, tuned=2)
    for j in range(2):
        right, chosen = sklearn_held_out(x, values[:, j], folds.outer, folds.inner)
        assert reading.chosen[:, j].tolist() == chosen
        assert reading.credit[:, j].tolist() == right.tolist()


def test_permutations_are_fitted_at_the_c_of_the_real_labels() -> None:
    labels = own_and_other(16)
    folds, x = split(labels, rng()), torch.from_numpy(planted(labels, 5, 0.5))
    other = shuffled(labels, folds.outer, rng(1))
    one = held_out(x, np.stack([labels.value, other], 1), 2, folds, tuned=1)
    alone = held_out(x, other[:, None], 2, folds, tuned=1)
    assert one.chosen.shape == (len(folds.inner), 1)
    same = (one.chosen == alone.chosen)[:, 0]  # of these folds the answers must be equal
    held = np.isin(folds.outer, np.flatnonzero(same))
    assert (one.credit[held, 1] == alone.credit[held, 0]).all()


def test_principal_components_are_those_of_the_training_rows() -> None:
    x = rng().standard_normal((80, 10)) @ rng(1).standard_normal((10, 200))
    transform = components(torch.from_numpy(x[:60]))
    expected = PCA(60, svd_solver="full").fit(x[:60]).transform(x)[:, :10]
    ours = transform(torch.from_numpy(x)).numpy()
    assert ours.shape == (80, 60)
    assert np.abs(ours[:, :10]) == pytest.approx(np.abs(expected), rel=1e-6, abs=1e-6)


def test_a_transform_sees_the_training_part_alone() -> None:
    labels = own_and_other()
    seen: list[int] = []

    def before(x: torch.Tensor) -> Any:
        seen.append(len(x))
        return lambda rows: rows

    x = planted(labels, 4, 1.0)
    folds = split(labels, rng())
    plain = held_out(torch.from_numpy(x), labels.value[:, None], 2, folds, 1)
    through = held_out(torch.from_numpy(x), labels.value[:, None], 2, folds, 1, before)
    assert (plain.credit == through.credit).all()
    assert seen == [int((folds.outer != fold).sum()) for fold in range(len(folds.inner))]


# --- labels and folds ------------------------------------------------------------------------------------------------


def test_labels_of_turns() -> None:
    trajectories = [*plays(6), dataclasses.replace(play("e", "e", "heat"), error="crashed")]
    by_id = {t.id: t for t in trajectories}
    turns = [("t000", 0), *(("t001", turn) for turn in range(7)), ("t002", 0), ("t002", 1), ("e", 0), ("e", 2)]
    success, kind, third = student_labels(turns, by_id)
    named = {labels.name: [labels.classes[v] for v in labels.value] for labels in (success, kind, third)}
    assert named["success"] == ["success", *["failure"] * 7, *["success"] * 2]  # an error is no failure
    assert named["task_type"] == [by_id[id].task_type for id, _ in turns]
    assert named["turn_third"] == ["first"] * 3 + ["middle"] * 2 + ["last"] * 2 + ["first", "last"]
    assert [turns[row] for row in third.row] == [turn for turn in turns if turn[0] in ("t001", "e")]
    own = own_labels(turns[:3], by_id, {t.task_id: 7 for t in trajectories})
    assert [own.classes[v] for v in own.value] == ["own_skill"] * 3 + ["other_skill"] * 3
    assert own.row.tolist() == list(range(6)) and set(own.group) == {7} and own.trajectory.tolist() == [0, 1, 1] * 2


@pytest.mark.parametrize("name", ["own_skill", "success", "task_type", "turn_third"])
@pytest.mark.parametrize("seed", range(3))
def test_folds_never_share_a_group_or_a_task(name: str, seed: int) -> None:
    labels = own_and_other(30) if name == "own_skill" else student(name, plays(30, per_task=2))
    folds = split(labels, rng(seed))
    assert len(folds.inner) == OUTER and set(folds.outer) == set(range(OUTER))
    for fold, inner in enumerate(folds.inner):
        held = folds.outer == fold
        assert ((inner == -1) == held).all() and set(inner[~held]) == set(range(INNER))
        assert not set(labels.task[held]) & set(labels.task[~held])
        for part in range(INNER):
            assert not set(labels.group[inner == part]) & set(labels.group[~held & (inner != part)])
            assert set(labels.value[~held & (inner != part)]) == set(range(len(labels.classes)))


def success_of(outcomes: str) -> Labels:
    """One trajectory a task, A won, B lost."""
    return student("success", [play(f"t{i:02}", f"task{i:02}", success=o == "A") for i, o in enumerate(outcomes)])


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (success_of("AAAAB"), "class 'failure' lies in 1 of 5 groups, 3 are needed"),  # case R0
        (success_of("AAAAAA"), "every sample is 'success'"),
        (success_of("ABAB"), "too few groups of tasks: 4, at least 5"),
        (own_and_other(9), "too few groups of tasks: 4, at least 5"),
        (own_labels([], {}, {}), "no turn was read"),
    ],
)
def test_what_is_not_estimable_is_named(labels: Labels, reason: str) -> None:
    with pytest.raises(NotEstimable, match=reason):
        run(labels, reader(np.zeros((len(labels.value), 2))))


def test_a_rare_class_is_estimable_where_folds_can_be_stratified() -> None:
    labels = success_of("AAAAAAAAABBB")
    for seed in range(5):
        folds = split(labels, rng(seed))
        for fold, inner in enumerate(folds.inner):
            for part in range(inner.max() + 1):
                assert len(set(labels.value[(folds.outer != fold) & (inner != part)])) == 2


def test_a_class_in_too_few_tasks_is_left_out_where_others_remain() -> None:
    kinds = ["heat"] * 6 + ["pick"] * 6 + ["cool"] * 2
    labels = student("task_type", [play(f"t{i:02}", f"task{i:02}", kind) for i, kind in enumerate(kinds)])
    assert labels.classes == ("heat", "pick") and len(labels.value) == len(labels.row) == 48


# --- exchangeable labels ---------------------------------------------------------------------------------------------


def test_shuffles_keep_what_belongs_together() -> None:
    own = own_and_other(12)
    for seed in range(5):
        swapped = shuffled(own, own.group, rng(seed)) != own.value
        blocks = [set(swapped[own.trajectory == t]) for t in range(12)]
        assert all(len(block) == 1 for block in blocks) and len(set.union(*blocks)) == 2  # whole trajectories
    third = student("turn_third", plays(12), turns=6)
    drawn = shuffled(third, third.group, rng())
    for t in range(12):
        mine = third.trajectory == t
        assert len(set(zip(third.value[mine], drawn[mine], strict=True))) == 3  # the names change places
    kind = student("task_type", plays(16, per_task=2))
    outer = kind.task // 4
    drawn = shuffled(kind, outer, rng())
    assert all(len(set(drawn[kind.task == task])) == 1 for task in range(8)) and (drawn != kind.value).any()
    for fold in range(2):  # every fold keeps its balance
        assert sorted(drawn[outer == fold]) == sorted(kind.value[outer == fold])


def test_outcomes_move_in_the_runs_of_their_tasks() -> None:
    """Tasks won by all, by none or by half of four trajectories: the same outcomes, still four by four."""
    patterns = ["AAAA", "BBBB", "AABB", "AAAA", "BBBB", "ABAB"]
    made = [
        play(f"t{k}{i}", f"task{k}", success=outcome == "A")
        for k, pattern in enumerate(patterns)
        for i, outcome in enumerate(pattern)
    ]
    labels = student("success", made)
    first = np.unique(labels.trajectory, return_index=True)[1]
    drawn = set()
    for seed in range(10):
        value = shuffled(labels, np.zeros_like(labels.value), rng(seed))
        assert (value == value[first][labels.trajectory]).all()
        rows = value[first].reshape(6, 4)
        assert sorted(map(tuple, rows)) == sorted(map(tuple, labels.value[first].reshape(6, 4)))
        drawn.add(tuple(value[first]))
    assert len(drawn) > 5


def test_p_values_are_counts() -> None:
    noise = rng()
    observed, null = noise.integers(0, 9, 4) / 8, noise.integers(0, 9, (4, 50)) / 8
    p, corrected = permutation_p(observed, null)
    for i in range(4):
        assert p[i] == (1 + sum(v >= observed[i] for v in null[i])) / 51
        assert corrected[i] == (1 + sum(max(null[:, j]) >= observed[i] for j in range(50))) / 51
    assert (corrected >= p).all()


def test_p_is_uniform_under_the_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "PERMUTATIONS", 19)
    for labels, even in ((own_and_other(24, turns=2), True), (success_of("AAAAAAAAABBBB"), False)):
        p = np.array([run(labels, reader(planted(labels, 4, 0.0, seed)), seed=seed)[0].p for seed in range(30)])
        assert (p <= 0.1).mean() <= 0.24 and (p <= 0.5).mean() <= 0.7  # 3 standard errors, 2 of them
        assert not even or (0.35 < p.mean() < 0.75)  # ties of few samples only make p larger


def test_balanced_accuracy_ignores_how_large_a_class_is() -> None:
    values = np.array([[0, 1]] * 9 + [[1, 0]])
    always = (values == 0).astype(float)
    assert balanced_accuracy(always, values, 2).tolist() == [0.5, 0.5]


def test_ties_share_the_credit() -> None:
    scores = np.array([[[0.0, 0.0, -1.0]], [[2.0, 1.0, 0.0]], [[0.0, 0.0, -1.0]], [[-np.inf, np.inf, 0.0]]])
    assert probe_readers._credit(scores, np.array([[0], [0], [2], [1]]))[:, 0].tolist() == [0.5, 1.0, 0.0, 1.0]


def test_the_seed_alone_decides() -> None:
    labels = own_and_other(16, turns=2)
    x = planted(labels, 5, 0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        first, again = (run(labels, reader(x), reader(x, network=True), seed=3) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert (one.reading.credit == other.reading.credit).all() and (one.null == other.null).all()
