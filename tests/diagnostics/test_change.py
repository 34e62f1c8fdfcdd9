"""Change rates: worked numbers, oracles, thresholds and the null, contexts and their controls."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from diagnostics.change import (
    CHANNELS,
    EDGES,
    HIDDEN,
    MEASURE,
    THRESHOLDS,
    Change,
    _histograms,
    hidden_change,
    norm_change,
    null_quantile,
    output_change,
    output_logprob_change,
    top_token,
)
from diagnostics.contexts import CONTEXTS, contexts_for, shuffled_words, unrelated_text
from diagnostics.paired import PairedPass, PairedSegment
from diagnostics.records import Provenance, Trajectory

LAYERS, WIDTH = 2, 5


class Words:
    """A tokenizer of words and single spaces."""

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


def make_pair(trajectory: str, context: str, classes: list[int], task: str = "task") -> PairedSegment:
    n = len(classes)
    ids, positions = np.arange(n + 1, dtype=np.int32), np.arange(1, n + 1)
    kinds = np.zeros(n, np.int16), np.array(classes, np.int8)
    return PairedSegment(ids, ids, positions, positions, ids[1:], *kinds, trajectory, task, context)


def make_pass(
    pairs: list[PairedSegment], generator: torch.Generator, scale: float, has_teacher: bool = True
) -> PairedPass:
    """Random student tensors; the teacher's differ from them by noise of the given scale, some top tokens by one."""
    lengths = [len(pair.response_ids) for pair in pairs]
    m = sum(lengths)
    student = -torch.rand(m, generator=generator) * 3 - 0.01
    states = torch.randn(LAYERS, m, WIDTH, generator=generator)
    return PairedPass(
        row=torch.repeat_interleave(torch.arange(len(pairs)), torch.tensor(lengths)),
        has_teacher=torch.full((m,), has_teacher),
        student_logprobs=student,
        teacher_logprobs=torch.clamp(student + scale * torch.randn(m, generator=generator), max=0),
        student_states=states,
        teacher_states=states + scale * torch.randn(LAYERS, m, WIDTH, generator=generator),
        divergence=scale * torch.randn(m, generator=generator).square(),
        student_outputs={"top1": torch.randint(5, (m,), generator=generator)},
        teacher_outputs={"top1": torch.randint(5, (m,), generator=generator)},
    )


def table_rows(change: Change, **wanted: str) -> list[dict]:
    rows = change.result(Provenance(run="r", seed=1))["measurements"].to_pylist()
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def value(change: Change, **wanted: str) -> float:
    (row,) = table_rows(change, **wanted)
    return row["value"]


def make_trajectories(tasks: list[int]) -> list[Trajectory]:
    fixed = {"task_type": "pick", "env": "household", "split": "train", "description": "d", "seed": 0, "step": 0}
    fixed |= {"turns": (), "segments": (), "reward": 0.0, "success": False, "stop_reason": "done"}
    return [
        Trajectory(id=f"t{i}", task_id=f"task{k}", group=k, attempt=i, first_observation_sha256="", **fixed)
        for i, k in enumerate(tasks)
    ]


# --- quantities ------------------------------------------------------------------------------------------------------


def test_worked_numbers_of_the_output() -> None:
    student, teacher = torch.log(torch.tensor([0.5, 0.9, 0.2])), torch.log(torch.tensor([0.25, 0.9, 0.8]))
    assert output_change(student, teacher).numpy() == pytest.approx([0.25, 0.0, 0.6], abs=1e-7)
    expected = [math.log(2), 0.0, math.log(4)]
    assert output_logprob_change(student, teacher).numpy() == pytest.approx(expected, abs=1e-6)


def test_worked_numbers_of_the_states() -> None:
    """Equal direction, orthogonal, opposite, a zero vector on one side and on both."""
    student = torch.tensor([[[1.0, 2.0], [1.0, 0.0], [3.0, 4.0], [1.0, 0.0], [0.0, 0.0]]])
    teacher = torch.tensor([[[2.0, 4.0], [0.0, 7.0], [-3.0, -4.0], [0.0, 0.0], [0.0, 0.0]]])
    assert hidden_change(student, teacher)[0].numpy() == pytest.approx([0, 1, 2, 0.5, 0], abs=1e-15)


def test_hidden_change_equals_one_minus_cosine() -> None:
    student, teacher = torch.randn(2, 3, 50, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    centre = student.mean(1)
    for c in (None, centre):
        shift = 0 if c is None else c[:, None]
        oracle = 1 - torch.nn.functional.cosine_similarity(student - shift, teacher - shift, dim=-1)
        assert torch.allclose(hidden_change(student, teacher, c), oracle, atol=1e-12)


def test_hidden_change_is_free_of_scale_and_rotation_and_exact_for_small_angles() -> None:
    generator = torch.Generator().manual_seed(1)
    student, teacher = torch.randn(2, 1, 30, 8, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64))[0]
    changed = hidden_change(student, teacher)
    assert torch.allclose(hidden_change(3 * student @ rotation, 0.1 * teacher @ rotation), changed, atol=1e-12)
    angle = 1e-6  # 1 - cos = 5e-13, which fp32 cosines would round to 0
    turned = torch.tensor([[[math.cos(angle), math.sin(angle)]]], dtype=torch.float64)
    assert hidden_change(torch.tensor([[[1.0, 0.0]]]).double(), turned).item() == pytest.approx(5e-13, rel=1e-3)


def test_worked_numbers_of_the_length() -> None:
    """Longer, shorter, turned, equal, from zero, both zero."""
    student = torch.tensor([[[3.0, 4.0], [3.0, 4.0], [3.0, 4.0], [3.0, 4.0], [0.0, 0.0], [0.0, 0.0]]])
    teacher = torch.tensor([[[6.0, 8.0], [0.0, 1.0], [-4.0, 3.0], [3.0, 4.0], [1.0, 0.0], [0.0, 0.0]]])
    assert norm_change(student, teacher)[0].tolist() == pytest.approx([1, 0.8, 0, 0, math.inf, 0], abs=1e-15)


def test_the_length_is_free_of_rotation_and_common_scale_and_sees_what_the_cosine_does_not() -> None:
    generator = torch.Generator().manual_seed(10)
    student, teacher = torch.randn(2, 2, 30, 8, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64))[0]
    changed = norm_change(student, teacher)
    assert torch.allclose(norm_change(7 * student @ rotation, 7 * teacher), changed, atol=1e-12)
    grown = 1.3 * student
    assert torch.allclose(norm_change(student, grown), torch.full((2, 30), 0.3, dtype=torch.float64), atol=1e-12)
    assert hidden_change(student, grown).max() < 1e-15 < 1e-3 < hidden_change(student, teacher).max()


def test_the_top_token_is_the_likeliest_and_of_equals_the_first() -> None:
    logprobs = torch.log(torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.2, 0.4], [0.1, 0.1, 0.8]]))
    assert top_token(logprobs).tolist() == [1, 0, 2]


def test_centring_reveals_what_a_shared_large_coordinate_hides() -> None:
    generator = torch.Generator().manual_seed(2)
    student, teacher = torch.randn(2, 1, 400, 8, generator=generator)
    student[..., 0] = teacher[..., 0] = 1000.0
    raw = hidden_change(student, teacher).mean()
    centred = hidden_change(student, teacher, student.double().mean(1)).mean()
    assert raw < 1e-4 and 0.9 < centred < 1.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_inputs_change_by_exactly_zero(dtype: torch.dtype) -> None:
    states = torch.randn(3, 40, 16, generator=torch.Generator().manual_seed(3)).to(dtype) * 100
    centre = states.double().mean(1)
    logprobs = -torch.rand(40)
    assert not hidden_change(states, states.clone()).any() and not hidden_change(states, states.clone(), centre).any()
    assert not output_change(logprobs, logprobs.clone()).any()
    assert not output_logprob_change(logprobs, logprobs.clone()).any()
    assert not norm_change(states, states.clone()).any()


# --- the stream ------------------------------------------------------------------------------------------------------


def test_counts_means_and_curves_match_a_direct_computation() -> None:
    generator = torch.Generator().manual_seed(4)
    change = Change()
    pairs = [
        make_pair("a", "own_skill", [1] * 20 + [2] * 30),
        make_pair("b", "own_skill", [3] * 7),
        make_pair("a", "own_skill", [2] * 5),
    ]
    passed = make_pass(pairs, generator, 0.3)
    change.prepare(pairs, passed)
    change.update(pairs, passed)
    states = passed.student_states.double()
    direct = {
        "output_change": (passed.teacher_logprobs.double().exp() - passed.student_logprobs.double().exp()).abs(),
        "output_logprob_change": (passed.teacher_logprobs.double() - passed.student_logprobs.double()).abs(),
        "output_jsd": passed.divergence.double(),
        "hidden_norm_change": norm_change(passed.student_states, passed.teacher_states).mean(0),
        "hidden_change": hidden_change(passed.student_states, passed.teacher_states).mean(0),
        "hidden_change_centred": hidden_change(passed.student_states, passed.teacher_states, states.mean(1)).mean(0),
    }
    assert direct.keys() == set(CHANNELS)
    flips = (passed.student_outputs["top1"] != passed.teacher_outputs["top1"]).numpy()
    assert 0 < flips.mean() < 1
    classes, row = np.concatenate([p.token_class for p in pairs]), passed.row.numpy()
    table = change.result(Provenance())["thresholds"].to_pylist()
    for channel, values in direct.items():
        values = values.numpy()
        layer = "mean" if channel.startswith("hidden") else ""
        for trajectory, rows in (("a", [0, 2]), ("b", [1])):
            for label, kinds in (("think", [1]), ("action", [2]), ("format", [3]), ("all", [1, 2, 3])):
                chosen = values[np.isin(row, rows) & np.isin(classes, kinds)]
                cell = {"trajectory": trajectory, "token_class": label}
                assert value(change, metric="tokens", **cell) == len(chosen)
                if len(chosen):
                    flipped = flips[np.isin(row, rows) & np.isin(classes, kinds)]
                    assert value(change, metric="top1_flip/rate", **cell) == flipped.mean()
                    mean = value(change, metric=f"{channel}/mean", layer=layer, **cell)
                    assert mean == pytest.approx(chosen.mean(), rel=1e-12)
                curve = [r for r in table if r["channel"] == channel and all(r[k] == v for k, v in cell.items())]
                assert [r["threshold"] for r in curve] == THRESHOLDS.tolist()
                assert [r["count"] for r in curve] == [int((chosen > t).sum()) for t in THRESHOLDS]
                assert {r["total"] for r in curve} == {len(chosen)} and {r["layer"] for r in curve} == {layer}


def test_by_layer_rows_average_to_the_mean_over_layers() -> None:
    change = Change()
    pairs = [make_pair("a", "none", [1, 2, 3] * 10)]
    change.update(pairs, make_pass(pairs, torch.Generator().manual_seed(5), 0.5))
    by_layer = [value(change, metric="hidden_change/mean", token_class="all", layer=str(k)) for k in range(LAYERS)]
    assert value(change, metric="hidden_change/mean", token_class="all", layer="mean") == pytest.approx(
        np.mean(by_layer)
    )
    assert not table_rows(change, metric="output_change/share_above_null")  # no `unrelated`, no headline


@pytest.mark.parametrize("size", [1, 3, 12])
def test_batches_and_their_order_do_not_matter(size: int) -> None:
    generator = torch.Generator().manual_seed(6)
    items = [(make_pair(f"t{i % 4}", "own_skill", [1 + i % 3] * (3 + i)), i) for i in range(12)]
    whole = {i: make_pass([pair], torch.Generator().manual_seed(i), 0.3) for pair, i in items}

    def run(order: list[int]) -> Change:
        change = Change()
        batches = [[items[i] for i in order[start : start + size]] for start in range(0, 12, size)]
        for call in (change.prepare, change.update):
            for batch in batches:
                parts = [whole[i] for _, i in batch]
                row = torch.cat([torch.full_like(p.row, index) for index, p in enumerate(parts)])
                flat = {
                    k: torch.cat([getattr(p, k) for p in parts])
                    for k in ("student_logprobs", "teacher_logprobs", "has_teacher", "divergence")
                }
                tops = {
                    k: {"top1": torch.cat([getattr(p, k)["top1"] for p in parts])}
                    for k in ("student_outputs", "teacher_outputs")
                }
                cube = {
                    k: torch.cat([getattr(p, k) for p in parts], dim=1) for k in ("student_states", "teacher_states")
                }
                call([pair for pair, _ in batch], PairedPass(row=row, **flat, **cube, **tops))
        return change

    def numbers(change: Change) -> dict:
        keys = ("trajectory", "token_class", "layer", "metric")
        return {tuple(row[k] for k in keys): row["value"] for row in table_rows(change)}

    first, second = numbers(run(list(range(12)))), numbers(run(torch.randperm(12, generator=generator).tolist()))
    assert first.keys() == second.keys()
    assert all(first[k] == pytest.approx(second[k], rel=1e-9, abs=1e-15) for k in first)


def test_the_null_threshold_is_the_99th_percentile_from_above() -> None:
    values = np.abs(np.random.default_rng(0).standard_t(3, 20_000)) * 0.01
    histogram = np.bincount(np.searchsorted(EDGES, values, side="left"), minlength=len(EDGES) + 1)
    exact = np.sort(values)[math.ceil(0.99 * len(values)) - 1]
    (found,) = null_quantile(histogram[None])
    assert exact <= found <= exact * 1.006
    assert null_quantile(np.eye(1, len(EDGES) + 1, dtype=int))[0] == EDGES[0]  # all at 0


def test_a_value_at_a_threshold_is_not_above_it() -> None:
    counts = _histograms(np.array([[0.0, 1.0, 1.5, 2.0, 9.0]]), np.array([1.0, 2.0]))
    assert counts.tolist() == [[2, 2, 1]]


def test_headline_is_one_percent_under_the_null_and_more_under_a_real_change() -> None:
    """Two-sided: a skill that changes as little as unrelated text scores as the null does, a strong one far above."""
    generator, change = torch.Generator().manual_seed(7), Change()
    for context, scale in (("unrelated", 0.1), ("own_skill", 0.1), ("other_skill", 2.0)):
        for trajectory in ("a", "b"):
            pairs = [make_pair(trajectory, context, [1, 2, 3, 1] * 2000)]
            passed = make_pass(pairs, generator, scale)
            change.prepare(pairs, passed)
            change.update(pairs, passed)
    for channel in CHANNELS:
        layer = "mean" if channel in HIDDEN else ""
        share = {}
        for context in ("unrelated", "own_skill", "other_skill"):
            cell = {"context": context, "metric": f"{channel}/share_above_null", "token_class": "all", "layer": layer}
            share[context] = float(np.mean([row["value"] for row in table_rows(change, **cell)]))
        assert 0.0085 < share["unrelated"] <= 0.01
        assert 0.006 < share["own_skill"] < 0.014
        assert share["other_skill"] > 0.3
    assert len(table_rows(change, metric="hidden_change/null_threshold")) == 1 + LAYERS
    assert table_rows(change, context="own_skill", metric="hidden_change/share_above_null", layer="1")


def test_headline_counts_are_exact_at_the_threshold() -> None:
    generator, change = torch.Generator().manual_seed(8), Change()
    for context, scale in (("unrelated", 0.2), ("own_skill", 0.5)):
        pairs = [make_pair("a", context, [2] * 500)]
        passed = make_pass(pairs, generator, scale)
        change.update(pairs, passed)
        threshold = value(change, metric="output_change/null_threshold")
        direct = (output_change(passed.student_logprobs, passed.teacher_logprobs).numpy() > threshold).mean()
        cell = {"context": context, "metric": "output_change/share_above_null", "token_class": "action"}
        assert value(change, **cell) == direct


def test_the_null_must_come_first() -> None:
    change = Change()
    for context in ("own_skill", "unrelated"):
        pairs = [make_pair("a", context, [1, 2])]
        passed = make_pass(pairs, torch.Generator().manual_seed(0), 0.1)
        if context == "own_skill":
            change.update(pairs, passed)
        else:
            with pytest.raises(ValueError, match="'unrelated' must be measured before"):
                change.update(pairs, passed)


def test_values_that_are_not_finite_are_left_out_and_counted() -> None:
    """Cases B06 and B21: selection, not multiplication; nothing stored is NaN."""
    pairs = [make_pair("a", "own_skill", [1, 1, 1])]
    passed = make_pass(pairs, torch.Generator().manual_seed(9), 0.3)
    passed.student_states[:, 0] = float("nan")
    passed.student_outputs["top1"][:], passed.teacher_outputs["top1"][:] = 0, torch.tensor([1, 1, 0])
    passed.teacher_logprobs[1] = -float("inf")  # p_T = 0: |p_T - p_S| is finite, the log-prob change is not
    change = Change()
    change.prepare(pairs, passed)
    change.update(pairs, passed)
    result = change.result(Provenance())
    assert value(change, metric="tokens", token_class="think") == 1
    assert value(change, metric="tokens_not_finite") == 2
    assert np.isfinite(result["measurements"].column("value").to_numpy()).all()
    assert torch.isfinite(change.state_sum).all() and change.state_count == 2
    assert value(change, metric="top1_flip/rate", token_class="all") == 0  # both flips are of tokens left out
    only = hidden_change(passed.student_states[:, 2:], passed.teacher_states[:, 2:]).mean()
    assert value(change, metric="hidden_change/mean", token_class="all", layer="mean") == pytest.approx(only.item())


def test_rounding_below_zero_is_no_divergence() -> None:
    pairs = [make_pair("a", "unrelated", [1, 1])]
    passed = make_pass(pairs, torch.Generator().manual_seed(11), 0.3)
    passed.divergence[:] = torch.tensor([-1e-9, 0.5])
    change = Change()
    change.update(pairs, passed)
    assert value(change, metric="output_jsd/mean", token_class="all") == 0.25


def test_passes_without_the_full_distribution_have_the_other_quantities() -> None:
    """Log-probs and states are all that a backend without its head gives."""
    pairs = [make_pair("a", context, [1, 2] * 20) for context in ("unrelated", "own_skill")]
    full, bare = Change(), Change()
    for pair in pairs:
        passed = make_pass([pair], torch.Generator().manual_seed(12), 0.3)
        full.update([pair], passed)
        bare.update([pair], replace(passed, divergence=None, student_outputs={}, teacher_outputs={}))
    rows, fewer = table_rows(full), table_rows(bare)
    assert fewer == [row for row in rows if not row["metric"].startswith(("output_jsd", "top1_flip"))]
    assert len(fewer) < len(rows)
    channels = set(bare.result(Provenance())["thresholds"].column("channel").to_pylist())
    assert channels == set(CHANNELS) - {"output_jsd"}


def test_the_measure_asks_for_what_it_counts() -> None:
    assert MEASURE.name == "change" and MEASURE.needs.states and MEASURE.needs.divergence == "jsd"
    assert MEASURE.needs.outputs == {"top1": top_token} and MEASURE.needs.first == ("unrelated",)


def test_empty_masks_give_no_rows_and_no_nan() -> None:
    """Case B21."""
    pairs = [make_pair("a", "own_skill", []), make_pair("b", "own_skill", [2])]
    change = Change()
    change.update(pairs[:1], make_pass(pairs[:1], torch.Generator(), 0.1))
    assert change.result(Provenance())["measurements"].num_rows == 0
    change.update(pairs, make_pass(pairs, torch.Generator().manual_seed(0), 0.1))
    rows = table_rows(change)
    assert {
        row["token_class"] for row in rows if row["metric"] == "output_change/mean" and row["trajectory"] == "b"
    } == {"action", "all"}
    assert not [row for row in rows if row["trajectory"] == "a" and row["metric"] != "tokens"]
    assert all(math.isfinite(row["value"]) for row in rows)


def test_a_pair_without_a_teacher_is_an_error() -> None:
    pairs = [make_pair("a", "own_skill", [1])]
    with pytest.raises(ValueError, match="without a teacher context"):
        Change().update(pairs, make_pass(pairs, torch.Generator(), 0.1, has_teacher=False))


def test_memory_does_not_grow_with_the_number_of_tokens() -> None:
    def stored(change: Change) -> int:
        arrays = [change.state_sum.numpy(), change.null_histogram, *change.null_fine.values()]
        for counts in change.counts.values():
            arrays += [counts.total, counts.sum, counts.above_null, counts.curve, counts.flips]
        return sum(array.nbytes for array in arrays)

    change, sizes = Change(), []
    for _ in range(3):
        for length in (10, 3000):
            pairs = [make_pair("a", "unrelated", [1, 2] * length)]
            passed = make_pass(pairs, torch.Generator().manual_seed(0), 0.1)
            change.prepare(pairs, passed)
            change.update(pairs, passed)
            sizes.append(stored(change))
    assert len(set(sizes)) == 1
    result = change.result(Provenance())
    assert result["thresholds"].num_rows == 4 * len(CHANNELS) * 200


# --- contexts --------------------------------------------------------------------------------------------------------


def test_every_context_and_its_order_independence() -> None:
    trajectories = make_trajectories([0, 0, 1, 1, 2, 2])
    skills = {t.id: f"skill of {t.id} : look in the drawer {t.id}" for t in trajectories[:5]} | {"t5": " "}
    texts = contexts_for(Words(), trajectories, skills, CONTEXTS, seed=3)
    assert list(texts) == list(CONTEXTS)
    assert texts["own_skill"] == {f"t{i}": skills[f"t{i}"] for i in range(5)}  # t5 has none: left out, not emptied
    for id, text in texts["shuffled"].items():
        assert Counter(text.split()) == Counter(skills[id].split())
    assert any(texts["shuffled"][id] != skills[id] for id in texts["shuffled"])
    for id, text in texts["unrelated"].items():
        assert len(text.split()) == len(skills[id].split()) and not set(text.split()) & {"drawer", id}
    assert texts["none"] == texts["floor"] == {t.id: "" for t in trajectories}
    again = contexts_for(Words(), trajectories[::-1], skills, CONTEXTS[::-1], seed=3)
    assert again == texts
    assert contexts_for(Words(), trajectories, skills, ["shuffled"], seed=4) != {"shuffled": texts["shuffled"]}


@pytest.mark.parametrize(
    "tasks", [[0, 0, 1, 1], [0, 0, 0, 1, 1, 2], [0, 1, 2], list(range(8)) * 8, [0] * 5, [0, 0, 0, 1]]
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_other_skill_is_a_derangement_over_tasks(tasks: list[int], seed: int) -> None:
    trajectories = make_trajectories(tasks)
    skills = {t.id: f"skill {t.id}" for t in trajectories}
    other = contexts_for(Words(), trajectories, skills, ["other_skill"], seed)["other_skill"]
    assert sorted(other.values()) == sorted(skills.values())  # each once
    assert all(other[id] != skills[id] for id in skills)
    task = {skills[t.id]: t.task_id for t in trajectories}
    if 2 * max(Counter(tasks).values()) <= len(tasks):
        assert all(task[other[id]] != task[skills[id]] for id in skills)


def test_an_equal_text_of_another_trajectory_is_no_control() -> None:
    trajectories = make_trajectories([0, 1, 2])
    other = contexts_for(Words(), trajectories, {"t0": "same", "t1": "same", "t2": "else"}, ["other_skill"], 0)
    assert all(text != {"t0": "same", "t1": "same", "t2": "else"}[id] for id, text in other["other_skill"].items())


@pytest.mark.parametrize("name", ["own_skill", "other_skill", "unrelated", "shuffled"])
def test_a_context_without_any_skill_is_a_clear_error(name: str) -> None:
    """Case B34's kind: nothing to measure is said before any work."""
    with pytest.raises(ValueError, match=f"context '{name}' is made from skills, and 0 of 2 trajectories"):
        contexts_for(Words(), make_trajectories([0, 1]), {}, [name], 0)


def test_unknown_contexts_are_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="'own_skil'; did you mean 'own_skill'"):
        contexts_for(Words(), make_trajectories([0]), {}, ["own_skil"], 0)


@pytest.mark.parametrize("count", [1, 7, 60, 900])
def test_unrelated_text_matches_in_length(count: int) -> None:
    text = unrelated_text(Words(), "word " * count, np.random.default_rng(count))
    assert len(text.split()) == count and text == text.strip()


def test_shuffled_words_depend_on_the_generator_only() -> None:
    text = "first look then take\nthe mug and leave"
    assert shuffled_words(text, np.random.default_rng(0)) == shuffled_words(text, np.random.default_rng(0))
    assert sorted(shuffled_words(text, np.random.default_rng(1)).split()) == sorted(text.split())
