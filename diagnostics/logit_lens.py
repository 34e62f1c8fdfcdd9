"""The logit lens: what the state of every block would say if the final norm and the head read it at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from diagnostics.capture.hf import decoder_blocks, output_head
from diagnostics.forward import LOGIT_ELEMENTS


class Said(NamedTuple):
    """What the head says at some places about one token each."""

    logprob: Float[Tensor, "*places"]  # nats, of the token
    rank: Int[Tensor, "*places"]  # 1: no token is more probable
    greedy: Int[Tensor, "*places"]  # the most probable token


def logit_lens(model: Any, states: Float[Tensor, "L K D"], tokens: Int[Tensor, "K"], temperature: float = 1.0) -> Said:
    """What each block's state says about the token that follows it, through the final norm and the head.

    value = log_softmax(head(final_norm(h_l)) / temperature)[token]
    Source: nostalgebraist, "interpreting GPT: the logit lens".
    Args: states [L, K, D], before the final norm, at the positions BEFORE the K tokens. Returns: [L, K] each; of the
    last block the model's own log-probs.
    Raises: ValueError for a model whose final norm cannot be found.
    """
    return said(model, final_norm(model)(states), tokens.expand(states.shape[:2]), temperature)


def said(
    model: Any, final: Float[Tensor, "*places D"], tokens: Int[Tensor, "*places"], temperature: float = 1.0
) -> Said:
    """What the head says about one token at each place; the vocabulary is held for a few places at a time.

    Args: final, what the head reads (after the final norm); temperature, divides the logits.
    """
    head, places = output_head(model), tokens.shape
    size = max(1, LOGIT_ELEMENTS // model.config.get_text_config().vocab_size)
    parts = []
    for piece, token in zip(final.flatten(0, -2).split(size), tokens.flatten().split(size), strict=True):
        logprobs = torch.log_softmax(head(piece).float() / temperature, dim=-1)
        own = logprobs.gather(-1, token[:, None])
        parts.append((own[:, 0], 1 + (logprobs > own).sum(-1), logprobs.argmax(-1)))
    return Said(*(torch.cat(values).reshape(places) for values in zip(*parts, strict=True)))


def final_norm(model: Any) -> nn.Module:
    """The norm between the last block and the head, whatever the architecture calls it (`norm`, `ln_f`, ...).

    It is the module beside the list of blocks that holds vectors of the model's width and nothing else. Raises
    ValueError unless there is exactly one.
    """
    blocks = decoder_blocks(model)
    width = model.config.get_text_config().hidden_size
    norms: list[nn.Module] = []
    for parent in model.base_model.modules():
        if any(child is blocks for child in parent.children()):
            norms = [child for child in parent.children() if _is_norm(child, width)]
    if len(norms) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(norms)} norms beside its blocks, where the logit lens needs exactly one"
        )
    return norms[0]


def _is_norm(module: nn.Module, width: int) -> bool:
    shapes = [tuple(parameter.shape) for parameter in module.parameters()]
    return bool(shapes) and all(shape == (width,) for shape in shapes)
