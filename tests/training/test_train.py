"""The trainer on a bandit: it learns, resumes bit for bit, and never does more or less than it says."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from diagnostics.paired import run_pairs
from tests.training.bandit import CONFIG, TOKENIZER, model, play, run, same, weights, write_skills
from training.methods.pr_opd import PrOpdConfig
from training.methods.sdar import SdarConfig
from training.monitor import read_metrics

PR_OPD = replace(CONFIG, method="pr_opd")


def objective(**values: Any) -> Any:
    return replace(CONFIG, objective=replace(CONFIG.objective, **values))


def optim(config: Any, **values: Any) -> Any:
    return replace(config, optim=replace(config.optim, **values))


def pr_opd(**values: Any) -> Any:
    return replace(PR_OPD, method_config=PrOpdConfig(**{"start_step": 0, "hidden": 32, **values}))


def last(folder: Path) -> dict[str, float]:
    return read_metrics(folder)[-1]


def test_grpo_learns_the_bandit(tmp_path: Path) -> None:
    run(replace(CONFIG, steps=12), tmp_path / "a")
    rows = read_metrics(tmp_path / "a")
    success = [row["reward/success"] for row in rows]
    assert success[0] < 0.7 and success[-1] > 0.9
    assert [row["step"] for row in rows] == list(range(1, 13)) and rows[-1]["update"] == 12
    assert max(row["kl/rollout_train"] for row in rows) < 1e-5  # two engines, the same log-probs
    run(optim(replace(CONFIG, steps=12), lr=0.0), tmp_path / "b")  # control
    assert max(row["reward/success"] for row in read_metrics(tmp_path / "b")) < 0.8


def test_resume_is_exact(tmp_path: Path) -> None:
    config = pr_opd(start_step=1, projector_updates=2)
    config = optim(config, mini_batch_rows=12)
    straight = run(config, tmp_path / "straight")
    run(replace(config, steps=2), tmp_path / "resumed")
    resumed = run(config, tmp_path / "resumed", model(seed=9))  # the weights given do not matter
    assert same(weights(straight), weights(resumed))
    name = "checkpoints/step_4"
    for file in ("model", "optimizer", "modules"):
        first, second = (tmp_path / r / name / f"{file}.safetensors" for r in ("straight", "resumed"))
        assert first.read_bytes() == second.read_bytes(), file
    timeless = [
        [{k: v for k, v in row.items() if "time/" not in k and k != "attempt"} for row in read_metrics(tmp_path / r)]
        for r in ("straight", "resumed")
    ]
    assert timeless[0] == timeless[1]
    assert [row["attempt"] for row in read_metrics(tmp_path / "resumed")] == [0, 0, 1, 1]
    other = run(replace(config, seed=1), tmp_path / "other")
    assert not same(weights(straight), weights(other))


def test_interrupted_between_checkpoints(tmp_path: Path) -> None:
    policy = model()

    def interrupted(step: int) -> Any:
        if step == 3:
            raise KeyboardInterrupt
        return play(policy, step)

    with pytest.raises(KeyboardInterrupt):
        run(CONFIG, tmp_path / "run", policy, rollout=interrupted)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_2"]
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3]
    resumed = run(CONFIG, tmp_path / "run", model())
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert same(weights(resumed), weights(run(CONFIG, tmp_path / "straight")))


def test_b34_coefficient_zero_is_plain_grpo_bit_for_bit(tmp_path: Path) -> None:
    plain = run(CONFIG, tmp_path / "grpo")
    zero = run(pr_opd(coefficient=0.0), tmp_path / "zero")
    some = run(pr_opd(), tmp_path / "some")
    assert same(weights(plain), weights(zero))
    assert not same(weights(plain), weights(some))


def test_stage_one_is_plain_grpo_bit_for_bit(tmp_path: Path) -> None:
    assert same(weights(run(CONFIG, tmp_path / "a")), weights(run(pr_opd(start_step=4), tmp_path / "b")))


def gradient(folder: Path, step: int = 1) -> dict[str, torch.Tensor]:
    """The (clipped) gradient of the first update, up to a factor: AdamW's first moment is 0.1 of it."""
    moments = load_file(folder / f"checkpoints/step_{step}/optimizer.safetensors")
    return {name: value for name, value in moments.items() if name.endswith("exp_avg")}


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_b27_micro_batches_do_not_change_the_update(tmp_path: Path, reduction: str) -> None:
    policy = model()
    uneven = [t for step in range(3) for t in play(policy, step, length=1 + 3 * step)[step::3]]
    uneven = [replace(t, id=str(i)) for i, t in enumerate(uneven)]
    config = replace(pr_opd(), steps=1, objective=objective(reduction=reduction).objective)
    for name, tokens in (("one", 10**6), ("many", 1)):
        run(optim(config, micro_batch_tokens=tokens), tmp_path / name, model(), lambda step: uneven)
    one, many = gradient(tmp_path / "one"), gradient(tmp_path / "many")
    assert any(name.startswith("modules/") for name in one) and one.keys() == many.keys()
    for name in one:
        error, size = (one[name] - many[name]).norm(), one[name].norm()
        assert error <= 1e-4 * size + 1e-9, name
    first, second = last(tmp_path / "one"), last(tmp_path / "many")
    exempt = ("time/", "states/effective_rank")  # the rank is an estimate from the tokens of a micro-batch
    for key in first:
        if not key.startswith(exempt):
            assert first[key] == pytest.approx(second[key], rel=1e-3, abs=1e-6), key


def test_reductions_differ_where_lengths_do(tmp_path: Path) -> None:
    policy = model()
    uneven = play(policy, 0)[:16] + [replace(t, id=t.id + "long") for t in play(policy, 1, length=6)[16:]]
    for reduction in ("token_mean", "sequence_mean"):
        run(replace(objective(reduction=reduction), steps=1), tmp_path / reduction, model(), lambda step: uneven)
    token, sequence = gradient(tmp_path / "token_mean"), gradient(tmp_path / "sequence_mean")
    assert not same(token, sequence)


def test_b26_kl_moves_the_weights_where_no_advantage_does(tmp_path: Path) -> None:
    policy = model()
    equal = [replace(t, reward=10.0, success=True) for t in play(policy, 0)]
    start = weights(policy)
    for name, beta in (("kl", 1.0), ("none", 0.0)):
        config = replace(objective(kl_coefficient=beta, entropy_coefficient=0.0), steps=1)
        policy = model()
        run(optim(config, weight_decay=0.0), tmp_path / name, policy, lambda step: equal, reference=model(seed=1))
        assert same(start, weights(policy)) == (beta == 0.0)
        assert last(tmp_path / name)["reward/dead_groups"] == 1
        assert (last(tmp_path / name)["optim/grad_norm/model"] > 0) == (beta > 0)


def test_old_policy_is_read_by_the_trainer_when_a_step_has_several_updates(tmp_path: Path) -> None:
    policy = model()
    wrong = play(policy, 0)
    for trajectory in wrong:
        trajectory.segments[0].rollout_logprobs[-1] -= 0.5  # a sampler that disagrees
    one = optim(replace(objective(kl_coefficient=0.0), steps=1), mini_batch_rows=64)
    run(one, tmp_path / "one", policy, lambda step: wrong)
    run(optim(one, mini_batch_rows=8, lr=1e-2), tmp_path / "four", model(), lambda step: wrong)
    assert last(tmp_path / "one")["kl/rollout_train"] == pytest.approx(0.5, abs=1e-4)
    assert last(tmp_path / "four")["kl/rollout_train"] == pytest.approx(0.5, abs=1e-4)
    assert last(tmp_path / "one")["policy/clip_share"] == 0  # the ratio is 1: the sampler's number takes no part
    assert last(tmp_path / "four")["policy/clip_share"] > 0 and last(tmp_path / "four")["update"] == 4


def test_errors_are_left_out_and_counted(tmp_path: Path) -> None:
    policy = model()
    played = play(policy, 0)
    crashed = [replace(t, error="step: timeout", stop_reason="error", reward=0.0, success=False) for t in played[:2]]
    config = replace(CONFIG, steps=1)
    run(config, tmp_path / "with", policy, lambda step: [*crashed, *played[2:]])
    run(config, tmp_path / "without", model(), lambda step: played[2:])
    first, second = last(tmp_path / "with"), last(tmp_path / "without")
    assert first["rollout/errors"] == 2 and second["rollout/errors"] == 0
    assert first["reward/success"] == second["reward/success"]
    one, two = (tmp_path / name / "checkpoints/step_1/model.safetensors" for name in ("with", "without"))
    assert one.read_bytes() == two.read_bytes()


def test_nothing_played_leaves_the_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = model()
    start = weights(policy)
    crashed = [replace(t, error="reset: crash") for t in play(policy, 0)]
    with caplog.at_level(logging.WARNING):
        run(replace(CONFIG, steps=1), tmp_path, policy, lambda step: crashed)
    assert same(start, weights(policy)) and "the weights stay" in caplog.text
    assert last(tmp_path)["update"] == 0 and last(tmp_path)["reward/success"] is None


def test_pr_opd_aligns(tmp_path: Path) -> None:
    config = replace(pr_opd(reward_coefficient=0.0, coefficient=1.0, projector_updates=20, projector_lr=1e-2), steps=6)
    run(config, tmp_path)
    rows = read_metrics(tmp_path)
    assert rows[0]["loss/pr_opd"] == pytest.approx(2.0, abs=0.2)  # a random plain projector
    assert rows[-1]["loss/pr_opd"] < 0.5
    assert rows[0]["distill/tokens"] == 32 and rows[0]["distill/paired"] == 32
    lengths = [len(TOKENIZER(f"take the {reward} box")["input_ids"]) for reward in (10, 0)]
    won = round(32 * rows[0]["reward/success"])
    assert rows[0]["tokens/skills"] == won * lengths[0] + (32 - won) * lengths[1]
    for layer in "01":
        assert rows[-1][f"loss/pr_opd/cosine_projected/{layer}"] > 0.7
        assert -1 <= rows[0][f"states/cosine_raw/{layer}"] <= 1
        assert 1 < rows[0][f"states/effective_rank/{layer}"] < 64
    mean = sum(rows[-1][f"loss/pr_opd/cosine_projected/{layer}"] for layer in "01") / 2
    assert rows[-1]["loss/pr_opd"] == pytest.approx(2 - 2 * mean, abs=1e-5)
    assert not any(key in rows[0] for key in ("loss/policy", "loss/kl", "loss/entropy"))  # alignment only


def test_a_rollout_time_teacher_is_of_its_own_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two updates, then one: the copy that the first step keeps for its second update is not the second step's."""
    config = replace(
        CONFIG, method="sdar", method_config=SdarConfig(objective="reverse_kl", skill="hindsight"), steps=2
    )
    config = optim(config, mini_batch_rows=16)
    policy, teachers = model(), []
    start = weights(policy)

    def read(model: Any, pairs: Any, **given: Any) -> Any:
        if given.get("student_grad"):
            teachers.append(given["teacher_model"])
        return run_pairs(model, pairs, **given)

    monkeypatch.setattr("training.update.run_pairs", read)
    run(config, tmp_path, policy, lambda step: play(policy, step)[: 32 if step == 0 else 16])
    first, second, alone = teachers
    assert first is second and same(weights(first), start)
    assert alone is None  # with one update the weights that are read are those of the rollout


def test_the_projector_is_in_the_checkpoint_and_not_in_the_model(tmp_path: Path) -> None:
    run(replace(pr_opd(), steps=1), tmp_path / "with")
    run(replace(pr_opd(projector=False), steps=1), tmp_path / "without")
    assert (tmp_path / "with/checkpoints/step_1/modules.safetensors").is_file()
    assert not (tmp_path / "without/checkpoints/step_1/modules.safetensors").exists()
    assert last(tmp_path / "without")["loss/pr_opd"] < 2  # raw cosine, not a random projection
    exported = type(model()).from_pretrained(tmp_path / "with/checkpoints/step_1")
    assert exported.state_dict().keys() == model().state_dict().keys()


def test_the_projector_starts_from_the_seed_and_leaves_the_global_generator(tmp_path: Path) -> None:
    config = replace(pr_opd(), steps=1)
    torch.manual_seed(1)
    run(config, tmp_path / "a", model())
    torch.manual_seed(2)
    policy = model()
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    run(config, tmp_path / "b", policy)
    assert torch.equal(before, torch.random.get_rng_state())
    a, b = (tmp_path / name / "checkpoints/step_1/modules.safetensors" for name in "ab")
    assert a.read_bytes() == b.read_bytes()


def test_b34_no_distilled_token_is_said_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run(replace(pr_opd(), steps=1), tmp_path, write_skills_fn=lambda trajectories, step: {})
    assert last(tmp_path)["distill/tokens"] == 0 and last(tmp_path)["distill/no_skill"] == 32
    assert "no token is distilled" in caplog.text


def test_b32_a_skill_too_long_leaves_the_row_to_the_reward(tmp_path: Path) -> None:
    policy = model()
    policy.config.max_position_embeddings = 300

    def long(trajectories: Any, step: int) -> Any:
        skills = write_skills(trajectories, step)
        return {k: replace(s, text=s.text * 20) if k.endswith("0") else s for k, s in skills.items()}

    run(replace(pr_opd(), steps=1), tmp_path, policy, write_skills_fn=long)
    row = last(tmp_path)
    assert (row["distill/too_long"], row["distill/paired"], row["distill/tokens"], row["tokens/train"]) == (
        4,
        28,
        28,
        32,
    )


def test_branch_takes_weights_moments_and_reference(tmp_path: Path) -> None:
    origin = run(CONFIG, tmp_path / "origin")
    checkpoint = tmp_path / "origin/checkpoints/step_4"
    config = replace(pr_opd(), steps=1, init_from=str(checkpoint))
    still = run(optim(config, lr=0.0, weight_decay=0.0), tmp_path / "still", model(seed=5))
    assert same(weights(origin), weights(still))
    assert last(tmp_path / "still")["step"] == 1
    kept = (tmp_path / name / "reference/model.safetensors" for name in ("origin", "still"))
    assert next(kept).read_bytes() == next(kept).read_bytes()
    assert last(tmp_path / "still")["loss/kl"] > 0  # from the origin's start, not from the branch's
    fresh = run(replace(config, init_from=None), tmp_path / "fresh", origin)
    branched = run(config, tmp_path / "branched", model(seed=5))
    assert not same(weights(fresh), weights(branched))  # the moments of the optimiser came along


def test_evaluation(tmp_path: Path) -> None:
    config = replace(CONFIG, steps=3, eval=replace(CONFIG.eval, every=2))
    seen: list[int] = []

    def evaluate(step: int) -> dict[str, float]:
        seen.append(step)
        return {"eval/success": step / 10}

    run(config, tmp_path, evaluate_fn=evaluate)
    assert seen == [0, 2, 3]
    assert [row.get("eval/success") for row in read_metrics(tmp_path)] == [0.0, None, 0.2, 0.3]


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (pr_opd(), {"write_skills_fn": None}, "needs hindsight skills at step 0"),
        (pr_opd(layers=(5,)), {}, "layer 5 does not exist"),
        (replace(CONFIG, method="pr_odp"), {}, "did you mean 'pr_opd'"),
    ],
)
def test_refusals(tmp_path: Path, config: Any, given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(config, tmp_path, **given)


def test_another_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    run(replace(CONFIG, steps=2), tmp_path)
    with pytest.raises(ValueError, match="method 'grpo', not 'pr_opd'"):
        run(pr_opd(), tmp_path)


def test_half_precision_weights_are_refused_and_bfloat16_forward_is_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not float32"):
        run(CONFIG, tmp_path / "half", model().bfloat16(), rollout=lambda step: [])
    policy = model()
    config = replace(pr_opd(), steps=1, model=replace(CONFIG.model, dtype="bfloat16"))
    run(config, tmp_path / "cast", policy)
    assert 1e-5 < last(tmp_path / "cast")["kl/rollout_train"] < 0.5


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    policy = model()
    played = play(policy, 0)
    with torch.no_grad():
        policy.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="gradient norm of the model is nan at step 0"):
        run(replace(CONFIG, steps=1), tmp_path, policy, lambda step: played)
