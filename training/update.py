"""One optimiser update: forward passes of a mini-batch of rows, micro-batch by micro-batch, and an AdamW step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from diagnostics.paired import PairedPass, PairedSegment, run_pairs
from training.batch import Batch, Row, collate, denominators, micro_batches, take_tokens
from training.checkpoint import Learned
from training.config import Config
from training.dynamics import gap_metrics
from training.method import Method, Needs
from training.monitor import Means, state_metrics
from training.objective import objective
from training.skills.step_level import StepPair, place_steps

CACHED_TOKENS = 1024  # kept of a micro-batch for the extra updates: few enough to hold every layer's states

Cache = list[tuple[Batch, PairedPass]]  # detached


@dataclass
class Learner:
    """A run in memory: what is trained, by what, and how far it is."""

    config: Config
    method: Method
    method_config: Any
    learned: Learned
    reference: Any  # KL anchor and the "initial" teacher; None where nothing needs it
    frozen: Any = None  # the policy as it was at rollout time, where an update reads it
    step: int = 0  # steps done
    update: int = 0  # updates done


def generator(seed: int, step: int, stream: int = 0) -> torch.Generator:
    """The random numbers of one purpose (`stream`) in one step."""
    state = np.random.SeedSequence([seed, step, stream]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> 1))


def score(learner: Learner, needs: Needs, rows: Sequence[Row], updates: int) -> list[Row]:
    """Adds what stays fixed during a step, read by this engine with the weights of its start; then the advantages.

    The reference's log-probs where there is a KL term; the policy's own where there are several updates (with one they
    equal the student's, detached) or a method's advantage asks for them; a rollout-time or initial teacher's.
    """
    config, method = learner.config, learner.method
    model, nothing = learner.learned.model, [None] * len(rows)
    anchored = needs.regularised and config.objective.kl_coefficient
    reference = _read(learner, learner.reference, rows) if anchored else nothing
    asked = method.advantage is not None and needs.teacher_logprobs
    old = _read(learner, model, rows) if updates > 1 or asked else nothing
    teacher: Sequence[Any] = nothing
    if fixed_teacher(needs):
        reader = learner.reference if needs.teacher == "initial" else model
        teacher = _read(learner, reader, [replace(row, pair=as_student(row.pair)) for row in rows])
    learner.frozen = None  # that of an earlier step is not this step's
    if needs.teacher == "rollout" and not fixed_teacher(needs) and updates > 1:
        learner.frozen = copy.deepcopy(model).requires_grad_(False)
    scored = [
        replace(row, old_logprobs=b, reference_logprobs=r, teacher_logprobs=q)
        for row, b, r, q in zip(rows, old, reference, teacher, strict=True)
    ]
    return scored if method.advantage is None or not rows else _with_advantages(learner, scored)


def read_steps(learner: Learner, rows: Sequence[Row], steps: Sequence[StepPair]) -> list[Row]:
    """Adds what the policy, at the start of a step, makes of the turns that have a skill of their own."""
    pairs = [as_student(step.pair) for step in steps]
    read = torch.cat(list(_log_probs(learner, learner.learned.model, pairs))) if pairs else torch.zeros(0)
    placed = place_steps(steps, read, [row.n_tokens for row in rows])
    return [
        replace(row, step_teacher_logprobs=q, step_distilled=mask) for row, (q, mask) in zip(rows, placed, strict=True)
    ]


def fixed_teacher(needs: Needs) -> bool:
    """Whether the teacher's log-probs can be read once a step: its weights stay, and nothing else of it is needed."""
    alone = needs.states == "none" and needs.divergence == "none"
    return needs.teacher_logprobs and alone and needs.teacher in ("rollout", "initial")


def as_student(pair: PairedSegment) -> PairedSegment:
    """The teacher's context in the student's place; the student's own where there is no teacher."""
    if pair.teacher_ids is None or pair.teacher_positions is None:
        return pair
    return replace(pair, student_ids=pair.teacher_ids, student_positions=pair.teacher_positions)


def _with_advantages(learner: Learner, rows: list[Row]) -> list[Row]:
    """The method's per-token advantages, over all rows of the step at once."""
    assert learner.method.advantage is not None
    config = learner.config
    batch = collate(rows, denominators(rows, config.objective.reduction), torch.device("cpu"))
    old = batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs
    pair = PairedPass(batch.row, batch.distilled, old, teacher_logprobs=batch.teacher_logprobs)
    advantages = learner.method.advantage(batch, pair, learner.method_config, learner.step)
    parts = advantages.split([row.n_tokens for row in rows])
    return [replace(row, advantages=part) for row, part in zip(rows, parts, strict=True)]


def update(learner: Learner, needs: Needs, rows: Sequence[Row], means: Means, cache: Cache) -> None:
    """One AdamW update from a mini-batch. Adds its metrics to `means`, and to `cache` what extra_updates reads.

    The loss of a micro-batch is its share of the mini-batch's, so gradients add up to those of one large batch. The
    method's modules have their own optimiser, learning rate and gradient clip: a large gradient in one never shrinks
    the step of the other.
    Raises: FloatingPointError when a gradient is not finite; the weights are those before the update.
    """
    config, method, learned = learner.config, learner.method, learner.learned
    device = next(learned.model.parameters()).device
    of = denominators(rows, config.objective.reduction)
    learns = False
    for _, _, optimizer in learned.parts:
        optimizer.zero_grad(set_to_none=True)
    for part in micro_batches(rows, config.optim.micro_batch_tokens):
        batch = collate(part, of, device)
        distilled = bool(batch.distilled.any())
        live = distilled and needs.teacher != "none" and not fixed_teacher(needs)
        with _precision(config, device):
            pair = run_pairs(
                learned.model,
                [row.pair for row in part],
                temperature=config.sampler.temperature,
                states=needs.states if distilled else "none",
                teacher=live,
                teacher_model=_teacher(learner, needs),
                student_grad=True,
                entropy=bool(needs.entropy or (needs.regularised and config.objective.entropy_coefficient)),
                divergence=needs.divergence if live else "none",
            )
        if batch.old_logprobs is None:
            batch = replace(batch, old_logprobs=pair.student_logprobs.detach())
        if batch.teacher_logprobs is not None:
            pair = replace(pair, teacher_logprobs=batch.teacher_logprobs)
        arguments = (batch, pair, learner.method_config, learner.step)
        terms = method.loss(*arguments, learned.modules) if method.loss and distilled else []
        result = objective(batch, pair, config.objective, needs, terms)
        if result.loss.requires_grad:
            result.loss.backward()
            learns = True
        means.add({**result.metrics, **gap_metrics(batch, pair), **state_metrics(pair, batch.distilled)})
        if distilled and learned.modules is not None and learned.modules.extra_updates:
            cache.append(_cached(batch, pair, generator(config.seed, learner.step, 1 + len(cache))))
    if not learns:
        return
    warm = min(1.0, (learner.step + 1) / max(config.optim.warmup_steps, 1))
    learned.optimizer.param_groups[0]["lr"] = config.optim.lr * warm
    for name, norm in _clip_and_step(learner).items():
        means.add({f"optim/grad_norm/{name}": (torch.tensor(norm), 1.0)})
    learner.update += 1


def extra_updates(learner: Learner, needs: Needs, cache: Cache) -> None:
    """Further updates of the method's modules alone, on states the step has already read (no forward of the model).

    A recipe of few updates a step asks for them: a projector that starts at random would otherwise still be random
    when the run ends, and the method silently do nothing.
    """
    learned, method = learner.learned, learner.method
    if not cache or method.loss is None or learned.module_optimizer is None:
        return
    for index in range(learned.modules.extra_updates):
        batch, pair = cache[index % len(cache)]
        learned.module_optimizer.zero_grad(set_to_none=True)
        terms = method.loss(batch, pair, learner.method_config, learner.step, learned.modules)
        alone = replace(needs, policy_coefficient=0.0, regularised=False)
        objective(batch, pair, learner.config.objective, alone, terms).loss.backward()
        _clip_and_step(learner, only="modules")


def _clip_and_step(learner: Learner, only: str | None = None) -> dict[str, float]:
    parts = [part for part in learner.learned.parts if only in (None, part[0])]
    norms = {}
    for name, module, _ in parts:
        norms[name] = float(torch.nn.utils.clip_grad_norm_(module.parameters(), learner.config.optim.grad_clip))
        if not np.isfinite(norms[name]):
            raise FloatingPointError(
                f"gradient norm of the {name} is {norms[name]} at step {learner.step}, update {learner.update}; the "
                "run can go on from its last checkpoint with a smaller learning rate"
            )
    for _, _, optimizer in parts:
        optimizer.step()
    return norms


def _teacher(learner: Learner, needs: Needs) -> Any:
    """Weights that read the teacher's contexts in an update; None: the student's."""
    return {"initial": learner.reference, "rollout": learner.frozen}.get(needs.teacher)


def _read(learner: Learner, model: Any, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
    return _log_probs(learner, model, [row.pair for row in rows]) if rows else []


def _log_probs(learner: Learner, model: Any, pairs: Sequence[PairedSegment]) -> Sequence[torch.Tensor]:
    """Log-probs of the response tokens in the student's contexts, pair by pair."""
    config = learner.config
    with _precision(config, next(model.parameters()).device):
        result = run_pairs(
            model,
            pairs,
            temperature=config.sampler.temperature,
            teacher=False,
            micro_batch_tokens=config.optim.micro_batch_tokens,
        )
    return result.student_logprobs.cpu().split([len(pair.response_ids) for pair in pairs])


def _cached(batch: Batch, pair: PairedPass, generator: torch.Generator) -> tuple[Batch, PairedPass]:
    index = batch.distilled.nonzero()[:, 0]
    index = index[torch.randperm(len(index), generator=generator)[:CACHED_TOKENS].to(index.device)]
    batch, pair = take_tokens(batch, pair, index)
    scale = torch.full_like(batch.distill_scale, 1 / len(index))  # a mean over these tokens: gradients of the same size
    return replace(batch, distill_scale=scale, n_distilled=len(index)), pair


def _precision(config: Config, device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16, enabled=config.model.dtype == "bfloat16")
