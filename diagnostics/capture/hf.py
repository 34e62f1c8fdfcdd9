"""Hidden states of a Hugging Face causal language model through forward hooks on its decoder blocks.

Layers are named `embed` (what enters block 0), `0` .. `L-1` (what leaves block l: the residual stream, before the
final norm) and `final_norm` (what the head reads). Hugging Face's own `hidden_states[-1]` is the last of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

Layers = Literal["all"] | Sequence[str]
Select = tuple[Int[Tensor, "M"], Int[Tensor, "M"]]


@dataclass(frozen=True, eq=False)
class Capture:
    """What one forward left behind. With `select` the two leading axes are one axis of selected positions."""

    final: Float[Tensor, "*places D"]  # after the final norm, what the head reads
    states: dict[str, Float[Tensor, "*places D"]]  # layer name -> hidden states


def decoder_blocks(model: Any) -> nn.ModuleList:
    """The decoder blocks, whatever the architecture calls them (`model.layers`, `transformer.h`, ...)."""
    return find_blocks(model)[1]


def find_blocks(model: Any) -> tuple[str, nn.ModuleList]:
    """Where the decoder blocks lie in `model.base_model` (a dotted path), and the blocks."""
    count = model.config.get_text_config().num_hidden_layers
    for path, module in model.base_model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return path, module
    raise ValueError(f"{type(model).__name__} holds no list of {count} decoder blocks; it is not a model we can read")


def weight_versions(model: Any) -> list[int]:
    """A list that changes whenever a weight is changed in place, as an optimiser does it."""
    return [weight._version for weight in model.parameters()]


def output_head(model: Any) -> nn.Module:
    """The module that turns what `Capture.final` holds into logits. Raises ValueError where more is done to them."""
    config = model.config.get_text_config()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(f"{type(model).__name__} changes its logits after the head ({name}); we cannot read it")
    return model.get_output_embeddings()


def layer_names(model: Any) -> tuple[str, ...]:
    """Every layer `capture_states` knows, from the bottom: embed, 0 .. L-1, final_norm."""
    return ("embed", *(str(index) for index in range(len(decoder_blocks(model)))), "final_norm")


def chosen_layers(model: Any, layers: Layers) -> tuple[str, ...]:
    """The names asked for; "all" is embed and every block. Raises ValueError on an unknown name."""
    known = layer_names(model)
    names = known[:-1] if layers == "all" else tuple(layers)
    for name in names:
        if name not in known:
            raise ValueError(f"unknown layer {name!r}; this model has {', '.join(known)}")
    return names


def capture_states(
    model: Any,
    ids: Int[Tensor, "B T"],
    attention_mask: Int[Tensor, "B T"],
    layers: Layers = "all",
    select: Select | None = None,
) -> Capture:
    """One forward of the decoder without its head, with the residual stream of the layers asked for.

    Positions count the real tokens, so the result does not depend on the side or number of pads. Gradients flow if
    they are enabled outside.
    Source: ours.
    Args: attention_mask, 1 on real tokens; layers, "all" (embed and every block) or names; select, (row, position) of
    the M places to keep, gathered inside the hooks so that memory follows M instead of B * T.
    Returns a Capture of [B, T, D], or [M, D] with `select`.
    Raises ValueError on an unknown layer.
    """
    names = chosen_layers(model, layers)

    def keep(hidden: Tensor) -> Tensor:
        return hidden if select is None else hidden[select]

    mask, positions = mask_and_positions(attention_mask)
    # Blocks that are run again in the backward pass (gradient checkpointing) must save the same tensors both times, and
    # the second time there are no hooks: then the whole output is kept, which is the next block's saved input anyway.
    checkpointed = getattr(model, "is_gradient_checkpointing", False) and model.training
    again = checkpointed and torch.is_grad_enabled()
    with _hooks(decoder_blocks(model), names, (lambda hidden: hidden) if again else keep) as states:
        output = model.base_model(ids, attention_mask=mask, position_ids=positions, use_cache=False)
    if again:
        states.update({name: keep(hidden) for name, hidden in states.items()})
    final = keep(output.last_hidden_state)
    if "final_norm" in names:
        states["final_norm"] = final
    return Capture(final, {name: states[name] for name in names})


def mask_and_positions(mask: Int[Tensor, "B T"]) -> tuple[Int[Tensor, "B T"] | None, Int[Tensor, "B T"]]:
    """The mask and the position ids a model is given: positions count the real tokens, on whichever side the pads are.

    Where all pads are on the right there is no mask (None).
    """
    if (mask.diff(dim=-1) <= 0).all():
        # no causal query sees a pad on the right, and without a mask attention takes its cheaper causal path
        return None, torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    return mask, (mask.cumsum(-1) - 1).clamp(min=0)


@contextmanager
def _hooks(blocks: nn.ModuleList, names: Sequence[str], keep: Any) -> Iterator[dict[str, Tensor]]:
    states: dict[str, Tensor] = {}

    def entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states["embed"] = keep(args[0] if args else kwargs["hidden_states"])

    def leaving(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            states[name] = keep(output if isinstance(output, Tensor) else output[0])  # older blocks return a tuple

        return hook

    handles = [blocks[int(name)].register_forward_hook(leaving(name)) for name in names if name.isdigit()]
    if "embed" in names:
        handles.append(blocks[0].register_forward_pre_hook(entering, with_kwargs=True))
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()
