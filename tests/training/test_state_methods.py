"""Methods that move hidden states: numbers by hand, gradients, the cross-fade, and what they leave alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from diagnostics.paired import PairedPass
from training.batch import Batch
from training.config import ObjectiveConfig
from training.method import Method, Needs
from training.methods import grpo, last_opd, opd, oprd
from training.objective import objective

DOUBLE = torch.float64
PLAIN = ObjectiveConfig(kl_coefficient=0.0, entropy_coefficient=0.0)
RAW, UNIT = oprd.OprdConfig(), oprd.OprdConfig(normalise=True)
FADE = last_opd.LastOpdConfig()
L, M, D = 3, 12, 4
VARIANTS = {
    "oprd": (oprd, RAW, 0),
    "oprd-normalised": (oprd, UNIT, 0),
    "oprd-last": (oprd, oprd.OprdConfig(layers="last"), 0),
    "last_opd-states": (last_opd, FADE, 0),
    "last_opd-both": (last_opd, FADE, 4),
    "last_opd-tokens": (last_opd, FADE, 10),
}
every_variant = pytest.mark.parametrize(("module", "config", "step"), VARIANTS.values(), ids=VARIANTS)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def tokens(distilled: Tensor | None = None, m: int = M, **given: Any) -> tuple[Batch, PairedPass]:
    """M tokens, of which the distilled ones (None: all but every fourth) have a teacher; the rest read themselves."""
    distilled = torch.arange(m) % 4 != 3 if distilled is None else distilled
    scale = torch.full((m,), 1 / m, dtype=DOUBLE)
    batch = Batch(
        row=torch.zeros(m, dtype=torch.long),
        trajectory=torch.zeros(m, dtype=torch.long),
        turn=torch.zeros(m, dtype=torch.long),
        token_class=torch.ones(m, dtype=torch.long),
        mask=torch.ones(m, dtype=torch.bool),
        distilled=distilled,
        advantages=random(m, seed=5),
        centred=random(m, seed=5),
        rollout_logprobs=-random(m, seed=6).abs(),
        old_logprobs=-random(m, seed=6).abs(),
        reference_logprobs=None,
        step_teacher_logprobs=None,
        step_distilled=torch.zeros(m, dtype=torch.bool),
        scale=scale,
        distill_scale=distilled.double() / max(int(distilled.sum()), 1),
        n_tokens=m,
        n_distilled=int(distilled.sum()),
    )
    fields: dict[str, Any] = {
        "row": batch.row,
        "has_teacher": distilled,
        "student_logprobs": (-random(m, seed=6).abs() + 0.03 * random(m, seed=7)).requires_grad_(),
        "teacher_logprobs": -random(m, seed=8).abs(),
        "student_states": random(L, m, D, seed=9).requires_grad_(),
        "teacher_states": random(L, m, D, seed=10).requires_grad_(),
    }
    return batch, PairedPass(**{**fields, **given})


def loss(method: Method, config: Any, batch: Batch, pair: PairedPass, step: int = 0) -> Tensor:
    """The method's own terms as the objective adds them up, without any reward."""
    needs = replace(method.needs(config, step), policy_coefficient=0.0, regularised=False)
    terms = method.loss(batch, pair, config, step, None) if method.loss else []
    return objective(batch, pair, PLAIN, needs, terms).loss


def gradients(value: Tensor, *leaves: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]


# --- oprd


def test_distances_by_hand() -> None:
    student = torch.tensor([[[3.0, 4.0], [1.0, 0.0]], [[0.0, 2.0], [0.0, 0.0]]], dtype=DOUBLE)  # [L 2, M 2, D 2]
    teacher = torch.tensor([[[0.0, 0.0], [2.0, 0.0]], [[2.0, 0.0], [0.0, 3.0]]], dtype=DOUBLE)
    both = torch.ones(2, dtype=torch.bool)
    _, pair = tokens(m=2, student_states=student, teacher_states=teacher)

    def distance(layers: Any, normalise: bool) -> list[float]:
        return oprd.state_distance(pair, layers, normalise, both, "oprd").tolist()

    # squared distances 25 and 1 in the first layer, 8 and 9 in the second, over D = 2
    assert distance("all", False) == pytest.approx([(12.5 + 4) / 2, (0.5 + 4.5) / 2])
    assert distance("last", False) == distance((1,), False) == pytest.approx([4, 4.5])
    # directions: 1 against a zero vector, 0 when parallel, 2 when orthogonal
    assert distance("all", True) == pytest.approx([(0.5 + 1) / 2, (0 + 0.5) / 2])
    assert distance((), False) == distance((), True) == [0, 0]


def test_raw_gradient_is_the_difference_of_the_states() -> None:
    batch, pair = tokens()
    [student, teacher] = gradients(loss(oprd.METHOD, RAW, batch, pair), pair.student_states, pair.teacher_states)
    inside = batch.distilled[None, :, None]
    expected = 2 * (pair.student_states - pair.teacher_states).detach() / (L * D * 9)  # 9 of 12 tokens
    torch.testing.assert_close(student, torch.where(inside, expected, 0.0), rtol=1e-12, atol=1e-15)
    assert (teacher == 0).all()  # the teacher learns nothing


def test_normalised_distance_is_the_alignment_over_the_width() -> None:
    batch, pair = tokens()
    cosine = torch.cosine_similarity(pair.student_states, pair.teacher_states, dim=-1).mean(0)
    value = oprd.state_distance(pair, "all", True, batch.distilled, "oprd")
    torch.testing.assert_close(value[batch.distilled], ((2 - 2 * cosine) / D)[batch.distilled], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layers", [(3,), (-1,), (0, 7)])
def test_a_layer_that_is_not_there_is_named(layers: tuple[int, ...]) -> None:
    batch, pair = tokens()
    with pytest.raises(ValueError, match=f"oprd layer {layers[-1]} does not exist; the model has blocks 0 to 2"):
        oprd.METHOD.loss(batch, pair, oprd.OprdConfig(layers=layers), 0, None)


def test_what_is_asked_of_the_pair() -> None:
    assert oprd.METHOD.needs(RAW, 0) == Needs("hindsight", teacher="initial", states="at")
    assert oprd.METHOD.needs(oprd.OprdConfig(teacher="current", skill="retrieved"), 9) == Needs(
        "retrieved", teacher="current", states="at"
    )


# --- last_opd


def test_the_fade_goes_from_states_to_tokens_in_ten_steps() -> None:
    config = last_opd.LastOpdConfig(start_step=20)
    shares = [last_opd.state_share(config, step) for step in range(20, 32)]
    assert shares == pytest.approx([1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0, 0])
    asked = [last_opd.METHOD.needs(config, step) for step in (19, 20, 25, 30)]
    assert asked[0] == Needs()
    assert [(need.states, need.teacher_logprobs) for need in asked[1:]] == [("at", False), ("at", True), ("none", True)]
    for step in (20, 25, 30):
        terms = last_opd.METHOD.loss(*tokens(), config, step, None)
        assert sum(term.coefficient for term in terms) == pytest.approx(config.coefficient)
        assert len(terms) == (2 if step == 25 else 1)


def test_last_opd_begins_as_oprd_of_the_last_layer_and_ends_as_token_opd() -> None:
    batch, pair = tokens()
    leaves = pair.student_states, pair.student_logprobs

    def parts(method: Method, config: Any, step: int) -> list[Tensor]:
        value = loss(method, config, batch, pair, step)
        return [value.detach(), *gradients(value, *leaves)]

    states = parts(oprd.METHOD, oprd.OprdConfig(layers="last"), 0)
    sampled = parts(opd.METHOD, opd.OpdConfig(), 0)
    for step, share in ((0, 1.0), (4, 0.6), (10, 0.0), (50, 0.0)):
        for ours, one, other in zip(parts(last_opd.METHOD, FADE, step), states, sampled, strict=True):
            torch.testing.assert_close(ours, share * one + (1 - share) * other, rtol=1e-10, atol=1e-14)
    assert (states[1][:-1] == 0).all() and states[1][-1].abs().max() > 0 and (states[2] == 0).all()
    gap = (pair.teacher_logprobs - pair.student_logprobs).detach()
    torch.testing.assert_close(sampled[2], torch.where(batch.distilled, -gap / 9, 0.0), rtol=1e-10, atol=1e-14)


# --- both


@pytest.mark.parametrize(
    ("module", "config", "step", "same"),
    [
        (oprd, oprd.OprdConfig(coefficient=0.0), 0, True),
        (oprd, oprd.OprdConfig(layers=()), 0, True),
        (oprd, oprd.OprdConfig(layers=(1,), coefficient=1e-3), 0, False),
        (last_opd, last_opd.LastOpdConfig(coefficient=0.0), 4, True),
        (last_opd, last_opd.LastOpdConfig(start_step=5), 4, True),
        (last_opd, last_opd.LastOpdConfig(start_step=5), 5, False),
    ],
)
def test_b34_without_layers_or_coefficient_the_base_bit_for_bit(
    module: Any, config: Any, step: int, same: bool
) -> None:
    batch, pair = tokens()
    leaves, values = (pair.student_logprobs, pair.student_states), []
    for method, own in ((module.METHOD, config), (grpo.METHOD, None)):
        needs = method.needs(own, step)
        terms = method.loss(batch, pair, own, step, None) if needs.teacher != "none" else []
        value = objective(batch, pair, PLAIN, needs, terms).loss
        values.append([value.detach(), *gradients(value, *leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*values, strict=True)) == same


@every_variant
def test_gradient_by_finite_differences(module: Any, config: Any, step: int) -> None:
    batch, pair = tokens()
    leaves = {"student_states": pair.student_states, "student_logprobs": pair.student_logprobs}
    found = gradients(loss(module.METHOD, config, batch, pair, step), *leaves.values())
    if step == 0:  # states alone have a value that can be differentiated; the token term's weight is detached
        for index in ((2, 0, 1), (2, 5, 3), (0, 2, 2), (2, 3, 0)):
            values = []
            for shift in (1e-6, -1e-6):
                moved = pair.student_states.detach().clone()
                moved[index] += shift
                values.append(loss(module.METHOD, config, batch, replace(pair, student_states=moved), step).item())
            assert found[0][index].item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6, abs=1e-9)
        assert (found[0][2, 3] == 0).all() and found[0][2, 0].abs().max() > 0  # token 3 has no teacher
    assert (found[1].abs().max() > 0) == (step > 0)


@every_variant
@pytest.mark.parametrize("hole", [float("nan"), float("-inf"), float("inf")])
def test_b30_nothing_leaks_from_where_there_is_no_teacher(module: Any, config: Any, step: int, hole: float) -> None:
    batch, pair = tokens()
    inside = batch.distilled[None, :, None]
    student = torch.where(inside, pair.student_states.detach(), hole).requires_grad_()
    logprobs = torch.where(batch.distilled, pair.student_logprobs.detach(), hole).requires_grad_()
    filled = replace(
        pair,
        student_states=student,
        teacher_states=torch.where(inside, pair.teacher_states.detach(), hole),
        student_logprobs=logprobs,
        teacher_logprobs=torch.where(batch.distilled, pair.teacher_logprobs, hole),
    )
    batch = replace(batch, mask=batch.distilled)
    ours, clean = (loss(module.METHOD, config, batch, p, step) for p in (filled, pair))
    assert torch.equal(ours, clean)
    cleans = gradients(clean, pair.student_states, pair.student_logprobs)
    for own, expected in zip(gradients(ours, student, logprobs), cleans, strict=True):
        assert torch.equal(own, expected)


@every_variant
def test_b21_an_empty_mask_gives_zero(module: Any, config: Any, step: int) -> None:
    batch, pair = tokens(torch.zeros(M, dtype=torch.bool))
    for term in module.METHOD.loss(batch, pair, config, step, None):
        assert not term.mask.any() and torch.isfinite(term.value).all()
    value = loss(module.METHOD, config, batch, pair, step)
    assert value == 0 and not value.requires_grad


@every_variant
def test_one_token(module: Any, config: Any, step: int) -> None:
    batch, pair = tokens(torch.ones(1, dtype=torch.bool), m=1)
    value = loss(module.METHOD, config, batch, pair, step)
    leaf = pair.student_logprobs if step == 10 else pair.student_states
    [gradient] = gradients(value, leaf)
    assert torch.isfinite(value) and torch.isfinite(gradient).all() and gradient.abs().max() > 0


@every_variant
def test_b27_order_and_micro_batches_change_nothing(module: Any, config: Any, step: int) -> None:
    batch, pair = tokens()
    whole = loss(module.METHOD, config, batch, pair, step)

    def part(index: Tensor) -> Tensor:
        def taken(source: Any) -> dict[str, Tensor]:
            tensors = {name: value for name, value in vars(source).items() if isinstance(value, Tensor)}
            return {name: value[:, index] if value.dim() == 3 else value[index] for name, value in tensors.items()}

        own = replace(batch, **taken(batch)), replace(pair, **taken(pair))
        return loss(module.METHOD, config, *own, step)

    order = torch.randperm(M, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(part(order), whole, rtol=1e-12, atol=0)
    split = part(order[:1]) + part(order[1:5]) + part(order[5:])
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=0)


@every_variant
def test_a_missing_reading_is_an_error_that_names_it(module: Any, config: Any, step: int) -> None:
    batch, pair = tokens()
    missing = {"teacher_logprobs": None} if step == 10 else {"student_states": None}
    with pytest.raises(ValueError, match=f"{'teacher_logprobs' if step == 10 else 'hidden states'}"):
        module.METHOD.loss(batch, replace(pair, **missing), config, step, None)


@pytest.mark.parametrize(("given", "expected"), [(torch.bfloat16, torch.float32), (DOUBLE, DOUBLE)])
@pytest.mark.parametrize("normalise", [False, True])
def test_precision(given: torch.dtype, expected: torch.dtype, normalise: bool) -> None:
    batch, pair = tokens()
    pair = replace(pair, student_states=pair.student_states.to(given), teacher_states=pair.teacher_states.to(given))
    assert oprd.state_distance(pair, "all", normalise, batch.distilled, "oprd").dtype == expected


@pytest.mark.parametrize(("lr", "learns"), [(5.0, True), (0.0, False)])
def test_the_states_come_to_meet_the_teacher(lr: float, learns: bool) -> None:
    for config in (RAW, UNIT):
        batch, pair = tokens()
        first = loss(oprd.METHOD, config, batch, pair).item()
        for _ in range(60):
            [gradient] = gradients(loss(oprd.METHOD, config, batch, pair), pair.student_states)
            moved = (pair.student_states - lr * gradient).detach().requires_grad_()
            pair = replace(pair, student_states=moved)
        last = loss(oprd.METHOD, config, batch, pair).item()
        assert (last < 0.2 * first) == learns and last <= first
