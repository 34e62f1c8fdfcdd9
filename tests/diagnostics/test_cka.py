"""The CKA stream: against the plain reference, free of batches, planted recovery with controls, what is left out."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from diagnostics.cka import MEASURE, Cka, Comparison, Sample, Spread, row_keys, task_blocks
from diagnostics.measure import Subject
from diagnostics.paired import PairedPass, PairedSegment, run_pairs
from diagnostics.records import Provenance
from diagnostics.similarity import debiased_cka, linear_cka
from tests.diagnostics.tiny import random_pair, tiny_model, trajectory

LAYERS, WIDTH = 3, 6
Batch = tuple[list[PairedSegment], PairedPass]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_pair(name: int, context: str, rows: int, turn: int = 0) -> PairedSegment:
    """One segment of trajectory `name`; two trajectories a task."""
    ids, positions = np.arange(rows + 1, dtype=np.int32), np.arange(1, rows + 1)
    kinds = np.full(rows, turn, np.int16), np.ones(rows, np.int8)
    return PairedSegment(ids, ids, positions, positions, ids[1:], *kinds, f"t{name}", f"task{name // 2}", context)


def make_pass(lengths: list[int], student: Tensor, teacher: Tensor) -> PairedPass:
    n = sum(lengths)
    return PairedPass(
        row=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        has_teacher=torch.ones(n, dtype=torch.bool),
        student_logprobs=torch.zeros(n),
        teacher_logprobs=torch.zeros(n),
        student_states=student,
        teacher_states=teacher,
    )


def batches(context: str, student: Tensor, teacher: Tensor, lengths: list[int], size: int = 2) -> list[Batch]:
    """Segments of the given lengths, one trajectory each, `size` of them a batch."""
    ends = np.cumsum([0, *lengths])
    found = []
    for first in range(0, len(lengths), size):
        names = list(range(first, min(first + size, len(lengths))))
        rows = slice(ends[names[0]], ends[names[-1] + 1])
        pairs = [make_pair(name, context, lengths[name]) for name in names]
        found.append((pairs, make_pass([lengths[name] for name in names], student[:, rows], teacher[:, rows])))
    return found


def stream(*given: list[Batch], tasks: int = 10, prepare: bool = True) -> Cka:
    measured = Cka(seed=3, blocks=task_blocks([f"task{i}" for i in range(tasks)], 3))
    for found in given if prepare else []:
        for pairs, passed in found:
            measured.prepare(pairs, dataclasses.replace(passed, teacher_logprobs=None, teacher_states=None))
    for found in given:
        for batch in found:
            measured.update(*batch)
    return measured


def rows(measured: Cka, table: str = "measurements", **wanted) -> list[dict]:
    found = measured.result(Provenance(run="r", seed=3))[table].to_pylist()
    return [row for row in found if all(row[key] == value for key, value in wanted.items())]


def by_layer(measured: Cka, metric: str, context: str = "own_skill") -> list[float]:
    found = rows(measured, metric=f"cka/{metric}", context=context)
    return [row["value"] for row in sorted(found, key=lambda row: int(row["layer"]))]


@pytest.fixture
def states() -> tuple[Tensor, Tensor, list[int]]:
    """Student and teacher states of 10 trajectories of 5 tasks, 80 rows; the teacher differs more in later layers."""
    lengths = [5, 9, 12, 3, 8, 8, 10, 5, 13, 7]
    student = torch.randn(LAYERS, 80, WIDTH, generator=generator(0)) + 4
    noise = torch.randn(LAYERS, 80, WIDTH, generator=generator(1))
    return student, student + noise * torch.tensor([0.1, 0.5, 2.0])[:, None, None], lengths


# --- against the reference -------------------------------------------------------------------------------------------


def test_every_value_equals_the_plain_reference(states) -> None:
    """Fewer rows than the sample holds: same-layer values, the map, and the values without each block are exact."""
    student, teacher, lengths = states
    measured = stream(batches("own_skill", student, teacher, lengths))
    expected = [debiased_cka(s, t) for s, t in zip(student, teacher, strict=True)]
    assert by_layer(measured, "debiased") == pytest.approx(expected, abs=1e-11)
    plug_in = [linear_cka(s, t) for s, t in zip(student, teacher, strict=True)]
    assert by_layer(measured, "plug_in") == pytest.approx(plug_in, abs=1e-11)
    found = {(int(r["student_layer"]), int(r["teacher_layer"])): r["debiased"]
             for r in rows(measured, "cka_map", coordinates="all")}  # fmt: skip
    reference = {(i, j): debiased_cka(student[i], teacher[j]) for i in range(LAYERS) for j in range(LAYERS)}
    assert found == pytest.approx(reference, abs=1e-11)
    task = np.repeat([f"task{name // 2}" for name in range(len(lengths))], lengths)
    block = np.array([measured.blocks[str(name)] for name in task])
    for left_out in (-1, *sorted(set(block.tolist()))):
        stay = torch.from_numpy(block != left_out)
        values = [r["debiased"] for r in rows(measured, "cka_blocks", block=left_out, coordinates="all")]
        expected = [debiased_cka(s[stay], t[stay]) for s, t in zip(student, teacher, strict=True)]
        assert values == pytest.approx(expected, abs=1e-11)
    assert len(set(block)) == 5  # a block of its own for each of five tasks
    counts = {r["metric"]: r["value"] for r in rows(measured, layer="")}
    assert counts == {"cka/rows": 80, "cka/sampled_rows": 80}
    assert set(by_layer(measured, "coordinates")) == {WIDTH}


@pytest.mark.parametrize("size", [1, 3, 10])
def test_neither_batches_nor_their_order_change_a_result(states, size: int, monkeypatch) -> None:
    """Also where the sample is far smaller than the rows: it is drawn by the rows' own keys."""
    monkeypatch.setattr("diagnostics.cka.ROWS", 20)
    student, teacher, lengths = states
    one = stream(batches("own_skill", student, teacher, lengths, 4))
    other = stream(batches("own_skill", student, teacher, lengths, size)[::-1])
    assert rows(one, metric="cka/sampled_rows")[0]["value"] == 20
    for table, value in (("measurements", "value"), ("cka_blocks", "debiased"), ("cka_map", "debiased")):
        first, second = ([row[value] for row in rows(measured, table)] for measured in (one, other))
        assert first == pytest.approx(second, abs=1e-11, nan_ok=True)


def test_the_sample_is_that_of_the_smallest_keys_and_the_same_in_every_context() -> None:
    keys = np.random.default_rng(0).random(500)
    states = torch.arange(500.0)[None, :, None].expand(2, 500, 3)
    sample = Sample(64)
    for part in np.split(np.arange(500), [1, 40, 41, 300]):
        sample.add(states[:, part], -states[:, part], keys[part], part % 7)
    a, b, blocks = sample.rows()
    assert sorted(a[0, :, 0].int().tolist()) == sorted(np.argsort(keys)[:64].tolist())
    assert torch.equal(a, -b) and (a[0, :, 0].numpy() % 7 == blocks).all() and (np.diff(blocks) >= 0).all()
    own, control = make_pair(4, "own_skill", 9), make_pair(4, "unrelated", 9)
    assert np.array_equal(row_keys([own], 1), row_keys([control], 1))
    others = [
        row_keys([own], 2),
        row_keys([make_pair(5, "own_skill", 9)], 1),
        row_keys([make_pair(4, "own_skill", 9, 1)], 1),
    ]
    assert all(not np.isin(row_keys([own], 1), other).any() for other in others)


def test_tasks_are_dealt_into_twenty_even_blocks() -> None:
    tasks = [f"task{i}" for i in range(67)]
    blocks = task_blocks(tasks + tasks[::-1], 0)
    assert blocks == task_blocks(sorted(tasks), 0) != task_blocks(tasks, 1)
    sizes = np.bincount(list(blocks.values()))
    assert len(sizes) == 20 and set(sizes) == {3, 4}
    assert sorted(task_blocks(tasks[:5], 0).values()) == [0, 1, 2, 3, 4]


# --- recovery and controls -------------------------------------------------------------------------------------------


def test_equal_contexts_give_exactly_no_dissimilarity(states) -> None:
    """Exactly 0 over all rows; the sample's values, which are sums over pairs, to rounding."""
    student, _, lengths = states
    measured = stream(batches("none", 50 * student, 50 * student.clone(), lengths))
    for metric in ("debiased", "plug_in", "trimmed/debiased"):
        assert [1 - value for value in by_layer(measured, metric, "none")] == [0.0] * LAYERS
    assert [r["debiased"] for r in rows(measured, "cka_blocks")] == pytest.approx([1] * 2 * 6 * LAYERS, abs=1e-13)


def test_a_planted_change_is_found_at_its_layer_and_a_rotation_is_none(states) -> None:
    student, _, lengths = states
    rotation = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator(4)))[0]
    turned = 3 * student @ rotation - 2
    planted = student.clone()
    planted[1] += torch.randn(80, WIDTH, generator=generator(5))
    measured = stream(
        batches("own_skill", student, planted, lengths), batches("unrelated", student, turned, lengths), tasks=5
    )
    own, control = (np.array(by_layer(measured, "debiased", c)) for c in ("own_skill", "unrelated"))
    assert own[1] < 0.8 and np.abs(own[[0, 2]] - 1).max() == 0 and np.abs(control - 1).max() < 1e-6
    assert np.abs(by_layer(measured, "null_debiased")).max() < 0.1  # the rows shuffled
    assert np.mean(by_layer(measured, "null_plug_in")) == pytest.approx(WIDTH / (WIDTH + 80), abs=0.04)


def test_r7_massive_coordinates_hide_what_the_trimmed_version_shows() -> None:
    """Case R7 in the stream; the coordinates are chosen once, of the students, for every context."""
    student, teacher = torch.randn(2, 1, 90, 8, generator=generator(6))
    student[..., 2] = teacher[..., 2] = 200 * torch.randn(90, generator=generator(7))
    measured = stream(batches("own_skill", student, teacher, [9] * 10))
    assert by_layer(measured, "debiased")[0] > 0.9999 and abs(by_layer(measured, "trimmed/debiased")[0]) < 0.1
    assert by_layer(measured, "coordinates") == [8] and by_layer(measured, "trimmed/coordinates") == [7]
    (whole,) = rows(measured, "cka_blocks", coordinates="trimmed", block=-1)
    assert whole["debiased"] == pytest.approx(by_layer(measured, "trimmed/debiased")[0], abs=1e-9)
    (pair,) = rows(measured, "cka_map", coordinates="trimmed")
    assert pair["debiased"] == pytest.approx(whole["debiased"], abs=1e-12)


def test_model_with_and_without_a_skill() -> None:
    """States read by the house's own pair of forwards; the same ids in both branches change nothing at all."""
    model = tiny_model(layers=2)
    pairs = [random_pair(seed) for seed in range(12)]
    same = [dataclasses.replace(pair, teacher_ids=pair.student_ids, teacher_positions=pair.student_positions,
                                context="none") for pair in pairs]  # fmt: skip
    subject = Subject(
        model, None, [dataclasses.replace(trajectory([]), task_id=p.task_id) for p in pairs], {}, 0, 1, {}
    )
    assert MEASURE.start is not None and MEASURE.needs.states and MEASURE.needs.prepare
    measured = MEASURE.start(subject)
    with torch.no_grad():
        measured.prepare(pairs, run_pairs(model, pairs, states="before", teacher=False))
        for chosen in (pairs, same):
            measured.update(chosen, run_pairs(model, chosen, states="before"))
    assert by_layer(measured, "debiased", "none") == [1.0, 1.0]
    assert max(by_layer(measured, "debiased", "own_skill")) < 0.999
    assert len(rows(measured, "cka_blocks", context="own_skill", layer="1", coordinates="all")) == 1 + 12


def test_two_models_of_other_depth_and_width_are_compared_by_the_map_alone() -> None:
    a = torch.randn(2, 40, 5, generator=generator(8))
    b = torch.randn(3, 40, 7, generator=generator(9))
    b[2, :, :5] = 10 * a[0]
    comparison = Comparison()
    keys, blocks = np.random.default_rng(0).random(40), np.arange(40) % 4
    for part in np.split(np.arange(40), 4):
        comparison.add(a[:, part], b[:, part], keys[part], blocks[part])
    without_blocks, pairs = comparison.pairwise()
    found = {(row["student_layer"], row["teacher_layer"]): row["debiased"] for row in pairs[:6]}
    expected = {(str(i), str(j)): debiased_cka(a[i], b[j]) for i in range(2) for j in range(3)}
    assert found == pytest.approx(expected, abs=1e-11) and found["0", "2"] > 0.9
    assert not without_blocks
    assert [row["metric"] for row in comparison.values(generator(0))] == ["cka/rows", "cka/sampled_rows"]


def test_two_checkpoints_have_same_layer_values(states) -> None:
    student, teacher, _ = states
    comparison = Comparison(Spread.of(student), Spread.of(teacher))
    comparison.add(student, teacher, np.random.default_rng(0).random(80), np.arange(80) % 8)
    found = {row["layer"]: row["value"] for row in comparison.values(generator(0)) if row["metric"] == "cka/debiased"}
    expected = {str(i): debiased_cka(student[i], teacher[i]) for i in range(LAYERS)}
    assert found == pytest.approx(expected, abs=1e-11)


# --- what is left out ------------------------------------------------------------------------------------------------


def test_states_that_are_not_finite_are_left_out_and_counted(states) -> None:
    student, teacher, lengths = states
    broken = teacher.clone()
    broken[1, [4, 30], 0] = torch.tensor([torch.nan, torch.inf])
    stay = [i for i in range(80) if i not in (4, 30)]
    measured = stream(batches("own_skill", student, broken, lengths))
    assert by_layer(measured, "debiased")[2] == pytest.approx(
        debiased_cka(student[2, stay], teacher[2, stay]), abs=1e-11
    )
    assert [row["value"] for row in rows(measured, metric="cka/rows_not_finite")] == [2]
    assert [row["value"] for row in rows(measured, metric="cka/rows")] == [78]
    nothing = stream(batches("own_skill", student * torch.nan, teacher, lengths))
    assert [row["metric"] for row in rows(nothing)] == ["cka/rows", "cka/rows_not_finite"]
    assert not rows(nothing, "cka_map") and not rows(nothing, "cka_blocks")


def test_b59_too_few_rows_and_constant_layers_have_no_value_but_a_reason(states) -> None:
    """Case B59: 3 rows; a last batch of 2 rows is merged; one constant layer leaves the others alone."""
    student, teacher, _ = states
    few = stream(batches("own_skill", student[:, :3], teacher[:, :3], [1, 2], 1))
    assert all(math.isnan(value) for value in by_layer(few, "debiased"))
    assert by_layer(few, "undefined/too_few_rows") == [1] * LAYERS
    merged = stream(batches("own_skill", student[:, :32], teacher[:, :32], [15, 15, 2], 1))
    assert by_layer(merged, "debiased")[1] == pytest.approx(debiased_cka(student[1, :32], teacher[1, :32]), abs=1e-11)
    flat = student.clone()
    flat[1] = 0.3
    measured = stream(batches("own_skill", flat, teacher, [8] * 10))
    assert np.isnan(by_layer(measured, "debiased")).tolist() == [False, True, False]
    assert [row["layer"] for row in rows(measured, metric="cka/undefined/constant")] == ["1"]
    found = np.array([row["debiased"] for row in rows(measured, "cka_map", coordinates="all")]).reshape(3, 3)
    assert np.isnan(found[1]).all() and np.isfinite(found[[0, 2]]).all()


def test_one_task_has_no_blocks_to_leave_out(states) -> None:
    student, teacher, _ = states
    measured = stream(batches("own_skill", student[:, :20], teacher[:, :20], [10, 10]))
    assert {row["block"] for row in rows(measured, "cka_blocks")} == {-1}


def test_a_pair_without_a_teacher_is_refused(states) -> None:
    student, teacher, _ = states
    ((pairs, passed),) = batches("own_skill", student, teacher, [40, 40])
    without = dataclasses.replace(passed, has_teacher=torch.zeros(80, dtype=torch.bool))
    with pytest.raises(ValueError, match="without a teacher context"):
        stream([(pairs, without)], prepare=False)


def test_memory_does_not_grow_with_the_tokens(states, monkeypatch) -> None:
    monkeypatch.setattr("diagnostics.cka.ROWS", 20)
    student, teacher, lengths = states

    def held(measured: Cka) -> int:
        total = 0
        for comparison in measured.comparisons.values():
            for part in (comparison._moments, comparison._sample):
                total += sum(x.nbytes for x in vars(part).values() if hasattr(x, "nbytes"))
        return total

    once = stream(batches("own_skill", student[:, :26], teacher[:, :26], lengths[:3]))
    assert held(once) == held(stream(*[batches("own_skill", student, teacher, lengths)] * 4)) > 0
