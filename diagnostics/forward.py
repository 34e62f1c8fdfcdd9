"""One forward pass over contexts of different lengths, gathered to the response tokens before the head is applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diagnostics.capture import CaptureStates, capture_states
from diagnostics.capture.hf import output_head

LOGIT_ELEMENTS = 2**25  # logits of one piece of the head, 128 MB in fp32
CACHED_ELEMENTS = 2**19  # of those that a CPU works through at a time: functions of them then run in its cache

_FARTHEST = 80.0  # nats between two log-probs, below the overflow of exp in fp32; the rarer branch then weighs e^-80

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]
# normalised log-probs [m, V] of some tokens' distributions, nats -> any values [m, ...] of each token
Output = Callable[[Float[Tensor, "m V"]], Tensor]


class Context(NamedTuple):
    """One sequence and the positions OF its M response tokens."""

    ids: np.ndarray  # [T]
    positions: np.ndarray  # [M]
    response_ids: np.ndarray  # [M]


class Reading(NamedTuple):
    logprobs: Float[Tensor, "M"]  # nats
    entropy: Float[Tensor, "M"] | None
    divergence: Float[Tensor, "M"] | None
    states: dict[str, Float[Tensor, "M D"]]  # by layer
    final: Float[Tensor, "M D"]  # before each token, what the head reads
    outputs: dict[str, Tensor]  # [M, ...] by name


ReadContexts = Callable[..., Reading]  # read_contexts, or one of its signature


class Against(NamedTuple):
    """The other branch's distribution, for a divergence over the full vocabulary."""

    kind: Divergence
    model: Any
    final: Float[Tensor, "M D"]
    branch: Literal["student", "teacher"] = "teacher"  # whose distribution it is
    logprobs: Float[Tensor, "M V"] | None = None  # of all tokens, where they were kept; nats


@contextmanager
def reading_mode(model: Any, grad: bool) -> Iterator[None]:
    """Gradients on or off; without them also dropout off, and every module back in its mode afterwards."""
    training = [] if grad else [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.set_grad_enabled(grad):
            yield
    finally:
        for module in training:
            module.training = True


def read_contexts(
    model: Any,
    contexts: Sequence[Context],
    width: int = 0,
    *,
    temperature: float,
    layers: Sequence[str] = (),
    at: bool = False,
    entropy: bool = False,
    against: Against | None = None,
    outputs: Mapping[str, Output] = MappingProxyType({}),
    capture: CaptureStates | None = None,
    keep: Float[Tensor, "M V"] | None = None,
) -> Reading:
    """One forward over right-padded contexts, at least `width` wide.

    Args: at, states at the response tokens instead of before them; against, the other branch, whose full
    distribution this one's is compared with; outputs, what is kept of each token's full distribution; capture, of
    another backend (None: the forward hooks); the head is the model's own in any case; keep, is filled with the full
    distributions, log-probs in nats.
    """
    device = next(model.parameters()).device
    width = max(width, *(len(context.ids) for context in contexts))
    ids = np.zeros((len(contexts), width), dtype=np.int64)
    mask = np.zeros_like(ids)
    for index, context in enumerate(contexts):
        ids[index, : len(context.ids)] = context.ids
        mask[index, : len(context.ids)] = 1
    rows = np.repeat(np.arange(len(contexts)), [len(context.positions) for context in contexts])
    places = np.concatenate([context.positions for context in contexts]).astype(np.int64)
    targets = np.concatenate([context.response_ids for context in contexts]).astype(np.int64)
    count = len(places)
    before = places - 1
    if at and layers:  # one selection of both kinds: the head reads the first half, the states are the second
        rows, before = np.tile(rows, 2), np.concatenate([before, places])

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    read = capture or capture_states
    found = read(model, tensor(ids), tensor(mask), layers, select=(tensor(rows), tensor(before)))
    final = found.final[:count]
    states = {name: states[-count:] for name, states in found.states.items()}
    scored = _score(model, final, tensor(targets), temperature, entropy, against, outputs, keep)
    logprobs, entropies, divergences, values = scored
    return Reading(logprobs, entropies, divergences, states, final, values)


def divergence(student: Float[Tensor, "M V"], teacher: Float[Tensor, "M V"], kind: Divergence) -> Float[Tensor, "M"]:
    """How far two distributions lie apart, over the full vocabulary.

    reverse_kl = sum p_S (log p_S - log p_T); forward_kl = sum p_T (log p_T - log p_S);
    jsd = 1/2 KL(p_S || m) + 1/2 KL(p_T || m), m = (p_S + p_T) / 2. With d = log p_T - log p_S it is computed from
    log m - log p_S = log1p(expm1(d) / 2), which is exactly 0 for equal inputs and keeps its digits for close ones.
    Args: log-probabilities, normalised, nats. Returns: [M] nats, >= 0 up to rounding, jsd <= ln 2. Gradients flow
    into the student.
    """
    if kind == "reverse_kl":
        return (student.exp() * (student - teacher)).sum(-1)
    if kind == "forward_kl":
        return (teacher.exp() * (teacher - student)).sum(-1)
    apart = (teacher - student).clamp(-_FARTHEST, _FARTHEST)
    above = torch.log1p(torch.expm1(apart) / 2), torch.log1p(torch.expm1(-apart) / 2)  # log m - log p of each branch
    return -(student.exp() * above[0] + teacher.exp() * above[1]).sum(-1) / 2


def _score(
    model: Any,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    entropy: bool,
    against: Against | None,
    outputs: Mapping[str, Output],
    keep: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, dict[str, Tensor]]:
    """Log-probs of the targets, entropies, divergences and outputs, the head applied piece by piece so that [M, V]
    never exists."""

    def rows(target: Tensor, logits: Tensor, other: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
        logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
        if keep is not None:
            kept.copy_(logprobs)
        nothing = logprobs.new_zeros(0)
        entropies = -(logprobs.exp() * logprobs).sum(-1) if entropy else nothing
        apart = nothing
        if against is not None:
            with torch.no_grad():
                others = other if known else torch.log_softmax(other.float() / temperature, dim=-1)
            branches = (logprobs, others) if against.branch == "teacher" else (others, logprobs)
            apart = divergence(*branches, against.kind)
        values = [output(logprobs) for output in outputs.values()]
        return logprobs.gather(-1, target[:, None])[:, 0], entropies, apart, *values

    def score(piece: Tensor, target: Tensor, other: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
        logits = output_head(model)(piece)
        if against is not None and not known:
            with torch.no_grad():
                other = output_head(against.model)(other)
        parts = target, logits, other, kept
        if torch.is_grad_enabled() or logits.device.type != "cpu":
            return rows(*parts)
        count = max(1, CACHED_ELEMENTS // logits.shape[-1])
        return _joined([rows(*block) for block in zip(*(part.split(count) for part in parts), strict=True)])

    known = against is not None and against.logprobs is not None
    size = max(1, LOGIT_ELEMENTS // model.config.get_text_config().vocab_size)
    if torch.is_grad_enabled() and len(hidden) > size:  # keep a piece's logits for its own backward only
        score = partial(checkpoint, score, use_reentrant=False)
    others = targets  # stands for what is absent, as it does in the place of keep
    if against is not None:
        others = against.final if against.logprobs is None else against.logprobs
    parts = hidden, targets, others, targets if keep is None else keep
    pieces = [score(*piece) for piece in zip(*(part.split(size) for part in parts), strict=True)]
    logprobs, entropies, apart, *values = _joined(pieces)
    named = dict(zip(outputs, values, strict=True))
    return logprobs, entropies if entropy else None, None if against is None else apart, named


def _joined(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))
