"""The audit's gradients against automatic differentiation and enumeration, and channels whose answer is a theorem."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from diagnostics.audit import (
    ALIGNMENT,
    KNOWN,
    MEASURE,
    NODES,
    alignment_norms,
    alternative_weights,
    reads_other_tokens,
    reverse_kl_gradient,
    sampled_gradient,
)
from diagnostics.capture.hf import capture_states, decoder_blocks
from diagnostics.forward import divergence
from diagnostics.records import Provenance
from tests.diagnostics.test_patching import reply_pair, subject
from tests.diagnostics.tiny import tiny_model


def logits(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gate(gap: Tensor, turn: Tensor, row: Tensor) -> Tensor:
    return torch.sigmoid(5 * gap)


def window(gap: Tensor, turn: Tensor, row: Tensor) -> Tensor:
    """Half the own gap, half the next one's of the same row and turn."""
    same = (row[1:] == row[:-1]) & (turn[1:] == turn[:-1])
    after = torch.cat([torch.where(same, gap[1:], gap[:-1]), gap[-1:]])
    return torch.sigmoid(gap + after)


def relative(gap: Tensor, turn: Tensor, row: Tensor) -> Tensor:
    weights = torch.sigmoid(gap)
    means = torch.stack([weights[row == k].mean() for k in row.unique()])
    return weights / means[torch.searchsorted(row.unique(), row)]


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_gradients_equal_those_of_automatic_differentiation(temperature: float) -> None:
    raw, other = logits(3, 6, seed=0).requires_grad_(), logits(3, 6, seed=1)
    student, teacher = (raw / temperature).log_softmax(-1), other.log_softmax(-1)
    (true,) = torch.autograd.grad(divergence(student, teacher, "reverse_kl").sum(), raw, retain_graph=True)
    found = reverse_kl_gradient(student.detach(), teacher, temperature)
    assert_close(found.expected, true)
    assert_close(found.second_moment, true.square().sum(-1))

    weights = logits(3, 6, seed=2)
    samples = torch.stack(
        [
            torch.autograd.grad((weights[:, v] * (teacher[:, v] - student[:, v])).sum(), raw, retain_graph=True)[0]
            for v in range(6)
        ]
    )  # [drawn token, M, V]
    probability = student.detach().exp().T[..., None]
    found = sampled_gradient(student.detach(), weights, temperature)
    assert_close(found.expected, (probability * samples).sum(0))
    assert_close(found.second_moment, (probability * samples.square()).sum((0, 2)))


def test_a_constant_weight_expects_nothing_and_the_gap_the_reverse_kl() -> None:
    """Score-function identity and its converse, exactly; a gate lies between, its negative on the other side."""
    student, teacher = (logits(4, 50, seed=seed).mul(3).log_softmax(-1) for seed in (0, 1))
    reference = reverse_kl_gradient(student, teacher).expected
    constant = sampled_gradient(student, torch.full_like(student, 0.7))
    assert constant.expected.abs().max() < 1e-15 and constant.second_moment.min() > 1e-3
    assert_close(sampled_gradient(student, teacher - student).expected, reference)
    assert_close(sampled_gradient(student, student - teacher).expected, -reference)
    gated = sampled_gradient(student, torch.sigmoid(5 * (teacher - student))).expected
    cosine = torch.nn.functional.cosine_similarity(gated.flatten(), reference.flatten(), dim=0)
    assert 0.01 < cosine < 0.95


def test_case_b25() -> None:
    student = torch.tensor([[0.4, 0.0]], dtype=torch.float64).log_softmax(-1)
    teacher = torch.tensor([[0.9, 0.1]], dtype=torch.float64).log()
    assert reverse_kl_gradient(student, teacher).expected[0].tolist() == pytest.approx([-0.43180, 0.43180], abs=1e-5)
    assert sampled_gradient(student, torch.ones_like(student)).expected[0].tolist() == pytest.approx([0, 0], abs=1e-15)


def test_a_certain_token_has_no_gradient() -> None:
    student = torch.tensor([[0.0, -800.0, -800.0]], dtype=torch.float64).log_softmax(-1)
    certain = sampled_gradient(student, torch.full_like(student, 0.3))
    assert certain.second_moment.item() == 0 and not certain.expected.any()


# --- weights of tokens that were not drawn ---------------------------------------------------------------------------


def by_loop(weight: Callable[..., Tensor], student: Tensor, teacher: Tensor, drawn: Tensor, turn: Tensor) -> Tensor:
    gaps = teacher - student
    own, result = gaps.gather(-1, drawn[:, None])[:, 0], torch.empty_like(gaps)
    for t in range(len(gaps)):
        for v in range(gaps.shape[1]):
            other = own.clone()
            other[t] = gaps[t, v]
            result[t, v] = weight(other, turn, torch.zeros(len(gaps)).long())[t]
    return result


@pytest.mark.parametrize("weight", [gate, window, relative, *KNOWN.values()])
def test_weights_of_all_alternatives(weight: Callable[..., Tensor]) -> None:
    student, teacher = (logits(5, 12, seed=seed).mul(2).log_softmax(-1) for seed in (0, 1))
    drawn, turn = torch.tensor([3, 3, 0, 11, 5]), torch.tensor([0, 0, 0, 1, 1])
    found = alternative_weights(weight, student, teacher, drawn, turn)
    assert_close(found, by_loop(weight, student, teacher, drawn, turn))
    assert reads_other_tokens(weight) == (weight in (window, relative))
    if weight in (window, relative):  # two-sided: alone, each token would weigh something else
        alone = alternative_weights(lambda gap, turn, row: weight(gap, turn, torch.arange(len(gap))), student, teacher,
                                    drawn, turn)  # fmt: skip
        assert not torch.allclose(found, alone, rtol=1e-2)


def test_between_the_nodes_of_a_large_vocabulary_the_weight_is_nearly_exact() -> None:
    student, teacher = (logits(3, 20 * NODES, seed=seed).mul(3).log_softmax(-1) for seed in (0, 1))
    drawn, turn = student.argmax(-1), torch.zeros(3).long()
    found = alternative_weights(window, student, teacher, drawn, turn)
    gaps = teacher - student
    own = gaps.gather(-1, drawn[:, None])
    exact = torch.sigmoid(gaps + torch.cat([own[1:], own[-1:]]))
    exact[-1] = torch.sigmoid(2 * gaps[-1])  # nothing follows the last token: it counts twice
    assert (found - exact).abs().max() < 1e-3  # over gaps from -18 to 16 nats
    likely = student.topk(NODES).indices
    assert_close(found.gather(-1, likely), exact.gather(-1, likely))


def test_equal_branches_have_one_gap() -> None:
    student = logits(2, 600, seed=0).log_softmax(-1)
    found = alternative_weights(window, student, student, torch.tensor([1, 2]), torch.zeros(2).long())
    assert_close(found, torch.full_like(found, 0.5))


def test_alignment_norms_worked() -> None:
    """|d (2 - 2 cos) / dh| = 2 sin / |h|: a right angle at length 2, equal directions, and the mean over two blocks."""
    student = torch.tensor([[[2.0, 0.0], [3.0, 0.0]], [[0.0, 2.0], [0.0, 1.0]]])
    teacher = torch.tensor([[[0.0, 5.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 4.0]]])
    assert alignment_norms(student, teacher).tolist() == pytest.approx([math.hypot(0.5, 0.5), 0], abs=1e-12)


# --- the measure -----------------------------------------------------------------------------------------------------

WEIGHTS = {"sdar": gate, "windowed": window, "against": lambda gap, turn, row: -gap}


def rows_of(model: Any, pair: Any, temperature: float = 1.0, weights: Any = WEIGHTS) -> dict[tuple[str, str], Any]:
    tables = MEASURE.direct(subject(model, temperature, weights), {"own_skill": [pair]}, Provenance(run="r"))
    return {(row["channel"], row["token_class"]): row for row in tables["audit"].to_pylist()}


def cosine(row: dict[str, Any]) -> float:
    return row["dot"] / math.sqrt(row["expected_sq"] * row["reference_sq"])


def parameter_gradient(loss: Tensor, model: Any) -> Tensor:
    found = torch.autograd.grad(loss, list(decoder_blocks(model).parameters()), retain_graph=True)
    return torch.cat([gradient.flatten() for gradient in found]).double()


def full(model: Any, ids: Any, positions: Any, temperature: float = 1.0) -> Tensor:
    out = model(torch.tensor(ids)[None].long()).logits[0, torch.tensor(positions) - 1]
    return (out / temperature).log_softmax(-1)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_known_channels_in_both_spaces(kind: str) -> None:
    rows = rows_of(tiny_model(kind), reply_pair(0), 0.7)
    for channel in ("reverse_kl", "gap_weight"):
        row = rows[channel, "all"]
        assert cosine(row) == pytest.approx(1, abs=1e-6) and row["parameter_cosine"] == pytest.approx(1, abs=1e-5)
    assert cosine(rows["against", "all"]) == pytest.approx(-1, abs=1e-6)
    assert rows["against", "all"]["parameter_cosine"] == pytest.approx(-1, abs=1e-5)
    unit = rows["unit_weight", "all"]
    assert unit["undefined"] == "expected gradient is zero" and unit["parameter_cosine"] is None
    assert unit["norm_sq"] > 0.1 and unit["expected_sq"] < 1e-20
    assert -1 < cosine(rows["sdar", "all"]) < 1 and rows["sdar", "all"]["undefined"] == ""
    assert rows[ALIGNMENT, "all"]["dot"] is None and rows[ALIGNMENT, "all"]["space"] == "states"


def test_parameter_cosines_equal_those_of_the_losses_themselves() -> None:
    """Oracle: the expected loss enumerated over the vocabulary, the divergence, the alignment, each differentiated."""
    model, pair = tiny_model(), reply_pair(1)
    rows = rows_of(model, pair, weights={"sdar": gate})
    student = full(model, pair.student_ids, pair.student_positions)
    with torch.no_grad():
        teacher = full(model, pair.teacher_ids, pair.teacher_positions)
    gap = (teacher - student).detach()
    losses = {
        "reverse_kl": divergence(student, teacher, "reverse_kl").sum(),
        "sdar": (student.exp().detach() * torch.sigmoid(5 * gap) * (teacher - student)).sum(),
    }
    states = [
        torch.stack([capture_states(model, whole, torch.ones_like(whole)).states[str(k)][0, at - 1] for k in range(3)])
        for whole, at in (
            (torch.tensor(ids)[None].long(), torch.tensor(positions))
            for ids, positions in (
                (pair.student_ids, pair.student_positions),
                (pair.teacher_ids, pair.teacher_positions),
            )
        )
    ]
    apart = 2 - 2 * torch.nn.functional.cosine_similarity(states[0], states[1].detach(), dim=-1)
    losses[ALIGNMENT] = apart.mean(0).sum()
    gradients = {name: parameter_gradient(loss, model) for name, loss in losses.items()}
    for name in ("sdar", ALIGNMENT):
        expected = torch.nn.functional.cosine_similarity(gradients[name], gradients["reverse_kl"], dim=0).item()
        assert rows[name, "all"]["parameter_cosine"] == pytest.approx(expected, abs=1e-5)
        assert 1e-3 < abs(expected) < 0.99


def test_sums_over_tokens() -> None:
    model, pair = tiny_model(), reply_pair(2)
    rows = rows_of(model, pair)
    with torch.no_grad():
        student = full(model, pair.student_ids, pair.student_positions).double().log_softmax(-1)
        teacher = full(model, pair.teacher_ids, pair.teacher_positions).double().log_softmax(-1)
    gradient = sampled_gradient(student, torch.sigmoid(5 * (teacher - student)))
    reference = reverse_kl_gradient(student, teacher)
    for label, kinds in {"think": [1], "action": [2], "format": [3], "all": [1, 2, 3]}.items():
        row, mask = rows["sdar", label], torch.isin(torch.tensor(pair.token_class), torch.tensor(kinds))
        assert row["tokens"] == mask.sum()
        for name, values in {
            "expected_norm": gradient.expected.norm(dim=-1),
            "expected_sq": gradient.expected.square().sum(-1),
            "norm": gradient.second_moment.sqrt(),
            "norm_sq": gradient.second_moment,
            "reference_sq": reference.second_moment,
            "dot": (gradient.expected * reference.expected).sum(-1),
        }.items():
            assert row[name] == pytest.approx(values[mask].sum().item(), rel=1e-4)
        assert row["norm_sq"] >= row["expected_sq"] and row["norm"] >= row["expected_norm"]  # the rest is variance
        assert 1 <= row["norm"] ** 2 / row["norm_sq"] <= row["tokens"] + 1e-9
        assert rows["reverse_kl", label]["norm_sq"] == pytest.approx(rows["reverse_kl", label]["expected_sq"])
        assert row["parameter_cosine"] is None or label == "all"


def test_a_weight_that_sees_one_class_pushes_that_class_alone() -> None:
    pair = reply_pair(3)
    action = torch.tensor(pair.token_class == 2)

    def picky(gap: Tensor, turn: Tensor, row: Tensor) -> Tensor:
        return torch.where(turn == 1, gap, 0.0)  # turns stand for classes here

    rows = rows_of(tiny_model(), replace(pair, turn=action.numpy().astype("int16")), weights={"picky": picky})
    assert rows["picky", "action"]["norm"] == pytest.approx(rows["picky", "all"]["norm"])
    assert rows["picky", "think"]["norm"] == 0 and rows["picky", "think"]["undefined"] == "expected gradient is zero"
    assert rows["picky", "action"]["undefined"] == ""


def test_equal_branches_leave_every_cosine_undefined_by_name() -> None:
    """Negative control: nothing to teach; every reason is said, and nothing stored is NaN."""
    tables = MEASURE.direct(
        subject(tiny_model(), weights=WEIGHTS), {"own_skill": [reply_pair(4, skill=0)]}, Provenance()
    )
    for row in tables["audit"].to_pylist():
        zero = row["channel"] not in ("sdar", "windowed")
        assert row["undefined"] == "expected gradient is zero" or not zero
        assert row["undefined"] and row["parameter_cosine"] is None
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
    counts = {row["metric"]: row["value"] for row in tables["measurements"].to_pylist()}
    assert counts["audit/unit_weight/undefined/expected gradient is zero"] == 1 and len(counts) == 7


def test_what_is_written_and_what_is_left_alone() -> None:
    model = tiny_model().train()
    pairs = {"unrelated": [reply_pair(5)], "own_skill": [reply_pair(6), reply_pair(7, classes=(1, 3))]}
    tables = MEASURE.direct(subject(model), pairs, Provenance(run="r"))
    rows = tables["audit"].to_pylist()
    assert {row["context"] for row in rows} == {"own_skill"} and {row["segment"] for row in rows} == {0, 1}
    assert {row["channel"] for row in rows} == {"reverse_kl", "unit_weight", "gap_weight", ALIGNMENT}
    assert {row["token_class"] for row in rows if row["segment"] == 1} == {"think", "format", "all"}
    assert {row["run"] for row in tables["measurements"].to_pylist()} == {"r"}
    assert model.training and not any(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        again = MEASURE.direct(subject(model), pairs, Provenance(run="r"))
    assert again["audit"].equals(tables["audit"])
