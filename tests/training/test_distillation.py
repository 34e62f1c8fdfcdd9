"""Methods of the output space: worked numbers, the lattice that connects them, and what their gradients expect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diagnostics.forward import divergence
from diagnostics.paired import PairedPass
from training.advantages import group_advantages
from training.batch import Batch, Denominators
from training.config import ObjectiveConfig
from training.distillation import gate, response_normalised
from training.dynamics import gap_metrics
from training.losses import kl_k3
from training.method import Needs
from training.methods import grpo_opsd, opd, opsd, pcsd, sdar, seed, skill_sd
from training.objective import Objective, objective

DOUBLE = torch.float64
PLAIN = ObjectiveConfig(kl_coefficient=0.0, entropy_coefficient=0.0)
NAN, INF = float("nan"), float("inf")

DEFAULTS = {
    "opsd": (opsd, opsd.OpsdConfig()),
    "grpo_opsd": (grpo_opsd, grpo_opsd.GrpoOpsdConfig()),
    "opd": (opd, opd.OpdConfig()),
    "sdar": (sdar, sdar.SdarConfig()),
    "pcsd": (pcsd, pcsd.PcsdConfig()),
    "skill_sd": (skill_sd, skill_sd.SkillSdConfig()),
    "seed": (seed, seed.SeedConfig()),
}
VARIANTS = {
    **DEFAULTS,
    "opsd-jsd": (opsd, opsd.OpsdConfig(objective="jsd")),
    "grpo_opsd-code": (grpo_opsd, grpo_opsd.GrpoOpsdConfig(form="code")),
    "opd-reverse_kl": (opd, opd.OpdConfig(objective="reverse_kl")),
    "sdar-entropy": (sdar, sdar.SdarConfig(gate="entropy")),
    "sdar-soft_or": (sdar, sdar.SdarConfig(gate="soft_or")),
    "sdar-hard": (sdar, sdar.SdarConfig(gate="hard")),
    "sdar-response": (sdar, sdar.SdarConfig(normalise="response")),
    "sdar-forward_kl": (sdar, sdar.SdarConfig(objective="forward_kl")),
    "pcsd-short": (pcsd, pcsd.PcsdConfig(adaptive=False, n_min=2)),
}
every_method = pytest.mark.parametrize(("method", "config"), DEFAULTS.values(), ids=DEFAULTS)
every_variant = pytest.mark.parametrize(("method", "config"), VARIANTS.values(), ids=VARIANTS)


@dataclass(frozen=True, eq=False)
class Case:
    """Rows of tokens as the trainer hands them over; `student` and `apart` (a full divergence) are leaves [rows, T]."""

    batch: Batch
    pair: PairedPass
    student: Tensor
    apart: Tensor


def case(
    inputs: dict[str, Any],
    rows: Sequence[int] | None = None,
    reduction: str = "token_mean",
    pad: int = 0,
    hole: float | None = None,
) -> Case:
    """Args: inputs, arrays [trajectory, token] as in the golden file; rows, of this micro-batch (None: all), with the
    denominators of all; pad, tokens outside the mask appended to each row; hole, what stands outside the mask."""
    masks = torch.tensor(inputs["mask"]).bool()
    rows = range(len(masks)) if rows is None else rows
    picked = torch.tensor(list(rows), dtype=torch.long)
    mask = torch.nn.functional.pad(masks[picked], (0, pad))

    def filled(name: str, default: float = 0.0) -> Tensor:
        values = torch.tensor(inputs.get(name, torch.full(masks.shape, default).tolist()), dtype=DOUBLE)[picked]
        values = torch.nn.functional.pad(values, (0, pad))
        return values if hole is None else torch.where(mask, values, hole)

    counts = Counter({index: int(n) for index, n in enumerate(masks.sum(1)) if n})
    of = Denominators(counts, counts, reduction)
    turn = torch.nn.functional.pad(torch.tensor(inputs["turn"])[picked], (0, pad), value=-1)
    row = torch.arange(len(picked))[:, None].expand_as(mask)
    scale = torch.tensor([of.scale(int(index)) if counts[int(index)] else 0.0 for index in picked], dtype=DOUBLE)
    scale = scale[:, None].expand_as(mask).flatten()
    rewards = torch.tensor(inputs.get("rewards", [0.0] * len(masks)), dtype=DOUBLE)
    advantages = group_advantages(rewards, torch.zeros(len(masks), dtype=torch.long))[picked][:, None].expand_as(mask)
    batch = Batch(
        row=row.flatten(),
        trajectory=picked[:, None].expand_as(mask).flatten(),
        turn=turn.flatten(),
        token_class=torch.zeros(mask.numel(), dtype=torch.long),
        mask=mask.flatten(),
        distilled=mask.flatten(),
        advantages=advantages.flatten(),
        rollout_logprobs=filled("rollout", -1.0).flatten(),
        old_logprobs=filled("rollout", -1.0).flatten(),
        reference_logprobs=filled("reference", -1.0).flatten(),
        scale=scale,
        distill_scale=scale,
        n_tokens=counts.total(),
        n_distilled=counts.total(),
    )
    student, apart = filled("student").requires_grad_(), filled("reference", 0.3).abs().requires_grad_()
    pair = PairedPass(
        row=batch.row,
        has_teacher=torch.ones_like(batch.mask),
        student_logprobs=student.flatten(),
        student_entropy=filled("student_entropy", 0.7).flatten(),
        teacher_logprobs=filled("teacher").flatten(),
        divergence=apart.flatten(),
    )
    return Case(batch, pair, student, apart)


def alone(method: Any, config: Any, given: Case) -> Objective:
    """The method's terms through the objective, with coefficient 1 and without the reward objective."""
    config = replace(config, coefficient=1.0)
    needs = replace(method.needs(config, 0), policy_coefficient=0.0, regularised=False)
    return objective(given.batch, given.pair, PLAIN, needs, method.loss(given.batch, given.pair, config, 0, None))


def gradients(result: Objective, given: Case) -> Tensor:
    """Of both leaves, side by side: [rows, T, 2]."""
    pair = torch.autograd.grad(result.loss, [given.student, given.apart], allow_unused=True, materialize_grads=True)
    return torch.stack(pair, -1)


def assert_close(ours: Tensor, expected: Any) -> None:
    torch.testing.assert_close(ours.detach(), torch.as_tensor(expected, dtype=DOUBLE), rtol=1e-6, atol=1e-12)


def check(result: Objective, given: Case, loss: float | None, grad: Any) -> None:
    if loss is not None:
        assert_close(result.loss, loss)
    assert_close(gradients(result, given)[..., 0], grad)


# --- worked numbers --------------------------------------------------------------------------------------------------


def test_golden_grpo_and_kl(golden: dict) -> None:
    given, answers = case(golden["inputs"]), golden["answers"]
    result = objective(given.batch, given.pair, PLAIN, Needs())
    check(result, given, answers["grpo"]["loss_token_mean"], answers["grpo"]["grad"])
    assert int(result.metrics["policy/clip_share"][0]) == answers["grpo"]["clipped_tokens"]
    assert int(result.metrics["policy/dual_clip_share"][0]) == answers["grpo"]["dual_clipped_tokens"]
    flat = torch.zeros_like(given.batch.advantages)
    result = objective(given.batch, given.pair, replace(PLAIN, kl_coefficient=1.0), Needs(), advantages=flat)
    check(result, given, answers["kl_k3"]["loss_token_mean"], answers["kl_k3"]["grad"])


def test_golden_sdar(golden: dict) -> None:
    given, answers, config = case(golden["inputs"]), golden["answers"]["sdar"], sdar.SdarConfig()
    mask = given.batch.mask
    check(alone(sdar, config, given), given, answers["loss_token_mean"], answers["grad"])
    weight = sdar.weights(given.batch, given.pair, config)
    assert_close(torch.where(mask, weight, 0.0).view_as(given.student), answers["gate"])
    by_trajectory = case(golden["inputs"], reduction="sequence_mean")
    assert_close(alone(sdar, config, by_trajectory).loss, answers["loss_sequence_mean"])
    metrics = {**gap_metrics(given.batch, given.pair), **alone(sdar, config, given).metrics}
    shares = {name: float(total) / float(count) for name, (total, count) in metrics.items()}
    assert shares["gap/negative_share"] == pytest.approx(answers["negative_gap_share"], rel=1e-12)
    assert shares["weight/sdar/over_half"] == pytest.approx(answers["gate_active_share"], rel=1e-12)


@pytest.mark.parametrize("kind", ["entropy", "soft_or", "hard"])
def test_golden_sdar_gates(golden: dict, kind: Any) -> None:
    given, config = case(golden["inputs"]), sdar.SdarConfig(gate=kind)
    expected = torch.tensor(golden["answers"]["sdar"]["other_gates"][kind], dtype=DOUBLE).flatten()
    mask = given.batch.mask
    assert_close(torch.where(mask, sdar.weights(given.batch, given.pair, config), 0.0), expected)
    gap = torch.where(mask, given.pair.teacher_logprobs - given.pair.student_logprobs, 0.0).detach()
    grad = (-expected / mask.sum()).view_as(given.student)
    check(alone(sdar, config, given), given, float((expected * gap).sum() / mask.sum()), grad)


@pytest.mark.parametrize("form", ["paper", "code"])
def test_golden_grpo_opsd(golden: dict, form: Any) -> None:
    given, answers = case(golden["inputs"]), golden["answers"]["grpo_opsd"]
    result = alone(grpo_opsd, grpo_opsd.GrpoOpsdConfig(form=form), given)
    check(result, given, answers[f"{form}_loss_token_mean"], answers[f"{form}_grad"])


def test_golden_pcsd(golden: dict) -> None:
    given, answers = case(golden["inputs"]), golden["answers"]["pcsd"]
    config = pcsd.PcsdConfig(**answers["config"])
    gap = given.pair.teacher_logprobs - given.pair.student_logprobs
    parts = pcsd.token_weights(gap, given.batch.mask, given.batch.row, given.batch.turn, config)
    for name, value in parts._asdict().items():
        assert_close(value.view_as(given.student), answers[name])
    check(alone(pcsd, config, given), given, answers["loss_token_mean"], answers["grad"])
    assert config == pcsd.PcsdConfig()  # the published and our own constants are the defaults


def test_golden_skill_sd(golden: dict) -> None:
    given, answers, config = case(golden["inputs"]), golden["answers"]["skill_sd"], skill_sd.SkillSdConfig()
    check(alone(skill_sd, config, given), given, answers["loss_token_mean"], answers["grad"])
    token = answers["clamped_token"]
    inputs = {name: [[token[name]]] for name in ("student", "teacher", "rollout")}
    clamped = case({**inputs, "mask": [[1.0]], "turn": [[0]]})
    check(alone(skill_sd, config, clamped), clamped, token["value"], [[token["grad"]]])


@pytest.mark.parametrize("name", ["opd", "seed"])
def test_golden_policy_gradient(golden: dict, name: str) -> None:
    given, answers = case(golden["inputs"]), golden["answers"]["opd_policy_gradient"]
    advantage = torch.tensor(answers["advantage"], dtype=DOUBLE)
    expected = float(-(advantage * given.student.detach()).sum() / given.batch.mask.sum())
    check(alone(*DEFAULTS[name], given), given, expected, answers["grad"])


def test_r4_the_gap_sets_the_weight_and_never_the_sign() -> None:
    inputs = {"student": [[-2.0, -2.0, -2.0]], "teacher": [[-1.0, -3.0, -2.0]], "mask": [[1.0] * 3], "turn": [[0] * 3]}
    given = case(inputs)
    result = alone(*DEFAULTS["sdar"], given)
    assert sdar.weights(given.batch, given.pair, sdar.SdarConfig()).tolist() == pytest.approx(
        [0.99331, 0.00669, 0.5], abs=5e-6
    )
    assert result.loss.item() == pytest.approx(0.32887, abs=5e-6)
    raised = gradients(result, given)[0, :, 0].tolist()
    assert raised == pytest.approx([-0.33110, -0.00223, -0.16667], abs=5e-6)
    pushed = gradients(alone(*DEFAULTS["opd"], given), given)[0, :, 0].tolist()
    assert pushed == pytest.approx([-1 / 3, 1 / 3, 0])  # the policy gradient pushes down what the teacher rejects


# --- PCSD ------------------------------------------------------------------------------------------------------------


def weights_of(gaps: Sequence[float], mask: Sequence[bool] | None = None, **settings: Any) -> pcsd.TokenWeights:
    gap, zeros = torch.tensor(gaps, dtype=DOUBLE), torch.zeros(len(gaps), dtype=torch.long)
    kept = torch.ones(len(gaps), dtype=torch.bool) if mask is None else torch.tensor(mask)
    return pcsd.token_weights(gap, kept, zeros, zeros, pcsd.PcsdConfig(**settings))


def test_pcsd_window_looks_forward_with_the_published_length_and_decay() -> None:
    impulses = [weights_of([0.0] * j + [1.0] + [0.0] * (11 - j)).long[0].item() for j in range(12)]
    share = np.array(impulses)
    assert share.sum() == pytest.approx(1) and (share[8:] == 0).all()
    assert 1 / (share**2).sum() == pytest.approx(6.41397, abs=5e-6)  # effective sample size
    assert share @ np.arange(12) == pytest.approx(2.38725, abs=5e-6)  # mean shift, tokens
    assert (weights_of([1.0] + [0.0] * 9).long[1:] == 0).all()  # nothing looks back


def test_pcsd_by_hand() -> None:
    parts = weights_of([0.5, -0.2, 0.1, 0.4, 0.3, -0.6, 0.0, 0.2, 0.1, 0.05])
    expected = [0.138668, 0.028175, 0.097818, 0.097128, -0.005491, -0.119086, 0.084553, 0.127869, 0.077778, 0.05]
    assert parts.long.tolist() == pytest.approx(expected, abs=1e-6)
    assert parts.variance[0].item() == pytest.approx(0.111094, abs=1e-6)
    assert parts.slope[0].item() == pytest.approx(-0.0392857, abs=1e-7)
    assert parts.eta[0].item() == pytest.approx(1 - 0.392857, abs=1e-6)


def test_pcsd_against_explicit_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    n, config = 120, pcsd.PcsdConfig(n_min=2, n_max=5, alpha=0.7, gamma=0.6, tau_low=0.05, tau_high=0.4)
    gap = torch.randn(n, generator=generator, dtype=DOUBLE) * 0.5
    mask = torch.rand(n, generator=generator) > 0.2
    row = torch.arange(n) // 40
    turn = torch.arange(n) % 40 // 11
    parts = pcsd.token_weights(gap, mask, row, turn, config)
    for i in range(n):
        if not mask[i]:
            assert all(part[i] == 0 for part in parts)
            continue
        offsets = [
            j
            for j in range(config.n_max)
            if i + j < n and mask[i + j] and row[i + j] == row[i] and turn[i + j] == turn[i]
        ]
        values = np.array([gap[i + j].item() for j in offsets])
        near = [k for k, j in enumerate(offsets) if j < config.n_min]
        decay = np.array([config.alpha**j for j in offsets])
        short, long = np.average(values[near], weights=decay[near]), np.average(values, weights=decay)
        slope = np.polyfit(offsets, values, 1)[0] if len(offsets) > 1 else 0.0
        r = np.clip((values.var() - config.tau_low) / (config.tau_high - config.tau_low), 0, 1)
        eta = np.clip(1 - config.gamma * max(-slope, 0) / config.delta_scale, 0, 1)
        weight = eta / (1 + np.exp(-config.beta_gate * ((1 - r) * short + r * long)))
        expected = (short, long, values.var(), r, slope, eta, weight)
        assert [part[i].item() for part in parts] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_pcsd_trend_is_one_sided_and_a_gap_in_the_mask_keeps_its_place() -> None:
    rising, falling = weights_of([0.0, 0.2, 0.4]), weights_of([0.4, 0.2, 0.0])
    assert rising.slope[0].item() == pytest.approx(0.2) and rising.eta[0] == 1
    assert falling.slope[0].item() == pytest.approx(-0.2) and falling.eta[0] == 0
    assert weights_of([0.4, 0.2, 0.0], gamma=0.0).eta.tolist() == [1, 1, 1]
    holed = weights_of([0.4, NAN, 0.0], mask=[True, False, True])
    assert holed.slope[0].item() == pytest.approx(-0.2)  # over two offsets, not one
    assert holed.long[0].item() == pytest.approx(0.4 / (1 + 0.64))


def test_pcsd_component_switches_and_bounds() -> None:
    gaps = [0.5, -0.2, 0.1, 0.4, 0.3, -0.6]
    full, short = weights_of(gaps), weights_of(gaps, adaptive=False)
    assert (full.r > 0).any() and (short.r == 0).all() and torch.equal(full.eta, short.eta)
    assert weights_of(gaps, alpha=1.0).long[0].item() == pytest.approx(np.mean(gaps))
    for wrong in ({"n_min": 9}, {"n_min": 0}, {"tau_low": 0.1}, {"delta_scale": 0.0}, {"alpha": 0.0}):
        with pytest.raises(ValueError, match="pcsd"):
            pcsd.PcsdConfig(**wrong)


def test_pcsd_logs_what_its_weight_is_made_of(golden: dict) -> None:
    given, config = case(golden["inputs"]), pcsd.PcsdConfig()
    metrics = alone(pcsd, config, given).metrics
    mask, answers = given.batch.mask, golden["answers"]["pcsd"]
    means = {name: float(total) / float(weight) for name, (total, weight) in metrics.items()}
    for logged, name in (("loss/pcsd/eta", "eta"), ("loss/pcsd/long_share", "r"), ("weight/pcsd/mean", "weight")):
        assert means[logged] == pytest.approx(torch.tensor(answers[name]).flatten()[mask].mean().item(), rel=1e-6)
    variance = np.array(answers["variance"]).flatten()[mask.numpy()]
    assert means["loss/pcsd/variance_q25"] == pytest.approx(np.quantile(variance, 0.25), rel=1e-6)
    assert means["loss/pcsd/variance_q75"] == pytest.approx(np.quantile(variance, 0.75), rel=1e-6)


# --- the lattice: value and gradient, bit for bit --------------------------------------------------------------------


def same(first: Case, one: Objective, second: Case, other: Objective) -> bool:
    return torch.equal(one.loss, other.loss) and torch.equal(gradients(one, first), gradients(other, second))


@every_variant
def test_coefficient_zero_is_grpo(golden: dict, method: Any, config: Any) -> None:
    off = replace(config, coefficient=0.0)
    base = Needs(policy_coefficient=0.0) if method is opsd else Needs()
    assert method.needs(off, 0) == base != method.needs(config, 0)
    equal = []
    for used in (off, config):
        grpo, given = case(golden["inputs"]), case(golden["inputs"])
        terms = method.loss(given.batch, given.pair, used, 0, None)
        result = objective(given.batch, given.pair, ObjectiveConfig(), base, terms)
        equal.append(same(grpo, objective(grpo.batch, grpo.pair, ObjectiveConfig(), base), given, result))
    assert equal == [True, False]


LATTICE = {
    "sdar beta 0 is grpo_opsd as released": (
        (sdar, sdar.SdarConfig(beta=0.0)),
        (grpo_opsd, grpo_opsd.GrpoOpsdConfig(form="code")),
    ),
    "pcsd of single tokens without trend is sdar": (
        (pcsd, pcsd.PcsdConfig(n_max=1, gamma=0.0, beta_gate=3.0)),
        (sdar, sdar.SdarConfig(beta=3.0)),
    ),
    "pcsd of the short window without trend is sdar": (
        (pcsd, pcsd.PcsdConfig(adaptive=False, gamma=0.0)),
        (sdar, sdar.SdarConfig()),
    ),
    "opsd's distillation term is sdar's": ((opsd, opsd.OpsdConfig()), (sdar, sdar.SdarConfig())),
    "seed's distillation term is opd's": ((seed, seed.SeedConfig()), (opd, opd.OpdConfig())),
    "a steep gate is the hard one": (
        (sdar, sdar.SdarConfig(beta=1e9)),
        (sdar, sdar.SdarConfig(gate="hard")),
    ),
    "opsd and opd share the full reverse KL": (
        (opsd, opsd.OpsdConfig(objective="reverse_kl")),
        (opd, opd.OpdConfig(objective="reverse_kl")),
    ),
}
APART = {
    "beta": ((sdar, sdar.SdarConfig(beta=1e-3)), (grpo_opsd, grpo_opsd.GrpoOpsdConfig(form="code"))),
    "trend": ((pcsd, pcsd.PcsdConfig(n_max=2)), (sdar, sdar.SdarConfig())),
    "window": ((pcsd, pcsd.PcsdConfig(gamma=0.0)), (sdar, sdar.SdarConfig())),
    "normalisation": ((sdar, sdar.SdarConfig(normalise="response")), (sdar, sdar.SdarConfig())),
}


@pytest.mark.parametrize("name", [*LATTICE, *APART])
def test_lattice(golden: dict, name: str) -> None:
    (one, a), (other, b) = {**LATTICE, **APART}[name]
    first, second = case(golden["inputs"]), case(golden["inputs"])
    assert same(first, alone(one, a, first), second, alone(other, b, second)) == (name in LATTICE)


def test_the_two_forms_of_grpo_opsd_pull_apart(golden: dict) -> None:
    given = case(golden["inputs"])
    paper, code = (alone(grpo_opsd, grpo_opsd.GrpoOpsdConfig(form=form), given) for form in ("paper", "code"))
    assert_close(gradients(paper, given), -2 * gradients(code, given))
    assert_close(paper.loss, -2 * code.loss.detach())


# --- invariances -----------------------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_order_and_micro_batches_change_nothing(golden: dict, method: Any, config: Any, reduction: str) -> None:
    whole = case(golden["inputs"], reduction=reduction)
    result = alone(method, config, whole)
    expected = gradients(result, whole)
    for split in ([[2, 0, 3, 1]], [[0, 1], [2, 3]], [[3], [1, 0], [2]]):
        parts = [case(golden["inputs"], rows, reduction) for rows in split]
        results = [alone(method, config, part) for part in parts]
        assert_close(torch.stack([part.loss for part in results]).sum(), result.loss.detach())
        for rows, part, one in zip(split, parts, results, strict=True):
            assert_close(gradients(one, part), expected[rows])


@every_variant
@pytest.mark.parametrize("hole", [NAN, INF, -INF])
def test_b21_b30_what_stands_outside_the_mask_is_nothing(golden: dict, method: Any, config: Any, hole: float) -> None:
    plain, padded = case(golden["inputs"]), case(golden["inputs"], pad=3, hole=hole)
    expected, result = alone(method, config, plain), alone(method, config, padded)
    assert_close(result.loss, expected.loss.detach())
    gradient = gradients(result, padded)
    assert_close(gradient[:, :-3], gradients(expected, plain))
    assert (gradient[:, -3:] == 0).all()
    assert all(torch.isfinite(torch.as_tensor(total)) for total, _ in result.metrics.values())


@every_variant
def test_b30_rows_of_three_and_one_tokens(method: Any, config: Any) -> None:
    inputs = {
        "student": [[-1.0, -0.5, -2.0], [-0.7, 0.0, 0.0]],
        "teacher": [[-0.8, -0.9, -1.0], [-0.2, -INF, -INF]],
        "mask": [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]],
        "turn": [[0, 0, 0], [0, -1, -1]],
    }
    given = case(inputs)
    result = alone(method, config, given)
    gradient = gradients(result, given).sum(-1)
    assert torch.isfinite(result.loss) and torch.isfinite(gradient).all()
    assert gradient[1, 0] != 0 and (gradient[1, 1:] == 0).all()


@every_variant
def test_empty_masks_and_one_token_responses(golden: dict, method: Any, config: Any) -> None:
    inputs = golden["inputs"]
    some = {**inputs, "mask": [inputs["mask"][0], *[[0.0] * 12] * 3]}
    empty = case(some, [1, 2], hole=NAN)  # a micro-batch without a distilled token in a mini-batch that has some
    for term in method.loss(empty.batch, empty.pair, config, 0, None):
        value = term.value if term.weight is None else term.weight * term.value
        assert (value == 0).all()
    result = alone(method, config, empty)
    assert result.loss == 0 and (gradients_or_zero(result, empty) == 0).all()
    single = {name: [[row[2]] for row in inputs[name]] for name in ("student", "teacher", "rollout", "student_entropy")}
    given = case({**single, "mask": [[1.0]] * 4, "turn": [[0]] * 4})
    result = alone(method, config, given)
    assert torch.isfinite(result.loss) and torch.isfinite(gradients(result, given)).all()
    if method is pcsd:
        assert_close(result.loss, alone(*DEFAULTS["sdar"], given).loss.detach())  # nothing follows: the token decides


def gradients_or_zero(result: Objective, given: Case) -> Tensor:
    return gradients(result, given) if result.loss.requires_grad else torch.zeros_like(given.student)


@every_variant
def test_only_the_student_carries_a_gradient(golden: dict, method: Any, config: Any) -> None:
    given = case(golden["inputs"])
    fixed = [given.pair.teacher_logprobs, given.batch.old_logprobs, given.pair.student_entropy]
    for tensor in fixed:
        tensor.requires_grad_()
    terms = method.loss(given.batch, given.pair, config, 0, None)
    assert all(term.weight is None or not term.weight.requires_grad for term in terms)
    result = alone(method, config, given)
    assert all(g is None for g in torch.autograd.grad(result.loss, fixed, allow_unused=True, retain_graph=True))
    assert gradients(result, given).abs().max() > 0


@every_variant
def test_half_precision_is_raised(golden: dict, method: Any, config: Any) -> None:
    given = case(golden["inputs"])
    names = ("student_logprobs", "teacher_logprobs", "student_entropy", "divergence")
    half = {name: getattr(given.pair, name).bfloat16() for name in names}
    batch = replace(given.batch, old_logprobs=given.batch.old_logprobs.bfloat16())
    terms = method.loss(batch, replace(given.pair, **half), config, 0, None)
    assert {term.value.dtype for term in terms} == {torch.float32}


def test_tokens_without_a_teacher_take_no_part(golden: dict) -> None:
    for method, config in VARIANTS.values():
        given = case(golden["inputs"])
        distilled = given.batch.distilled & (given.batch.trajectory != 2)
        batch = replace(given.batch, distilled=distilled)
        gradient = gradients(alone(method, config, replace(given, batch=batch)), given)
        assert (gradient[2] == 0).all() and gradient[3].abs().max() > 0


def test_normalised_weights_average_one_in_every_response(golden: dict) -> None:
    given = case(golden["inputs"])
    batch = given.batch
    weight = sdar.weights(batch, given.pair, sdar.SdarConfig(normalise="response"))
    plain = sdar.weights(batch, given.pair, sdar.SdarConfig())
    for row, turn in {*zip(batch.row.tolist(), batch.turn.tolist(), strict=True)}:
        response = batch.mask & (batch.row == row) & (batch.turn == turn)
        if response.any():
            assert weight[response].mean().item() == pytest.approx(1)
            assert_close(weight[response] / weight[response][0], plain[response] / plain[response][0])
    nothing = torch.zeros(2, dtype=DOUBLE)
    index = torch.zeros(2, dtype=torch.long)
    assert response_normalised(nothing, index == 0, index, index).tolist() == [0, 0]  # a hard gate that is shut


def test_b34_a_missing_reading_is_an_error(golden: dict) -> None:
    given = case(golden["inputs"])
    for method, config in VARIANTS.values():
        missing = "divergence" if method.needs(config, 0).divergence != "none" else "teacher_logprobs"
        with pytest.raises(ValueError, match=missing):
            method.loss(given.batch, replace(given.pair, **{missing: None}), config, 0, None)
    for kind in ("entropy", "soft_or"):
        with pytest.raises(ValueError, match="student_entropy"):
            gate(kind, torch.zeros(1), 5.0)


# --- what a gradient expects, by enumeration -------------------------------------------------------------------------


def table(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def expected_loss(
    method: Any, config: Any, logits: Tensor, teacher: Tensor, old: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean loss over all tokens of all contexts [C, V], drawn from the student or from `old`, and its gradient."""
    student, other = logits.log_softmax(-1), teacher.log_softmax(-1)
    behaviour = (student if old is None else old.log_softmax(-1)).detach()
    contexts, vocabulary = logits.shape
    n = contexts * vocabulary
    ones, index = torch.ones(n, dtype=torch.bool), torch.arange(n)

    def per_token(values: Tensor) -> Tensor:
        return values[:, None].expand(contexts, vocabulary).flatten()

    probability = (behaviour.exp() / contexts).flatten()
    config = replace(config, coefficient=1.0)
    needs = replace(method.needs(config, 0), policy_coefficient=0.0, regularised=False)
    kind = "reverse_kl" if needs.divergence == "none" else needs.divergence
    batch = Batch(
        row=index, trajectory=index, turn=torch.zeros_like(index), token_class=torch.zeros_like(index), mask=ones,
        distilled=ones, advantages=torch.zeros(n), rollout_logprobs=behaviour.flatten(),
        old_logprobs=behaviour.flatten(), reference_logprobs=None, scale=probability, distill_scale=probability,
        n_tokens=n, n_distilled=n,
    )  # fmt: skip
    pair = PairedPass(
        index,
        ones,
        student.flatten(),
        student_entropy=per_token(-(student.exp() * student).sum(-1)),
        teacher_logprobs=other.flatten(),
        divergence=per_token(divergence(student, other, kind)),
    )
    result = objective(batch, pair, PLAIN, needs, method.loss(batch, pair, config, 0, None))
    return result.loss.detach(), torch.autograd.grad(result.loss, logits)[0]


def kl_gradient(logits: Tensor, teacher: Tensor, kind: Any = "reverse_kl") -> Tensor:
    apart = divergence(logits.log_softmax(-1), teacher.log_softmax(-1), kind).mean()
    return torch.autograd.grad(apart, logits)[0]


CONSTANT_WEIGHT = {
    "grpo_opsd, paper": (grpo_opsd, grpo_opsd.GrpoOpsdConfig(form="paper")),
    "grpo_opsd, code": (grpo_opsd, grpo_opsd.GrpoOpsdConfig(form="code")),
    "sdar, beta 0": (sdar, sdar.SdarConfig(beta=0.0)),
    "sdar, entropy gate": (sdar, sdar.SdarConfig(gate="entropy")),  # constant over the tokens of a context
}
INFORMED = {
    **{name: DEFAULTS[name] for name in ("opsd", "opd", "sdar", "pcsd", "skill_sd", "seed")},
    "opd, full": VARIANTS["opd-reverse_kl"],
    "opsd, jsd": VARIANTS["opsd-jsd"],
}


@pytest.mark.parametrize("name", [*CONSTANT_WEIGHT, *INFORMED])
def test_constant_weights_expect_no_gradient(name: str) -> None:
    logits, teacher = table(3, 5, seed=0).requires_grad_(), table(3, 5, seed=1)
    method, config = {**CONSTANT_WEIGHT, **INFORMED}[name]
    size = expected_loss(method, config, logits, teacher)[1].abs().max()
    assert size < 1e-14 if name in CONSTANT_WEIGHT else size > 1e-3
    _, off_policy = expected_loss(method, config, logits, teacher, old=table(3, 5, seed=2))
    assert off_policy.abs().max() > 1e-3  # the identity holds on the policy's own tokens only


@pytest.mark.parametrize("name", ["opd", "seed", "opd, full", "skill_sd"])
def test_policy_gradient_forms_expect_the_gradient_of_the_reverse_kl(name: str) -> None:
    logits, teacher = table(3, 5, seed=0).requires_grad_(), table(3, 5, seed=1)
    expected = kl_gradient(logits, teacher)
    assert_close(expected_loss(*INFORMED[name], logits, teacher)[1], expected)
    _, off_policy = expected_loss(*INFORMED[name], logits, teacher, old=table(3, 5, seed=2))
    corrected = torch.allclose(off_policy, expected, rtol=1e-6)
    if name == "skill_sd":
        assert corrected  # its ratio, differentiated, makes tokens of the older policy count right
    elif name in ("opd", "seed"):
        assert not corrected
    assert not torch.allclose(expected, kl_gradient(logits, teacher, "forward_kl"), rtol=1e-2)


@pytest.mark.parametrize("kind", ["reverse_kl", "jsd", "forward_kl"])
def test_full_objectives_have_the_gradient_of_their_divergence(kind: Any) -> None:
    logits, teacher = table(2, 4, seed=3).requires_grad_(), table(2, 4, seed=4)
    loss, gradient = expected_loss(opsd, opsd.OpsdConfig(objective=kind), logits, teacher)
    assert_close(gradient, kl_gradient(logits, teacher, kind))
    assert_close(loss, divergence(logits.log_softmax(-1), teacher.log_softmax(-1), kind).mean().detach())


def test_opsd_keeps_kl_and_entropy_and_drops_the_policy_gradient(golden: dict) -> None:
    config, needs = ObjectiveConfig(kl_coefficient=0.5, entropy_coefficient=0.25), opsd.needs(opsd.OpsdConfig(), 0)
    given = case(golden["inputs"])
    result = objective(given.batch, given.pair, config, needs)
    flat = torch.zeros_like(given.batch.advantages)
    grpo = objective(given.batch, given.pair, config, Needs(), advantages=flat)  # no advantage: no policy gradient
    assert_close(result.loss, grpo.loss.detach())
    assert_close(gradients(result, given), gradients(grpo, given))
    assert result.loss != 0 and "loss/policy" not in result.metrics


def test_soft_or_follows_the_gap_below_one_nat_and_turns_against_it_above() -> None:
    gap = torch.linspace(-1, 1, 5)
    for entropy, sign in ((0.5, 1), (1.0, 0), (1.5, -1)):
        steps = gate("soft_or", gap, 5.0, torch.full_like(gap, entropy)).diff()
        assert (steps.sign() == sign).all()


def test_sdar_expects_a_pull_towards_gates_above_their_mean() -> None:
    logits, teacher = table(1, 5, seed=0).requires_grad_(), table(1, 5, seed=1)
    p, q = logits.softmax(-1).detach(), teacher.log_softmax(-1)
    weight = torch.sigmoid(5 * (q - logits.log_softmax(-1).detach()))
    expected = -p * (weight - (p * weight).sum(-1, keepdim=True))
    assert_close(expected_loss(*DEFAULTS["sdar"], logits, teacher)[1], expected)


def test_b25_estimators_as_losses() -> None:
    logits = torch.tensor([[0.4, 0.0]], dtype=DOUBLE, requires_grad=True)
    reference = torch.tensor([[0.9, 0.1]], dtype=DOUBLE).log()
    k1, gradient = expected_loss(grpo_opsd, grpo_opsd.GrpoOpsdConfig(form="paper"), logits, reference)
    assert k1.item() == pytest.approx(0.31359, abs=5e-6)  # the estimate is right, its gradient nothing
    assert gradient[0].tolist() == pytest.approx([0, 0], abs=1e-14)
    true = pytest.approx([-0.43180, 0.43180], abs=5e-6)
    assert kl_gradient(logits, reference)[0].tolist() == true
    assert expected_loss(*DEFAULTS["opd"], logits, reference)[1][0].tolist() == true  # k2 as a loss, token by token
    student, other = logits.log_softmax(-1)[0], reference[0]
    p = student.exp().detach()
    k2 = (p * (student - other).square() / 2).sum()
    assert torch.autograd.grad(k2, logits, retain_graph=True)[0][0].tolist() == true
    k3 = (p * kl_k3(student, other, torch.ones_like(p, dtype=torch.bool))).sum()
    assert k3.item() == pytest.approx(0.31359, abs=5e-6)
    assert torch.autograd.grad(k3, logits)[0][0].tolist() == pytest.approx([-0.30131, 0.30131], abs=5e-6)
    assert expected_loss(*DEFAULTS["skill_sd"], logits, reference)[1][0].tolist() == true  # its ratio makes k3 right


def test_b31_no_cut_and_no_clamp() -> None:
    student = torch.tensor([[0.6, 0.4]], dtype=DOUBLE).log()
    teacher = torch.tensor([[0.9, 0.1]], dtype=DOUBLE).log()
    for kind, value in (("reverse_kl", 0.31124), ("forward_kl", 0.22629)):
        config = opsd.OpsdConfig(objective=kind)
        logits = student.clone().requires_grad_()
        assert expected_loss(opsd, config, logits, teacher)[0].item() == pytest.approx(value, abs=5e-6)
    given = case({"student": student.tolist(), "teacher": teacher.tolist(), "mask": [[1.0, 1.0]], "turn": [[0, 0]]})
    [term] = grpo_opsd.loss(given.batch, given.pair, grpo_opsd.GrpoOpsdConfig(form="paper"), 0, None)
    parts = term.value * student.exp()[0]
    assert parts.tolist() == pytest.approx([-0.24328, 0.55452], abs=5e-6)  # the negative one stays negative


@pytest.mark.parametrize("name", [*CONSTANT_WEIGHT, *INFORMED])
def test_a_planted_teacher_is_learnt_where_the_channel_informs(name: str) -> None:
    logits, teacher = table(2, 4, seed=5).requires_grad_(), table(2, 4, seed=6)
    method, config = {**CONSTANT_WEIGHT, **INFORMED}[name]

    def apart() -> float:
        return divergence(logits.log_softmax(-1), teacher.log_softmax(-1), "reverse_kl").mean().item()

    before = apart()
    for _ in range(60):
        _, gradient = expected_loss(method, config, logits, teacher)
        with torch.no_grad():
            logits -= 3.0 * gradient
    assert apart() == pytest.approx(before, rel=1e-9) if name in CONSTANT_WEIGHT else apart() < 0.1 * before


# --- contract --------------------------------------------------------------------------------------------------------


def test_needs() -> None:
    retrieved = {"skill": "retrieved", "teacher_logprobs": True}
    hindsight = {"skill": "hindsight", "teacher_logprobs": True}
    expected = {
        "opsd": Needs(**retrieved, teacher="initial", policy_coefficient=0.0),
        "grpo_opsd": Needs(**retrieved, teacher="rollout"),
        "opd": Needs(**hindsight, teacher="current"),
        "sdar": Needs(**retrieved, teacher="rollout"),
        "pcsd": Needs(**retrieved, teacher="initial"),
        "skill_sd": Needs(**retrieved, teacher="rollout"),
        "seed": Needs(**hindsight, teacher="current"),
    }
    assert {name: method.needs(config, 0) for name, (method, config) in DEFAULTS.items()} == expected
    assert opsd.needs(opsd.OpsdConfig(teacher="rollout"), 0).teacher == "rollout"
    assert sdar.needs(sdar.SdarConfig(objective="jsd"), 0).divergence == "jsd"
    assert [sdar.needs(sdar.SdarConfig(gate=kind), 0).entropy for kind in ("gap", "entropy", "soft_or", "hard")] == [
        False, True, True, False,
    ]  # fmt: skip


@every_method
def test_settings_say_where_they_come_from_and_the_skill_can_be_matched(method: Any, config: Any) -> None:
    assert {field.metadata["source"] for field in fields(config)} <= {"paper", "code", "ours"}
    for skill in ("retrieved", "hindsight"):
        assert method.needs(replace(config, skill=skill), 0).skill == skill
    assert method.METHOD.name == method.__name__.rpartition(".")[2]
