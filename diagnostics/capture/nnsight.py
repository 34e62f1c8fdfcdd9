"""Hidden states through nnsight: a trace that saves what enters and leaves the decoder blocks.

nnsight puts a controller in place of each module's `forward`. So it wraps a twin that shares the live model's weights;
the live modules stay as they are.
"""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import nnsight
import torch
from jaxtyping import Int
from torch import Tensor

from diagnostics.capture.hf import Capture, Layers, Select, chosen_layers, find_blocks, mask_and_positions

_wrapped: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # live model -> nnsight's tree over its twin


@torch.no_grad()
def capture_states(
    model: Any,
    ids: Int[Tensor, "B T"],
    attention_mask: Int[Tensor, "B T"],
    layers: Layers = "all",
    select: Select | None = None,
) -> Capture:
    """The states of hf.capture_states, read by an nnsight trace of the decoder.

    Always in eval mode and without gradients.
    Source: ours. Args, Returns: see hf.capture_states.
    Raises ValueError on an unknown layer.
    """
    names = chosen_layers(model, layers)

    def keep(hidden: Any) -> Tensor:
        hidden = hidden if isinstance(hidden, Tensor) else hidden[0]  # older blocks return a tuple
        return hidden if select is None else hidden[select]

    decoder = _wrap(model)
    blocks = decoder.get(find_blocks(model)[0])
    inner = [name for name in ("embed", *map(str, range(len(blocks)))) if name in names]  # a trace runs upwards
    mask, positions = mask_and_positions(attention_mask)
    with decoder.trace(ids, attention_mask=mask, position_ids=positions, use_cache=False):
        read = [keep(blocks[0].input if name == "embed" else blocks[int(name)].output) for name in inner]
        saved = nnsight.save([*read, keep(decoder.output.last_hidden_state)])
    states = dict(zip([*inner, "final_norm"], saved, strict=True))
    return Capture(states["final_norm"], {name: states[name] for name in names})


def _wrap(model: Any) -> Any:
    if model not in _wrapped:
        shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
        _wrapped[model] = nnsight.NNsight(copy.deepcopy(model.base_model, shared).eval())
    return _wrapped[model]
