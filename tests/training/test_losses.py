from __future__ import annotations

import pytest
import torch
from torch import Tensor

from training.advantages import group_advantages
from training.losses import alignment, kl_k3, policy_loss

DOUBLE = torch.float64


def tensor(values: list) -> Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def leaf(values: Tensor) -> Tensor:
    return values.clone().requires_grad_()


def assert_close(ours: Tensor, golden: list | float) -> None:
    torch.testing.assert_close(ours.detach(), torch.tensor(golden, dtype=DOUBLE), rtol=1e-6, atol=1e-12)


@pytest.fixture
def inputs(golden: dict) -> dict[str, Tensor]:
    arrays = {name: tensor(golden["inputs"][name]) for name in ("student", "rollout", "reference")}
    return {**arrays, "mask": tensor(golden["inputs"]["mask"]).bool()}


def test_golden_grpo(golden: dict, inputs: dict[str, Tensor]) -> None:
    mask, student = inputs["mask"], leaf(inputs["student"])
    group = group_advantages(tensor(golden["inputs"]["rewards"]), torch.zeros(4, dtype=torch.long))
    rows = group[:, None].expand_as(mask)
    loss = policy_loss(student.flatten(), inputs["rollout"].flatten(), rows.flatten(), mask.flatten())
    mean = loss.value.sum() / mask.sum()
    mean.backward()
    assert_close(mean, golden["answers"]["grpo"]["loss_token_mean"])
    assert_close(student.grad, golden["answers"]["grpo"]["grad"])
    assert int(loss.dual_clipped.sum()) == golden["answers"]["grpo"]["dual_clipped_tokens"]
    assert int(loss.clipped.sum()) == golden["answers"]["grpo"]["clipped_tokens"]


def test_golden_kl_k3(golden: dict, inputs: dict[str, Tensor]) -> None:
    mask, student = inputs["mask"], leaf(inputs["student"])
    mean = kl_k3(student.flatten(), inputs["reference"].flatten(), mask.flatten()).sum() / mask.sum()
    mean.backward()
    assert_close(mean, golden["answers"]["kl_k3"]["loss_token_mean"])
    assert_close(student.grad, golden["answers"]["kl_k3"]["grad"])


def test_golden_alignment(golden: dict) -> None:
    projected = leaf(tensor(golden["inputs"]["projected_student_states"]))
    teacher = leaf(tensor(golden["inputs"]["teacher_states"]))
    values = alignment(projected, teacher, torch.ones(projected.shape[1], dtype=torch.bool))
    values.mean().backward()
    assert_close(values, golden["answers"]["pr_opd_alignment"]["per_layer_token"])
    assert_close(values.mean(), golden["answers"]["pr_opd_alignment"]["loss"])
    assert_close(projected.grad, golden["answers"]["pr_opd_alignment"]["grad_projected"])
    assert teacher.grad is None


@pytest.mark.parametrize(
    ("gap", "advantage", "value", "gradient"),
    [
        (0.0, 1.0, -1.0, -1.0),
        (0.5, 1.0, -1.2, 0.0),  # risen enough: clipped
        (-0.5, 1.0, -0.606531, -0.606531),
        (-0.5, -1.0, 0.8, 0.0),  # fallen enough: clipped
        (0.5, -1.0, 1.648721, 1.648721),
        (2.0, -1.0, 3.0, 0.0),  # dual clip
        (200.0, -1.0, 3.0, 0.0),  # exp overflows float32: the gradient stays 0, not nan
        (200.0, 1.0, -1.2, 0.0),
    ],
)
def test_surrogate_by_hand(gap: float, advantage: float, value: float, gradient: float) -> None:
    student = torch.tensor([gap - 1.0], requires_grad=True)
    loss = policy_loss(student, torch.tensor([-1.0]), torch.tensor([advantage]), torch.tensor([True])).value
    loss.sum().backward()
    assert loss.item() == pytest.approx(value, rel=1e-5)
    assert student.grad.item() == pytest.approx(gradient, rel=1e-5)


def test_b25_k3_as_a_loss_has_another_gradient_than_the_kl() -> None:
    logits, reference = tensor([0.4, 0.0]).requires_grad_(), tensor([0.9, 0.1]).log()
    mask = torch.tensor([True, True])
    student = logits.log_softmax(0)
    probability = student.exp().detach()

    def gradient(value: Tensor) -> list[float]:
        return torch.autograd.grad(value.sum(), logits, retain_graph=True)[0].tolist()

    assert (probability * kl_k3(student, reference, mask)).sum().item() == pytest.approx(0.31359, abs=5e-6)
    assert gradient(student.exp() * (student - reference)) == pytest.approx([-0.43180, 0.43180], abs=5e-6)
    assert gradient(probability * kl_k3(student, reference, mask)) == pytest.approx([-0.30131, 0.30131], abs=5e-6)


def test_k3_is_bounded_and_flat_at_the_bound() -> None:
    student = torch.tensor([-100.0, -1.0], requires_grad=True)
    value = kl_k3(student, torch.tensor([-0.5, -1.0]), torch.tensor([True, True]))
    value.sum().backward()
    assert value.tolist() == [10, 0] and student.grad.tolist() == [0, 0]


@pytest.mark.parametrize("hole", [float("nan"), float("-inf"), float("inf")])
def test_b21_b30_nothing_leaks_from_outside_the_mask(hole: float) -> None:
    mask = torch.tensor([True, True, True, False])
    student = torch.tensor([-1.0, -2.0, -0.5, hole], requires_grad=True)
    other = torch.tensor([-1.2, -1.0, -0.5, hole])
    for value in (policy_loss(student, other, torch.full((4,), hole).where(~mask, 1.0), mask).value,
                  kl_k3(student, other, mask)):  # fmt: skip
        assert value[3] == 0 and torch.isfinite(value).all()
        [gradient] = torch.autograd.grad(value.sum(), student)
        assert gradient[3] == 0 and torch.isfinite(gradient).all() and gradient[1] != 0
    states = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    states[:, 3] = hole
    states.requires_grad_()
    value = alignment(states, states.detach().flip(0), mask)
    [gradient] = torch.autograd.grad(value.sum(), states)
    assert torch.isfinite(value).all() and torch.isfinite(gradient).all() and (gradient[:, 3] == 0).all()


def test_r6_alignment_of_simple_directions() -> None:
    student = torch.tensor([[[3.0, 0, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]]], requires_grad=True)
    teacher = torch.tensor([[[0.1, 0, 0], [0, 5, 0], [-2, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]])
    value = alignment(student, teacher, torch.ones(6, dtype=torch.bool))
    assert value[0].tolist() == pytest.approx([0, 2, 4, 1, 1, 0])
    value.sum().backward()
    assert torch.isfinite(student.grad).all()
    assert alignment(student[:0], teacher[:0], torch.ones(6, dtype=torch.bool)).shape == (0, 6)


@pytest.mark.parametrize(("cosine", "published"), [(0.913, 0.174), (0.933, 0.134), (0.39, 1.22), (0.24, 1.52)])
def test_r6_published_cosines(cosine: float, published: float) -> None:
    student = tensor([[[cosine, (1 - cosine**2) ** 0.5]]])
    value = alignment(student, tensor([[[7.0, 0.0]]]), torch.tensor([True]))
    assert value.item() == pytest.approx(published, abs=5e-4)


def test_precision() -> None:
    mask = torch.tensor([True])
    for given, expected in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (DOUBLE, DOUBLE)):
        x = torch.tensor([-1.0], dtype=given)
        assert policy_loss(x, x, x, mask).value.dtype == expected
        assert kl_k3(x, x, mask).dtype == expected
        assert alignment(x[None, :, None], x[None, :, None], mask).dtype == expected
