"""The scalar that is minimised: named loss terms, each reduced by denominators of the whole mini-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from diagnostics.paired import PairedPass
from training.batch import Batch
from training.config import ObjectiveConfig
from training.dynamics import Metrics, weight_metrics
from training.losses import kl_k3, policy_loss
from training.method import LossTerm, Needs


@dataclass(frozen=True, eq=False)
class Objective:
    loss: Float[Tensor, ""]
    metrics: Metrics  # loss/<term> without its coefficient, policy/..., kl/..., weight/...


def objective(
    batch: Batch,
    pair: PairedPass,
    config: ObjectiveConfig,
    needs: Needs,
    extra_terms: Sequence[LossTerm] = (),
    advantages: Float[Tensor, "M"] | None = None,
) -> Objective:
    """Reward objective plus the method's terms, as this micro-batch's share of the mini-batch.

    loss = policy_coefficient * surrogate + kl_coefficient * k3 - entropy_coefficient * entropy
         + sum over extra terms of coefficient * sum(weight * value * distill_scale)
    The KL estimator is k3, used as a loss. KL and entropy stand only where the method is `regularised`; a term with
    coefficient 0 is logged and takes no part, so the update equals plain GRPO bit for bit (case B34).
    Source: GRPO; METHOD files for the terms.
    Args: batch and pair over the same M tokens; advantages [M] replace the batch's.
    Returns: loss, a scalar that adds up over the micro-batches of a mini-batch.
    Raises: ValueError when a tensor that the objective or the method needs is missing.
    """
    student = pair.student_logprobs
    old = student.detach() if batch.old_logprobs is None else batch.old_logprobs
    mask = batch.mask
    metrics: Metrics = {}
    scaled: list[tuple[LossTerm, Tensor, int]] = []  # term, weights of its tokens, tokens of the mini-batch
    shared: list[LossTerm] = []
    if needs.policy_coefficient:
        advantages = batch.advantages if advantages is None else advantages
        surrogate = policy_loss(student, old, advantages, mask, config.clip_low, config.clip_high, config.dual_clip)
        metrics["policy/clip_share"] = (surrogate.clipped.sum(), mask.sum())
        metrics["policy/dual_clip_share"] = (surrogate.dual_clipped.sum(), mask.sum())
        shared.append(LossTerm("policy", surrogate.value, mask, needs.policy_coefficient))
    if needs.regularised and config.kl_coefficient:
        k3 = kl_k3(student, _present(batch.reference_logprobs, "reference_logprobs"), mask)
        shared.append(LossTerm("kl", k3, mask, config.kl_coefficient))
    if needs.regularised and config.entropy_coefficient:
        entropy = _present(pair.student_entropy, "student_entropy")
        shared.append(LossTerm("entropy", -entropy, mask, config.entropy_coefficient))
    scaled += [(term, batch.scale, batch.n_tokens) for term in shared]
    if batch.distilled.any():
        if needs.teacher_logprobs:
            _present(pair.teacher_logprobs, "teacher_logprobs")
        if needs.divergence != "none":
            _present(pair.divergence, "divergence")
        if needs.states != "none":
            _present(pair.student_states, "student_states")
            _present(pair.teacher_states, "teacher_states")
        scaled += [(term, batch.distill_scale, batch.n_distilled) for term in extra_terms]

    sampler = torch.where(mask, batch.rollout_logprobs - old, 0.0)
    metrics["kl/rollout_train"] = (sampler.abs().sum(), mask.sum())
    metrics["kl/rollout_train_k3"] = (kl_k3(batch.rollout_logprobs, old, mask).sum(), mask.sum())
    loss = student.new_zeros(())
    for term, scale, count in scaled:
        tokens = term.mask.sum()
        value = term.value if term.weight is None else term.weight.detach() * term.value
        reduced = (torch.where(term.mask, value, 0.0) * scale).sum()
        if term.coefficient:
            loss = loss + term.coefficient * reduced
        # mini-batch means, weighted by tokens: `count` undoes the scale, `tokens` adds up to it
        metrics[f"loss/{term.name}"] = (reduced.detach() * count, tokens)
        if term.weight is not None:
            metrics |= weight_metrics(batch, f"weight/{term.name}", term.weight, term.mask)
    return Objective(loss, metrics)


def _present(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"the loss needs {name}, which the batch does not hold; check the method's needs")
    return tensor
