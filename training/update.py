"""The local engine: forward passes of a mini-batch of rows, micro-batch by micro-batch, and an AdamW step.

A worker of the cluster holds a Learner too: only how its weights lie (`Learner.lying`) is another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diagnostics.forward import Reading, read_contexts
from diagnostics.paired import PairedPass, PairedSegment, run_pairs
from training.batch import Batch, Denominators, Row, collate, denominators, micro_batches, take_tokens
from training.checkpoint import Learned, save_checkpoint
from training.config import Config
from training.dynamics import gap_metrics
from training.engine import Reader, fixed_teacher, generator
from training.method import Method, Needs
from training.monitor import Means, state_metrics
from training.objective import Objective, objective

CACHED_TOKENS = 1024  # kept of a micro-batch for the extra updates: few enough to hold every layer's states

Cache = list[tuple[Batch, PairedPass]]  # detached


class Whole:
    """How weights lie: all of them in this process. training/cluster/sharded.py has the other way."""

    processes = 1

    def read(self, model: Any, *contexts: Any, **options: Any) -> Reading:
        """One forward: read_contexts with whatever has to be done around it."""
        return read_contexts(model, *contexts, **options)

    def device(self, model: Any) -> torch.device:
        """Where a forward computes."""
        return next(model.parameters()).device

    def copy(self, model: Any) -> Any:
        """The weights as they are now, to be read later."""
        return copy.deepcopy(model).requires_grad_(False)

    def alike(self, parts: list[list[Row]]) -> list[list[Row]]:
        """Micro-batches, as many in every process."""
        return parts

    def clip(self, parameters: Sequence[Tensor], limit: float) -> float:
        """Clips the norm of the gradients of all processes; returns it as it was."""
        return float(torch.nn.utils.clip_grad_norm_(parameters, limit))

    def clip_modules(self, parameters: Sequence[Tensor], limit: float) -> float:
        """The same for parameters that every process holds."""
        return self.clip(parameters, limit)


@dataclass
class Learner:
    """A run in memory: what is trained, by what, and how far it is. An Engine (training/engine.py)."""

    config: Config
    method: Method
    method_config: Any
    learned: Learned
    reference: Any  # KL anchor and the "initial" teacher; None where nothing needs it
    frozen: Any = None  # the policy as it was at rollout time, where an update reads it
    step: int = 0  # steps done
    update: int = 0  # updates done
    lying: Whole = field(default_factory=Whole)
    cache: Cache = field(default_factory=list)  # what the extra updates of this step read

    @property
    def longest(self) -> int:
        return int(self.learned.model.config.max_position_embeddings)

    def log_probs(self, reader: Reader, pairs: Sequence[PairedSegment]) -> Sequence[Tensor]:
        model = self.reference if reader == "reference" else self.learned.model
        return log_probs(self, model, pairs) if pairs else []

    def freeze(self, keep: bool) -> None:
        self.frozen = self.lying.copy(self.learned.model) if keep else None  # that of an earlier step is forgotten

    def learn(self, needs: Needs, rows: Sequence[Row], means: Means) -> None:
        self.clear()
        if accumulate(self, needs, rows, denominators(rows, self.config.objective.reduction), means):
            take_step(self, means)

    def finish(self, needs: Needs) -> None:
        extra_updates(self, needs)

    def save(self, run: Path, tokenizer: Any, state: Mapping[str, Any]) -> None:
        seeds = [self.config.seed]
        save_checkpoint(run, self.step, self.learned, tokenizer, state, config=self.config, seeds=seeds)

    def clear(self) -> None:
        """Forget the gradients."""
        for _, _, optimizer in self.learned.parts:
            optimizer.zero_grad(set_to_none=True)


LossFn = Callable[[Learner, Needs, Batch, PairedPass], Objective]


def method_loss(learner: Learner, needs: Needs, batch: Batch, pair: PairedPass) -> Objective:
    """The reward objective and the method's terms of one micro-batch."""
    method, distilled = learner.method, bool(batch.distilled.any())
    terms = []
    if method.loss and distilled:
        terms = method.loss(batch, pair, learner.method_config, learner.step, learner.learned.modules)
    return objective(batch, pair, learner.config.objective, needs, terms)


def accumulate(
    learner: Learner,
    needs: Needs,
    rows: Sequence[Row],
    of: Denominators,
    means: Means,
    loss_fn: LossFn = method_loss,
) -> bool:
    """Adds the gradients of a mini-batch (or of one process' rows of it), and its metrics to `means`.

    The loss of a micro-batch is its share of the mini-batch's, so gradients add up to those of one large batch.
    Args: of, the denominators of the whole mini-batch; loss_fn, the loss of one micro-batch.
    Returns: whether there is anything to learn from.
    """
    learns = False
    processes = learner.lying.processes  # their gradients are averaged
    for part in learner.lying.alike(micro_batches(rows, learner.config.optim.micro_batch_tokens)):
        batch, pair = _read_part(learner, needs, part, of)
        result = loss_fn(learner, needs, batch, pair)
        loss = result.loss
        learns |= loss.requires_grad
        if processes > 1:  # every process walks back through all weights, also with no token of its own
            loss = processes * loss + pair.student_logprobs[:0].sum()
        if loss.requires_grad:
            loss.backward()
        means.add({**result.metrics, **gap_metrics(batch, pair), **state_metrics(pair, batch.distilled)})
        modules = learner.learned.modules
        if batch.distilled.any() and modules is not None and modules.extra_updates:
            stream = generator(learner.config.seed, learner.step, 1 + len(learner.cache))
            learner.cache.append(_cached(batch, pair, stream))
    return learns


def _read_part(learner: Learner, needs: Needs, part: Sequence[Row], of: Denominators) -> tuple[Batch, PairedPass]:
    """A micro-batch and what the student, and a teacher that is not fixed, make of it."""
    config, learned = learner.config, learner.learned
    device = learner.lying.device(learned.model)
    batch = collate(part, of, device)
    # all processes alike: where any row of the mini-batch has a teacher, each reads one (a row without: the student's)
    distilled = bool(batch.distilled.any()) or (learner.lying.processes > 1 and bool(of.distilled.total()))
    live = distilled and needs.teacher != "none" and not fixed_teacher(needs)
    with precision(config, device):
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
            read_with=learner.lying.read,
        )
    if batch.old_logprobs is None:
        batch = replace(batch, old_logprobs=pair.student_logprobs.detach())
    if batch.teacher_logprobs is not None:
        pair = replace(pair, teacher_logprobs=batch.teacher_logprobs)
    return batch, pair


def take_step(learner: Learner, means: Means) -> None:
    """One AdamW update from the gradients that have been added up.

    The method's modules have their own optimiser, learning rate and gradient clip: a large gradient in one never
    shrinks the step of the other.
    Raises: FloatingPointError when a gradient is not finite; the weights are those before the update.
    """
    config = learner.config
    warm = min(1.0, (learner.step + 1) / max(config.optim.warmup_steps, 1))
    learner.learned.optimizer.param_groups[0]["lr"] = config.optim.lr * warm
    for name, norm in _clip_and_step(learner).items():
        means.add({f"optim/grad_norm/{name}": (torch.tensor(norm), 1.0)})
    learner.update += 1


def extra_updates(learner: Learner, needs: Needs) -> None:
    """Further updates of the method's modules alone, on states the step has already read (no forward of the model).

    A recipe of few updates a step asks for them: a projector that starts at random would otherwise still be random
    when the run ends, and the method silently do nothing.
    """
    learned, method = learner.learned, learner.method
    cache, learner.cache = learner.cache, []
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
        clip = learner.lying.clip_modules if name == "modules" else learner.lying.clip
        norms[name] = clip(list(module.parameters()), learner.config.optim.grad_clip)
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


def log_probs(learner: Learner, model: Any, pairs: Sequence[PairedSegment]) -> Sequence[Tensor]:
    """Log-probs of the response tokens in the student's contexts, pair by pair."""
    config = learner.config
    with precision(config, next(model.parameters()).device):
        result = run_pairs(
            model,
            pairs,
            temperature=config.sampler.temperature,
            teacher=False,
            micro_batch_tokens=config.optim.micro_batch_tokens,
        )
    return result.student_logprobs.cpu().split([len(pair.response_ids) for pair in pairs])


def _cached(batch: Batch, pair: PairedPass, stream: torch.Generator) -> tuple[Batch, PairedPass]:
    index = batch.distilled.nonzero()[:, 0]
    index = index[torch.randperm(len(index), generator=stream)[:CACHED_TOKENS].to(index.device)]
    batch, pair = take_tokens(batch, pair, index)
    scale = torch.full_like(batch.distill_scale, 1 / len(index))  # a mean over these tokens: gradients of the same size
    return replace(batch, distill_scale=scale, n_distilled=len(index)), pair


def precision(config: Config, device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16, enabled=config.model.dtype == "bfloat16")
