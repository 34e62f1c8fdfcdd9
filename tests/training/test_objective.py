"""The scalar against hand calculation, and the identities that hold it together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from diagnostics.paired import PairedPass
from training.batch import Batch, Denominators
from training.config import ObjectiveConfig
from training.method import LossTerm, Needs
from training.methods import pr_opd
from training.objective import Objective, objective

PLAIN = ObjectiveConfig(kl_coefficient=0.0, entropy_coefficient=0.0)
ALIGNED = Needs("hindsight", teacher="current", states="before")


def batch(n: int, total: int | None = None, **given: Any) -> Batch:
    total = n if total is None else total
    fields: dict[str, Any] = {
        "row": torch.zeros(n, dtype=torch.long),
        "trajectory": torch.zeros(n, dtype=torch.long),
        "turn": torch.zeros(n, dtype=torch.long),
        "token_class": torch.ones(n, dtype=torch.long),
        "mask": torch.ones(n, dtype=torch.bool),
        "distilled": torch.ones(n, dtype=torch.bool),
        "advantages": torch.linspace(-1, 1, n),
        "rollout_logprobs": torch.full((n,), -1.1),
        "old_logprobs": torch.full((n,), -1.1),
        "reference_logprobs": torch.full((n,), -0.9),
        "scale": torch.full((n,), 1 / total),
        "distill_scale": torch.full((n,), 1 / total),
        "n_tokens": total,
        "n_distilled": total,
    }
    return Batch(**{**fields, **given})


def passed(student: Tensor, **given: Any) -> PairedPass:
    n = len(student)
    fields: dict[str, Any] = {
        "row": torch.zeros(n, dtype=torch.long),
        "has_teacher": torch.ones(n, dtype=torch.bool),
        "student_logprobs": student,
        "student_entropy": torch.linspace(0.5, 1.5, n),
        "teacher_logprobs": torch.full((n,), -0.7),
        "student_states": torch.randn(2, n, 4, generator=torch.Generator().manual_seed(0)),
        "teacher_states": torch.randn(2, n, 4, generator=torch.Generator().manual_seed(1)),
    }
    return PairedPass(**{**fields, **given})


def leaf(n: int) -> Tensor:
    return torch.linspace(-1.4, -0.8, n).requires_grad_()


def mean(result: Objective, name: str) -> float:
    total, weight = result.metrics[name]
    return float(total) / float(weight)


def test_terms_add_up_with_their_coefficients() -> None:
    student = leaf(6)
    config = ObjectiveConfig(kl_coefficient=0.3, entropy_coefficient=0.2)
    extra = LossTerm("extra", student * 2, torch.ones(6, dtype=torch.bool), 0.7, weight=torch.full((6,), 0.5))
    result = objective(batch(6), passed(student), config, ALIGNED, [extra])
    expected = mean(result, "loss/policy") + 0.3 * mean(result, "loss/kl") + 0.2 * mean(result, "loss/entropy")
    expected += 0.7 * mean(result, "loss/extra")
    assert result.loss.item() == pytest.approx(expected, rel=1e-6)
    assert mean(result, "loss/entropy") == pytest.approx(-1.0)  # a bonus: more entropy, less loss
    assert mean(result, "loss/extra") == pytest.approx(student.mean().item())
    assert mean(result, "weight/extra/mean") == 0.5


@pytest.mark.parametrize("coefficient", [0.0, 0.01])
def test_b34_a_term_with_coefficient_zero_changes_no_bit(coefficient: float) -> None:
    gradients = []
    for terms in ([], [coefficient]):
        student = leaf(9)
        extra = [LossTerm("extra", (student * 3).exp(), torch.ones(9, dtype=torch.bool), c) for c in terms]
        result = objective(batch(9), passed(student), ObjectiveConfig(), ALIGNED, extra)
        result.loss.backward()
        gradients.append((result.loss.detach(), student.grad))
    equal = all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert equal == (coefficient == 0)


@pytest.mark.parametrize("missing", ["student_states", "teacher_states", "teacher_logprobs"])
def test_b34_a_missing_field_is_an_error_and_not_a_no_op(missing: str) -> None:
    needs = replace(ALIGNED, teacher_logprobs=True)
    with pytest.raises(ValueError, match=missing):
        objective(batch(3), passed(leaf(3), **{missing: None}), PLAIN, needs)
    objective(batch(3), passed(leaf(3)), PLAIN, needs)
    with pytest.raises(ValueError, match="reference_logprobs"):
        objective(batch(3, reference_logprobs=None), passed(leaf(3)), ObjectiveConfig(), Needs())
    with pytest.raises(ValueError, match="student_entropy"):
        objective(batch(3), passed(leaf(3), student_entropy=None), ObjectiveConfig(), Needs())


def test_reward_coefficient_zero_leaves_the_method_alone() -> None:
    student = leaf(4)
    config = ObjectiveConfig(kl_coefficient=1.0, entropy_coefficient=1.0)
    needs = replace(ALIGNED, policy_coefficient=0.0, regularised=False)
    extra = LossTerm("extra", student * 0 + 2.0, torch.ones(4, dtype=torch.bool), 0.5)
    result = objective(batch(4, reference_logprobs=None), passed(student, student_entropy=None), config, needs, [extra])
    assert result.loss.item() == pytest.approx(1.0)
    assert [name for name in result.metrics if name.startswith("loss/")] == ["loss/extra"]
    [gradient] = torch.autograd.grad(result.loss, student)
    assert (gradient == 0).all()


def test_b26_kl_pulls_where_no_advantage_does() -> None:
    config = replace(PLAIN, kl_coefficient=1.0)
    for beta in (1.0, 0.0):
        student = leaf(5)
        zero = batch(5, advantages=torch.zeros(5), old_logprobs=student.detach())
        result = objective(zero, passed(student), replace(config, kl_coefficient=beta), Needs())
        [gradient] = torch.autograd.grad(result.loss, student)
        assert (gradient.abs().max() > 0) == (beta > 0)


def losses(groups: Sequence[Sequence[float]], reduction: str) -> float:
    """Micro-batches, one trajectory each, of given token losses: the sum of their objectives."""
    of = Denominators(Counter(), Counter({i: len(g) for i, g in enumerate(groups)}), reduction)
    total = 0.0
    for index, group in enumerate(groups):
        n = len(group)
        scale = torch.full((n,), of.scale(index, distilled=True))
        values = torch.tensor(group)
        terms = [LossTerm("x", values, torch.ones(n, dtype=torch.bool), 1.0)]
        needs = replace(ALIGNED, policy_coefficient=0.0, regularised=False)
        total += float(objective(batch(n, distill_scale=scale), passed(leaf(n)), PLAIN, needs, terms).loss)
    return total


def test_b27_a_token_weighs_the_same_in_every_micro_batch() -> None:
    assert losses([[1.0, 1.0], [0.5] * 8], "token_mean") == pytest.approx(0.6)
    assert losses([[1.0, 1.0, *[0.5] * 8]], "token_mean") == pytest.approx(0.6)
    assert losses([[1.0, 1.0], [0.5] * 8], "sequence_mean") == pytest.approx(0.75)


@pytest.mark.parametrize("hole", [float("nan"), float("-inf")])
def test_b21_b30_masked_tokens_are_nothing(hole: float) -> None:
    mask = torch.tensor([True, True, False])
    student = torch.tensor([-1.0, -2.0, hole], requires_grad=True)
    entropy = torch.tensor([1.0, 1.0, hole])
    given = batch(
        3, mask=mask, distilled=mask, reference_logprobs=student.detach() - 0.1, rollout_logprobs=student.detach()
    )
    extra = LossTerm("extra", torch.tensor([1.0, 1.0, hole]), mask, 1.0, weight=torch.tensor([1.0, 1.0, hole]))
    result = objective(given, passed(student, student_entropy=entropy), ObjectiveConfig(), ALIGNED, [extra])
    result.loss.backward()
    assert torch.isfinite(result.loss) and torch.isfinite(student.grad).all() and student.grad[2] == 0
    assert all(torch.isfinite(torch.as_tensor(total)) for total, _ in result.metrics.values())
    nothing = torch.zeros(3, dtype=torch.bool)
    result = objective(replace(given, mask=nothing, distilled=nothing), passed(student), ObjectiveConfig(), ALIGNED)
    assert result.loss == 0 and torch.autograd.grad(result.loss, student)[0].eq(0).all()


def test_advantages_of_a_method_replace_those_of_the_group() -> None:
    student, ours = leaf(4), torch.full((4,), 2.0)
    replaced = objective(batch(4), passed(student), PLAIN, Needs(), advantages=ours).loss
    direct = objective(batch(4, advantages=ours), passed(student), PLAIN, Needs()).loss
    assert replaced == direct != objective(batch(4), passed(student), PLAIN, Needs()).loss


def test_rollout_train_gap_is_logged_and_nothing_else() -> None:
    student = leaf(4)
    near, far = (
        objective(batch(4, rollout_logprobs=torch.full((4,), r)), passed(student), PLAIN, Needs()) for r in (-1.1, -1.6)
    )
    assert mean(near, "kl/rollout_train") == 0
    assert mean(far, "kl/rollout_train") == pytest.approx(0.5)
    assert mean(far, "kl/rollout_train_k3") == pytest.approx(torch.tensor(0.5).exp().item() - 1.5, rel=1e-5)
    assert near.loss == far.loss


# --- PR-OPD ----------------------------------------------------------------------------------------------------------


def test_pr_opd_without_projector_is_two_minus_two_cosine() -> None:
    config = pr_opd.PrOpdConfig(projector=False)
    pair = passed(leaf(5))
    term, *logged = pr_opd.loss(batch(5), pair, config, 0, None)
    cosine = torch.cosine_similarity(pair.student_states, pair.teacher_states, dim=-1)
    torch.testing.assert_close(term.value, (2 - 2 * cosine).mean(0))
    torch.testing.assert_close(torch.stack([entry.value for entry in logged]), cosine)
    assert term.coefficient == 0.01 and all(entry.coefficient == 0 for entry in logged)


def test_pr_opd_layers() -> None:
    pair = passed(leaf(5))
    every = pr_opd.loss(batch(5), pair, pr_opd.PrOpdConfig(projector=False), 0, None)[0].value
    single = [
        pr_opd.loss(batch(5), pair, pr_opd.PrOpdConfig(projector=False, layers=(layer,)), 0, None)[0].value
        for layer in (0, 1)
    ]
    torch.testing.assert_close(every, (single[0] + single[1]) / 2)
    none = pr_opd.loss(batch(5), pair, pr_opd.PrOpdConfig(layers=()), 0, None)
    assert len(none) == 1 and none[0].value.tolist() == [0] * 5


def test_pr_opd_gradient_reaches_student_and_projector_only() -> None:
    shape = type("Shape", (), {"num_hidden_layers": 2, "hidden_size": 4})
    torch.manual_seed(0)
    config = pr_opd.PrOpdConfig(hidden=8)
    projector = pr_opd.modules(shape, config)
    assert projector is not None and projector.lr == 1e-4
    assert sum(p.numel() for p in projector.parameters()) == 2 * (2 * 4 * 8 + 8 + 4)
    pair = passed(leaf(5))
    pair.student_states.requires_grad_()
    pair.teacher_states.requires_grad_()
    distilled = torch.tensor([True, True, True, True, False])
    term = pr_opd.loss(batch(5, distilled=distilled), pair, config, 0, projector)[0]
    term.value.sum().backward()
    assert pair.teacher_states.grad is None and pair.student_states.grad[:, :4].abs().min() > 0
    assert (pair.student_states.grad[:, 4] == 0).all()
    assert all(parameter.grad.abs().max() > 0 for parameter in projector.parameters())
    assert pr_opd.modules(shape, replace(config, projector=False)) is None


def test_pr_opd_stages() -> None:
    config = pr_opd.PrOpdConfig(start_step=3, reward_coefficient=0.0)
    assert pr_opd.needs(config, 2) == Needs()
    second = pr_opd.needs(config, 3)
    assert (second.skill, second.teacher, second.states) == ("hindsight", "current", "before")
    assert (second.policy_coefficient, second.regularised) == (0.0, False)
    assert pr_opd.needs(replace(config, coefficient=0.0), 3) == Needs(policy_coefficient=0.0, regularised=False)
