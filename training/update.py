"""One optimiser update: forward passes of a mini-batch of rows, micro-batch by micro-batch, and an AdamW step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from diagnostics.paired import PairedPass, run_pairs
from training.batch import Batch, Row, collate, denominators, micro_batches, take_tokens
from training.checkpoint import Learned
from training.config import Config
from training.method import Method, Needs
from training.monitor import Means, state_metrics
from training.objective import objective

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
    step: int = 0  # steps done
    update: int = 0  # updates done


def generator(seed: int, step: int, stream: int = 0) -> torch.Generator:
    """The random numbers of one purpose (`stream`) in one step."""
    state = np.random.SeedSequence([seed, step, stream]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> 1))


def score(learner: Learner, needs: Needs, batches: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """Adds the log-probs that stay fixed during a step, read by this engine with the weights of its start.

    The reference's where there is a KL term; the policy's own where there are several updates (with one they equal
    the student's, detached).
    """
    anchored = bool(needs.reward_coefficient and learner.config.objective.kl_coefficient)
    scored = []
    for rows in batches:
        reference = _read(learner, learner.reference, rows) if anchored else [None] * len(rows)
        old = _read(learner, learner.learned.model, rows) if len(batches) > 1 else [None] * len(rows)
        triples = zip(rows, old, reference, strict=True)
        scored.append([replace(row, old_logprobs=b, reference_logprobs=r) for row, b, r in triples])
    return scored


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
        with _precision(config, device):
            pair = run_pairs(
                learned.model,
                [row.pair for row in part],
                temperature=config.sampler.temperature,
                states=needs.states and distilled,
                teacher=distilled,
                teacher_model=learner.reference if needs.teacher == "initial" else None,
                student_grad=True,
                entropy=bool(needs.reward_coefficient and config.objective.entropy_coefficient),
            )
        if batch.old_logprobs is None:
            batch = replace(batch, old_logprobs=pair.student_logprobs.detach())
        arguments = (batch, pair, learner.method_config, learner.step)
        terms = method.loss(*arguments, learned.modules) if method.loss and distilled else []
        advantages = method.advantage(*arguments) if method.advantage else None
        result = objective(batch, pair, config.objective, needs, terms, advantages)
        if result.loss.requires_grad:
            result.loss.backward()
            learns = True
        means.add({**result.metrics, **state_metrics(pair, batch.distilled)})
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
        objective(batch, pair, learner.config.objective, replace(needs, reward_coefficient=0.0), terms).loss.backward()
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


def _read(learner: Learner, model: Any, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
    config = learner.config
    with _precision(config, next(model.parameters()).device):
        result = run_pairs(
            model,
            [row.pair for row in rows],
            temperature=config.sampler.temperature,
            teacher=False,
            micro_batch_tokens=config.optim.micro_batch_tokens,
        )
    return result.student_logprobs.cpu().split([row.n_tokens for row in rows])


def _cached(batch: Batch, pair: PairedPass, generator: torch.Generator) -> tuple[Batch, PairedPass]:
    index = batch.distilled.nonzero()[:, 0]
    index = index[torch.randperm(len(index), generator=generator)[:CACHED_TOKENS].to(index.device)]
    batch, pair = take_tokens(batch, pair, index)
    scale = torch.full_like(batch.distill_scale, 1 / len(index))  # a mean over these tokens: gradients of the same size
    return replace(batch, distill_scale=scale, n_distilled=len(index)), pair


def _precision(config: Config, device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16, enabled=config.model.dtype == "bfloat16")
