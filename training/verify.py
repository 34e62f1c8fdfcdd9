"""Worked numbers on the user's own machine: every method of a golden file, recomputed on a device and in a precision.

A golden file holds inputs (arrays [trajectory, token] in nats, rewards of one group, states [layer, token, d]) and, by
name, answers: losses, gradients, weights, advantages. They are recomputed by what training calls, METHOD.loss or
METHOD.advantage and the objective; only the model is missing.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from diagnostics.paired import PairedPass
from training.advantages import centred_returns, group_advantages
from training.batch import Batch, Denominators
from training.config import ObjectiveConfig
from training.method import Needs, load_method
from training.objective import objective

Dtype = Literal["float32", "float64", "bfloat16"]
# Of bfloat16 the inputs keep 8 bits (a log-prob of 2 nats is off by 0.004), of which gates and trends read differences;
# the arithmetic is float32 again.
TOLERANCE: dict[str, float] = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 0.05}
ARRAYS = ("student", "teacher", "rollout", "reference", "student_entropy", "mask", "turn")
PLAIN = ObjectiveConfig(kl_coefficient=0.0, entropy_coefficient=0.0)


@dataclass(frozen=True)
class Deviation:
    """How far an answer is off: the largest |ours - theirs| over the largest |theirs|, of any of its arrays."""

    name: str
    value: float | None  # losses, weights, advantages, counts; None: the file has none of these
    gradient: float | None

    def within(self, tolerance: float) -> bool:
        """Whether both are; what is not a number is not."""
        return all(off <= tolerance for off in (self.value, self.gradient) if off is not None)


@dataclass(frozen=True, eq=False)
class Given:
    """Tokens as training holds them, flat, those outside the mask included; `leaf` is what gradients are taken of."""

    batch: Batch
    pair: PairedPass
    leaf: Tensor


def verify(file: str | Path, device: str = "cpu", dtype: Dtype = "float64") -> list[Deviation]:
    """Every answer of a golden file against ours.

    Source: ours. Args: device, of torch; dtype, of log-probs and states (how losses raise it is theirs).
    Returns: one deviation an answer, in the file's order, to be held against TOLERANCE[dtype].
    Raises: ValueError when the file is no golden file or has an answer that is not known, or there is no such device.
    """
    try:
        place = torch.zeros(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch raises both
        raise ValueError(f"--device is {device!r}, which torch cannot use here; use --device cpu") from error
    inputs, answers = _read(Path(file))
    found = []
    for name, answer in answers.items():
        try:
            off = _offs(CHECKS[name](Inputs(inputs, place, getattr(torch, dtype)), answer), _flat(answer))
        except (KeyError, TypeError, AttributeError, ValueError) as error:  # what a wrong number in a file can cause
            raise ValueError(f"{file}: {name!r} cannot be compared ({type(error).__name__}: {error})") from error
        gradients = [value for key, value in off.items() if "grad" in key]
        found.append(Deviation(name, _worst([v for key, v in off.items() if "grad" not in key]), _worst(gradients)))
    return found


@dataclass(frozen=True)
class Inputs:
    """A file's inputs, where and how they are computed with."""

    arrays: Mapping[str, Any]
    device: torch.device
    dtype: torch.dtype

    def narrow(self, values: Any) -> Tensor:
        """What a model gives."""
        return torch.tensor(values, dtype=torch.float64).to(self.device, self.dtype)

    def wide(self, values: Any) -> Tensor:
        """What training itself makes, float32 at least."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return torch.as_tensor(values, dtype=torch.float64).to(self.device, dtype)

    def returns(self) -> Tensor:
        return torch.tensor(self.arrays["rewards"], dtype=torch.float64)

    def tokens(self, reduction: str = "token_mean", arrays: Mapping[str, Any] | None = None) -> Given:
        """All tokens of all trajectories, one mini-batch. Args: arrays, in place of the file's, of no reward."""
        values = {name: self.narrow((arrays or self.arrays)[name]) for name in ARRAYS}
        mask = values["mask"].bool()
        rows = torch.arange(len(mask), device=self.device)[:, None].expand_as(mask).flatten()
        counts = Counter({row: int(n) for row, n in enumerate(mask.sum(1)) if n})
        of = Denominators(counts, counts, reduction)
        scale = self.wide([of.scale(row) for row in range(len(mask))])[rows]
        group = torch.zeros(len(mask), dtype=torch.long)
        returns = torch.zeros(len(mask), dtype=torch.float64) if arrays else self.returns()
        flat = {name: value.flatten() for name, value in values.items()}
        batch = Batch(
            row=rows,
            trajectory=rows,
            turn=flat["turn"].long(),
            token_class=torch.ones_like(rows),
            mask=mask.flatten(),
            distilled=mask.flatten(),
            advantages=self.wide(group_advantages(returns, group))[rows],
            centred=self.wide(centred_returns(returns, group))[rows],
            rollout_logprobs=flat["rollout"],
            old_logprobs=flat["rollout"],
            reference_logprobs=flat["reference"],
            scale=scale,
            distill_scale=scale,
            n_tokens=counts.total(),
            n_distilled=counts.total(),
        )
        student = flat["student"].clone().requires_grad_()
        pair = PairedPass(
            row=rows,
            has_teacher=batch.mask,
            student_logprobs=student,
            student_entropy=flat["student_entropy"],
            teacher_logprobs=flat["teacher"],
        )
        return Given(batch, pair, student)

    def states(self) -> Given:
        """The states of a few tokens of one trajectory, all inside the mask."""
        student = self.narrow(self.arrays["projected_student_states"]).requires_grad_()
        n = student.shape[1]
        rows = {name: [[1.0 if name == "mask" else 0.0] * n] for name in ARRAYS}
        given = self.tokens(arrays=rows)
        teacher = self.narrow(self.arrays["teacher_states"])
        pair = replace(given.pair, student_states=student, teacher_states=teacher)
        return Given(given.batch, pair, student)


# --- what is recomputed: each takes the inputs and the file's answer, gives our arrays by the names of the file's ----


def _objective(given: Given, needs: Needs, *arguments: Any, config: ObjectiveConfig = PLAIN) -> dict[str, Tensor]:
    result = objective(given.batch, given.pair, config, needs, *arguments)
    gradient = torch.autograd.grad(result.loss, given.leaf)[0]
    counts = {name: torch.as_tensor(total) for name, (total, _) in result.metrics.items()}
    return {"loss_token_mean": result.loss, "grad": gradient, **counts}


def _grpo(inputs: Inputs, answer: Any) -> dict[str, Tensor]:
    made = _objective(inputs.tokens(), Needs())
    counts = {"clipped_tokens": made["policy/clip_share"], "dual_clipped_tokens": made["policy/dual_clip_share"]}
    return made | counts


def _kl(inputs: Inputs, answer: Any) -> dict[str, Tensor]:
    config = replace(PLAIN, kl_coefficient=1.0)
    return _objective(inputs.tokens(), Needs(policy_coefficient=0.0), config=config)


def _term(given: Given, method_name: str, **settings: Any) -> dict[str, Tensor]:
    """A method's own terms with coefficient 1 and nothing beside them; also value and weight of each token."""
    method = load_method(method_name)
    assert method.loss is not None
    config = method.config(coefficient=1.0, **settings)
    needs = replace(method.needs(config, 0), policy_coefficient=0.0, regularised=False)
    terms = method.loss(given.batch, given.pair, config, 0, None)
    weight = torch.ones_like(terms[0].value) if terms[0].weight is None else terms[0].weight
    tokens = {"value": terms[0].value, "weight": torch.where(given.batch.mask, weight, 0.0)}
    return _objective(given, needs, terms) | tokens


def _sdar(inputs: Inputs, answer: Any) -> dict[str, Tensor]:
    made, by_sequence = _term(inputs.tokens(), "sdar"), _term(inputs.tokens("sequence_mean"), "sdar")
    gates = {kind: _term(inputs.tokens(), "sdar", gate=kind)["weight"] for kind in ("entropy", "soft_or", "hard")}
    return {
        **made,
        "gate": made["weight"],
        "loss_sequence_mean": by_sequence["loss_token_mean"],
        **{f"other_gates/{kind}": weight for kind, weight in gates.items()},
    }


def _grpo_opsd(inputs: Inputs, answer: Any) -> dict[str, Tensor]:
    forms = {form: _term(inputs.tokens(), "grpo_opsd", form=form) for form in ("paper", "code")}
    return {f"{form}_{name}": value for form, made in forms.items() for name, value in made.items()}


def _pcsd(inputs: Inputs, answer: Any) -> dict[str, Tensor]:
    return _term(inputs.tokens(), "pcsd", **answer["config"])


def _skill_sd(inputs: Inputs, answer: Any) -> dict[str, Tensor]:
    made = _term(inputs.tokens(), "skill_sd")
    if token := answer.get("clamped_token"):
        alone = {name: [[token.get(name, float(name == "mask"))]] for name in ARRAYS}
        one = _term(inputs.tokens(arrays=alone), "skill_sd")
        made |= {"clamped_token/value": one["loss_token_mean"], "clamped_token/grad": one["grad"]}
    return made


def _opd(inputs: Inputs, answer: Any) -> dict[str, Tensor]:
    given = inputs.tokens()
    made = _term(given, "opd")
    return made | {"advantage": -made["grad"] * given.batch.mask.sum()}  # what pushes a token up


def _alignment(inputs: Inputs, answer: Any) -> dict[str, Tensor]:
    given = inputs.states()
    made = _term(given, "pr_opd", start_step=0, projector=False)
    layers = [
        _term(inputs.states(), "pr_opd", start_step=0, projector=False, layers=(layer,))["value"]
        for layer in range(len(given.leaf))
    ]
    return {"loss": made["loss_token_mean"], "grad_projected": made["grad"], "per_layer_token": torch.stack(layers)}


def _advantage(method_name: str, **settings: Any) -> Callable[[Inputs, Any], dict[str, Tensor]]:
    """The advantage of a method, and the surrogate under it."""

    def check(inputs: Inputs, answer: Any) -> dict[str, Tensor]:
        given, method = inputs.tokens(), load_method(method_name)
        assert method.advantage is not None
        advantages = method.advantage(given.batch, given.pair, method.config(**settings), 0)
        inside = torch.where(given.batch.mask, advantages, 0.0)
        return _objective(given, Needs(), (), advantages) | {"advantage": inside}

    return check


def _group(inputs: Inputs, answer: Any) -> dict[str, Tensor]:
    returns = inputs.returns()
    return {"": inputs.wide(group_advantages(returns, torch.zeros(len(returns), dtype=torch.long)))}


CHECKS: dict[str, Callable[[Inputs, Any], dict[str, Tensor]]] = {
    "advantage_ddof1": _group,
    "grpo": _grpo,
    "kl_k3": _kl,
    "sdar": _sdar,
    "grpo_opsd": _grpo_opsd,
    "pcsd": _pcsd,
    "skill_sd": _skill_sd,
    "rlsd": _advantage("rlsd"),
    "sod": _advantage("sod"),
    "opid_episode": _advantage("opid", step_coefficient=0.0),
    "opd_policy_gradient": _opd,
    "pr_opd_alignment": _alignment,
}
NOT_OURS = ("advantage_ddof0",)  # in the file as a contrast


# --- files -----------------------------------------------------------------------------------------------------------


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        inputs, answers = document["inputs"], dict(document["answers"])
        shapes = {name: [len(row) for row in inputs[name]] for name in ARRAYS}
        shapes["rewards"] = shapes["student"][: len(inputs["rewards"])]
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        needed = ", ".join((*ARRAYS, "rewards"))
        raise ValueError(f"{file} is no golden file: it needs `answers`, and `inputs` with {needed}") from error
    for name, shape in shapes.items():
        if shape != shapes["student"] or len(set(shape)) != 1:
            raise ValueError(f"{file}: input {name!r} does not fit 'student', an array [trajectory, token]")
    for name in NOT_OURS:
        answers.pop(name, None)
    for name in answers:
        if name not in CHECKS:
            near = difflib.get_close_matches(name, CHECKS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(CHECKS)}"
            raise ValueError(f"{file}: unknown answer {name!r}; {hint}")
    if not answers:
        raise ValueError(f"{file} has no answers to compare with; known are {', '.join(CHECKS)}")
    return inputs, answers


def _flat(answer: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as `a/b`; a bare array under its prefix."""
    if not isinstance(answer, Mapping):
        return {prefix: answer}
    parts = [_flat(value, f"{prefix}/{key}".lstrip("/")) for key, value in answer.items() if key != "config"]
    return {key: value for part in parts for key, value in part.items()}


def _offs(ours: Mapping[str, Tensor], theirs: Mapping[str, Any]) -> dict[str, float]:
    """Deviation of each array that both have."""
    found = {}
    for key in theirs:
        if key not in ours:
            continue
        exact = ours[key].detach().double().cpu().flatten()
        expected = torch.tensor(theirs[key], dtype=torch.float64).flatten()
        if len(exact) != len(expected):
            raise ValueError(f"{key} has {len(expected)} entries, the inputs give {len(exact)}")
        found[key] = float((exact - expected).abs().max()) / (float(expected.abs().max()) or 1.0)
    if not found:
        raise ValueError(f"it holds none of {', '.join(key for key in ours if '/' not in key)}")
    return found


def _worst(deviations: Sequence[float]) -> float | None:
    """The largest; nan when one is (Python's own max would lose it)."""
    return float(torch.tensor(deviations, dtype=torch.float64).max()) if deviations else None
