"""Methods that change the advantage: worked numbers, explicit loops, and what they leave alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diagnostics.paired import PairedPass
from training.advantages import group_advantages
from training.batch import Batch
from training.config import ObjectiveConfig
from training.method import Method, Needs
from training.methods import grpo, opid, rlsd, sod
from training.objective import Objective, objective

DOUBLE = torch.float64
PLAIN = ObjectiveConfig(kl_coefficient=0.0, entropy_coefficient=0.0)
EPISODE = opid.OpidConfig(step_coefficient=0.0)  # of opid, what the golden file holds
CASES = {"rlsd": (rlsd, rlsd.RlsdConfig()), "sod": (sod, sod.SodConfig()), "opid": (opid, opid.OpidConfig())}
every_method = pytest.mark.parametrize(("module", "config"), CASES.values(), ids=CASES)


@dataclass(frozen=True)
class Tokens:
    """M tokens of a step: what an advantage reads, as plain tensors."""

    trajectory: Tensor
    turn: Tensor
    distilled: Tensor
    advantages: Tensor
    centred: Tensor
    student: Tensor
    old: Tensor
    teacher: Tensor
    step_teacher: Tensor
    step_distilled: Tensor

    def at(self, index: Tensor) -> Tokens:
        return Tokens(**{name: value[index] for name, value in vars(self).items()})


def random_tokens(m: int = 60, seed: int = 0) -> Tokens:
    draw = np.random.default_rng(seed)
    trajectory, turn = draw.integers(0, 4, m), draw.integers(0, 3, m)

    def tensor(values: Any) -> Tensor:
        return torch.tensor(values, dtype=DOUBLE)

    returns = tensor(draw.normal(size=4))
    return Tokens(
        trajectory=torch.tensor(trajectory),
        turn=torch.tensor(turn),
        distilled=torch.tensor((trajectory + turn) % 4 != 0),  # trajectory 0 lacks its first turn
        advantages=returns[trajectory],
        centred=(returns - returns.mean())[trajectory],
        student=tensor(-draw.uniform(0.1, 2, m)),
        old=tensor(-draw.uniform(0.1, 2, m)),
        teacher=tensor(-draw.uniform(0.1, 2, m)),
        step_teacher=tensor(-draw.uniform(0.1, 2, m)),
        step_distilled=torch.tensor(turn == 1),
    )


def handed_over(tokens: Tokens, mask: Tensor | None = None) -> tuple[Batch, PairedPass]:
    """As the trainer gives a step: everything in one batch, mask all ones unless given."""
    m = len(tokens.turn)
    mask = torch.ones(m, dtype=torch.bool) if mask is None else mask
    scale = torch.full((m,), 1 / max(int(mask.sum()), 1), dtype=DOUBLE)
    batch = Batch(
        row=tokens.trajectory,
        trajectory=tokens.trajectory,
        turn=tokens.turn,
        token_class=torch.ones(m, dtype=torch.long),
        mask=mask,
        distilled=tokens.distilled,
        advantages=tokens.advantages,
        centred=tokens.centred,
        rollout_logprobs=tokens.old,
        old_logprobs=tokens.old,
        reference_logprobs=None,
        step_teacher_logprobs=tokens.step_teacher,
        step_distilled=tokens.step_distilled,
        scale=scale,
        distill_scale=scale,
        n_tokens=int(mask.sum()),
        n_distilled=int(tokens.distilled.sum()),
    )
    pair = PairedPass(
        row=batch.row,
        has_teacher=tokens.distilled,
        student_logprobs=tokens.student.clone().requires_grad_(),
        teacher_logprobs=tokens.teacher,
    )
    return batch, pair


def trained(method: Method, config: Any, batch: Batch, pair: PairedPass, step: int = 0) -> tuple[Objective, Tensor]:
    """The objective under a method's advantage, and its gradient on the student's log-probs."""
    advantages = method.advantage(batch, pair, config, step) if method.advantage else None
    result = objective(batch, pair, PLAIN, method.needs(config, step), (), advantages)
    [gradient] = torch.autograd.grad(result.loss, pair.student_logprobs)
    return result, gradient


@pytest.fixture
def golden_tokens(golden: dict) -> tuple[Tokens, Tensor]:
    """The golden inputs, flat, and their mask."""
    inputs = golden["inputs"]
    mask, turn = torch.tensor(inputs["mask"]).bool(), torch.tensor(inputs["turn"])
    rewards = torch.tensor(inputs["rewards"], dtype=DOUBLE)
    group = group_advantages(rewards, torch.zeros(4, dtype=torch.long))

    def per_row(values: Tensor) -> Tensor:
        return values[:, None].expand_as(mask).flatten()

    def flat(name: str) -> Tensor:
        return torch.tensor(inputs[name], dtype=DOUBLE).flatten()

    tokens = Tokens(
        trajectory=per_row(torch.arange(4)),
        turn=turn.flatten(),
        distilled=mask.flatten(),
        advantages=per_row(group),
        centred=per_row(rewards - rewards.mean()),
        student=flat("student"),
        old=flat("rollout"),
        teacher=flat("teacher"),
        step_teacher=flat("teacher"),
        step_distilled=torch.zeros(mask.numel(), dtype=torch.bool),
    )
    return tokens, mask.flatten()


def assert_close(ours: Tensor, worked: Any) -> None:
    expected = torch.tensor(worked, dtype=DOUBLE)
    torch.testing.assert_close(ours.detach().view_as(expected), expected, rtol=1e-6, atol=1e-12)


# --- worked numbers


@pytest.mark.parametrize(
    ("name", "module", "config"),
    [("rlsd", rlsd, rlsd.RlsdConfig()), ("sod", sod, sod.SodConfig()), ("opid_episode", opid, EPISODE)],
    ids=["rlsd", "sod", "opid_episode"],
)
def test_golden(name: str, module: Any, config: Any, golden: dict, golden_tokens: tuple[Tokens, Tensor]) -> None:
    tokens, mask = golden_tokens
    batch, pair = handed_over(tokens, mask)
    answer = golden["answers"][name]
    advantages = module.METHOD.advantage(batch, pair, config, 0)
    assert_close(torch.where(mask, advantages, 0.0), answer["advantage"])
    result, gradient = trained(module.METHOD, config, batch, pair)
    assert_close(result.loss, answer["loss_token_mean"])
    assert_close(gradient, answer["grad"])


def test_golden_sod_weights(golden: dict, golden_tokens: tuple[Tokens, Tensor]) -> None:
    tokens, mask = golden_tokens
    distance = (tokens.old - tokens.teacher).abs()
    weights = sod.turn_weights(distance, tokens.trajectory, tokens.turn, mask, 1.2)
    assert_close(weights, golden["answers"]["sod"]["weight"])
    uncapped = sod.turn_weights(distance, tokens.trajectory, tokens.turn, mask, 1.5)
    assert uncapped.max() > 1.2  # the cap decides somewhere in these numbers


# --- explicit loops


@pytest.mark.parametrize("step", [0, 37, 99])
def test_rlsd_loop(step: int) -> None:
    tokens, config = random_tokens(), rlsd.RlsdConfig(clip=0.1)
    ours = rlsd.METHOD.advantage(*handed_over(tokens), config, step)
    lam = 0.5 * (100 - step) / 100
    for i in range(len(ours)):
        a = float(tokens.advantages[i])
        w = np.clip(np.exp(np.sign(a) * float(tokens.teacher[i] - tokens.old[i])), 0.9, 1.1)
        expected = a * ((1 - lam) + lam * w) if tokens.distilled[i] else a
        assert float(ours[i]) == pytest.approx(expected, rel=1e-12)


def test_sod_loop() -> None:
    tokens, config = random_tokens(seed=3), sod.SodConfig(coefficient=0.7)
    ours = sod.METHOD.advantage(*handed_over(tokens), config, 0)
    gaps: dict[int, dict[int, list[float]]] = {}
    for i in range(len(ours)):
        if tokens.distilled[i]:
            turns = gaps.setdefault(int(tokens.trajectory[i]), {})
            turns.setdefault(int(tokens.turn[i]), []).append(abs(float(tokens.old[i] - tokens.teacher[i])))
    assert 0 not in gaps[0] and 0 in gaps[1]  # the turn that stands first is not turn 0 everywhere
    seen = set()
    for i in range(len(ours)):
        expected = float(tokens.advantages[i])
        if tokens.distilled[i]:
            turns, turn = gaps[int(tokens.trajectory[i])], int(tokens.turn[i])
            first, here = np.mean(turns[min(turns)]), np.mean(turns[turn])
            weight = 1.0 if turn == min(turns) else min((first + 1e-6) / (here + 1e-6), 1.2)
            seen.add(weight)
            expected += 0.7 * weight * float(tokens.teacher[i] - tokens.old[i])
        assert float(ours[i]) == pytest.approx(expected, rel=1e-10)
    assert {1.0, 1.2} < seen  # first turns, capped ones and others


def test_opid_loop() -> None:
    tokens, config = random_tokens(), opid.OpidConfig(episode_coefficient=0.3, step_coefficient=0.2)
    ours = opid.METHOD.advantage(*handed_over(tokens), config, 0)
    for i in range(len(ours)):
        expected = float(tokens.centred[i])
        expected += 0.3 * float(tokens.teacher[i] - tokens.old[i]) * bool(tokens.distilled[i])
        expected += 0.2 * float(tokens.step_teacher[i] - tokens.old[i]) * bool(tokens.step_distilled[i])
        assert float(ours[i]) == pytest.approx(expected, rel=1e-12)


def test_sod_weighs_against_the_first_turn_of_the_trajectory_not_of_the_row() -> None:
    # one trajectory in three rows, rows of another between them: distances 0.2, 0.4, 0.1 and 5
    distance = torch.tensor([0.4, 5.0, 0.2, 0.2, 0.1], dtype=DOUBLE)
    trajectory, turn = torch.tensor([0, 1, 0, 0, 0]), torch.tensor([1, 0, 0, 0, 2])
    weights = sod.turn_weights(distance, trajectory, turn, torch.ones(5, dtype=torch.bool), 1.2)
    assert weights.tolist() == pytest.approx([0.5, 1, 1, 1, 1.2], rel=1e-5)
    assert sod.turn_weights(distance, trajectory, turn, torch.ones(5, dtype=torch.bool), 3.0)[4] == pytest.approx(
        2, 1e-4
    )


# --- what they leave alone


@pytest.mark.parametrize(
    ("module", "config", "step", "same"),
    [
        (rlsd, rlsd.RlsdConfig(lam=0.0), 0, True),
        (rlsd, rlsd.RlsdConfig(), 100, True),
        (rlsd, rlsd.RlsdConfig(), 99, False),
        (sod, sod.SodConfig(coefficient=0.0), 0, True),
        (sod, sod.SodConfig(coefficient=0.001), 0, False),
    ],
)
def test_b34_without_its_coefficient_a_method_is_grpo_bit_for_bit(
    module: Any, config: Any, step: int, same: bool
) -> None:
    batch, pair = handed_over(random_tokens())
    assert (module.METHOD.needs(config, step) == Needs()) == same
    if same:
        pair = replace(pair, teacher_logprobs=None)  # no teacher is read
    ours, base = (trained(m, c, batch, pair, step) for m, c in ((module.METHOD, config), (grpo.METHOD, None)))
    assert torch.equal(ours[0].loss, base[0].loss) == same
    assert torch.equal(ours[1], base[1]) == same


def test_opid_without_teachers_is_the_centred_return() -> None:
    config = opid.OpidConfig(0.0, 0.0)
    batch, pair = handed_over(random_tokens())
    assert opid.METHOD.needs(config, 0) == Needs()
    assert torch.equal(opid.METHOD.advantage(batch, pair, config, 0), batch.centred)


def test_opid_asks_for_a_second_teacher_only_with_skills_of_turns() -> None:
    def asks(**given: Any) -> bool:
        return opid.METHOD.needs(opid.OpidConfig(**given), 0).step_skill

    assert asks() and not asks(step_coefficient=0.0) and not asks(skill="retrieved")
    tokens = random_tokens()
    batch, pair = handed_over(replace(tokens, step_teacher=tokens.step_teacher * float("nan")))
    assert torch.isfinite(opid.METHOD.advantage(batch, pair, opid.OpidConfig(skill="retrieved"), 0)).all()


def test_rlsd_lambda_falls_to_zero_and_the_teacher_goes() -> None:
    config = rlsd.RlsdConfig()
    assert [rlsd.mixing(config, step) for step in (0, 50, 99, 100, 5000)] == pytest.approx([0.5, 0.25, 0.005, 0, 0])
    assert rlsd.METHOD.needs(config, 99) == Needs("retrieved", teacher="rollout", teacher_logprobs=True)
    assert rlsd.METHOD.needs(rlsd.RlsdConfig(skill="hindsight"), 0).skill == "hindsight"


def test_rlsd_keeps_every_sign_and_bounds_every_size() -> None:
    tokens = random_tokens(400)
    tokens = replace(tokens, distilled=torch.ones(400, dtype=torch.bool))
    ours = rlsd.METHOD.advantage(*handed_over(tokens), rlsd.RlsdConfig(), 0)
    ratio = ours / tokens.advantages
    assert 0.9 - 1e-9 <= ratio.min() < 0.91 and 1.09 < ratio.max() <= 1.1 + 1e-9  # 1 +- lam clip, both reached
    prefers = (tokens.teacher > tokens.old) == (tokens.advantages > 0)
    assert (ratio[prefers] > 1).all() and (ratio[~prefers] < 1).all()
    dead = handed_over(replace(tokens, advantages=tokens.advantages * 0))
    assert (rlsd.METHOD.advantage(*dead, rlsd.RlsdConfig(), 0) == 0).all()  # no reward, nothing to reweigh


# --- invariances and holes


@every_method
def test_the_order_of_tokens_and_rows_changes_nothing(module: Any, config: Any) -> None:
    tokens = random_tokens()
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    straight = module.METHOD.advantage(*handed_over(tokens), config, 0)
    shuffled = module.METHOD.advantage(*handed_over(tokens.at(order)), config, 0)
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-12, atol=0)
    renamed = replace(tokens, trajectory=7 - tokens.trajectory)  # another numbering of the trajectories
    torch.testing.assert_close(module.METHOD.advantage(*handed_over(renamed), config, 0), straight, rtol=1e-12, atol=0)


@every_method
def test_trajectories_do_not_see_each_other(module: Any, config: Any) -> None:
    tokens = random_tokens()
    whole = module.METHOD.advantage(*handed_over(tokens), config, 0)
    for name in range(4):
        own = (tokens.trajectory == name).nonzero()[:, 0]
        alone = module.METHOD.advantage(*handed_over(tokens.at(own)), config, 0)
        torch.testing.assert_close(alone, whole[own], rtol=1e-12, atol=0)


@every_method
@pytest.mark.parametrize("hole", [float("nan"), float("-inf"), float("inf")])
def test_b30_what_no_teacher_read_is_not_read(module: Any, config: Any, hole: float) -> None:
    tokens = random_tokens()
    batch, pair = handed_over(tokens)
    filled = handed_over(
        replace(
            tokens,
            teacher=torch.where(tokens.distilled, tokens.teacher, hole),
            step_teacher=torch.where(tokens.step_distilled, tokens.step_teacher, hole),
        )
    )
    assert torch.equal(module.METHOD.advantage(*filled, config, 0), module.METHOD.advantage(batch, pair, config, 0))


@every_method
def test_b21_without_any_teacher_context_the_advantage_is_the_rewards(module: Any, config: Any) -> None:
    none = torch.zeros(60, dtype=torch.bool)
    batch, pair = handed_over(replace(random_tokens(), distilled=none, step_distilled=none))
    expected = batch.centred if module is opid else batch.advantages
    assert torch.equal(module.METHOD.advantage(batch, pair, config, 0), expected)
    unread = replace(batch, step_teacher_logprobs=None, step_distilled=None), replace(pair, teacher_logprobs=None)
    assert torch.equal(module.METHOD.advantage(*unread, config, 0), expected)  # every skill failed to parse


@every_method
def test_one_token(module: Any, config: Any) -> None:
    tokens = random_tokens().at(torch.tensor([1]))
    yes = torch.ones(1, dtype=torch.bool)
    batch, pair = handed_over(replace(tokens, distilled=yes, step_distilled=yes))
    _, gradient = trained(module.METHOD, config, batch, pair)
    assert torch.isfinite(gradient).all() and gradient.shape == (1,)


@every_method
def test_b34_a_missing_reading_is_an_error(module: Any, config: Any) -> None:
    batch, pair = handed_over(random_tokens())
    with pytest.raises(ValueError, match="teacher_logprobs"):
        module.METHOD.advantage(batch, replace(pair, teacher_logprobs=None), config, 0)
    with pytest.raises(ValueError, match="old_logprobs"):
        module.METHOD.advantage(replace(batch, old_logprobs=None), pair, config, 0)


@every_method
def test_half_precision_is_raised(module: Any, config: Any) -> None:
    tokens = random_tokens()
    single = replace(tokens, advantages=tokens.advantages.float(), centred=tokens.centred.float())
    half = replace(single, old=tokens.old.bfloat16(), teacher=tokens.teacher.bfloat16(),
                   step_teacher=tokens.step_teacher.bfloat16())  # fmt: skip
    assert module.METHOD.advantage(*handed_over(half), config, 0).dtype == torch.float32


# --- gradients


@every_method
def test_gradient_by_finite_differences(module: Any, config: Any) -> None:
    tokens = random_tokens()
    tokens = replace(tokens, student=tokens.old + 0.05 * tokens.student)  # ratios inside the clip range
    batch, pair = handed_over(tokens)
    _, gradient = trained(module.METHOD, config, batch, pair)
    for i in (0, 7, 31):
        losses = []
        for shift in (1e-6, -1e-6):
            moved = tokens.student.clone()
            moved[i] += shift
            result, _ = trained(module.METHOD, config, *handed_over(replace(tokens, student=moved)))
            losses.append(result.loss.item())
        assert float(gradient[i]) == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-5)


def test_sod_without_reward_descends_the_reverse_kl() -> None:
    """On-policy, the first turn, A = 0: summed over the vocabulary the gradient is that of KL(student || teacher)."""
    logits = torch.tensor([0.4, -0.3, 0.1], dtype=DOUBLE, requires_grad=True)
    teacher = torch.tensor([0.2, 0.5, 0.3], dtype=DOUBLE).log()
    student = logits.log_softmax(0)
    [expected] = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits, retain_graph=True)
    total = torch.zeros(3, dtype=DOUBLE)
    for token in range(3):
        one = random_tokens().at(torch.tensor([0]))
        yes, logprob = torch.ones(1, dtype=torch.bool), student[token : token + 1]
        batch, pair = handed_over(
            replace(one, distilled=yes, advantages=one.advantages * 0, old=logprob.detach(), teacher=teacher[[token]])
        )
        pair = replace(pair, student_logprobs=logprob)
        advantages = sod.METHOD.advantage(batch, pair, sod.SodConfig(), 0)
        loss = objective(batch, pair, PLAIN, sod.METHOD.needs(sod.SodConfig(), 0), (), advantages).loss
        [gradient] = torch.autograd.grad(loss, logits, retain_graph=True)
        total += student[token].exp().detach() * gradient
    torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-12)
    assert expected.abs().max() > 0.1
