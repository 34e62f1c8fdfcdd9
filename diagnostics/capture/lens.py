"""Hidden states through TransformerLens: the hook points of a TransformerBridge.

A bridge replaces the modules of the model it is given, renames its weights and switches it to eager attention.
So it is built on a copy; the live model is only read. Weights are not folded or centred: states are in the model's
own basis.
"""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens.model_bridge.sources import build_bridge_from_module

from diagnostics.capture.hf import Capture, Layers, Select, chosen_layers, mask_and_positions, weight_versions

# live model -> the state of its weights when it was copied, and the bridge on the copy
_bridges: WeakKeyDictionary[Any, tuple[list[int], Any]] = WeakKeyDictionary()


def hook_point(layer: str) -> str:
    """Where TransformerLens has a layer. `embed` is what enters block 0, so learned positions are in it."""
    return {"embed": "blocks.0.hook_resid_pre", "final_norm": "ln_final.hook_out"}.get(
        layer, f"blocks.{layer}.hook_resid_post"
    )


@torch.no_grad()
def capture_states(
    model: Any,
    ids: Int[Tensor, "B T"],
    attention_mask: Int[Tensor, "B T"],
    layers: Layers = "all",
    select: Select | None = None,
) -> Capture:
    """The states of hf.capture_states, read by TransformerLens from a copy of the model.

    The copy is made once, and again after the weights have changed; it needs the memory of a second model. It is
    always in eval mode and there are no gradients.
    Source: ours. Args, Returns: see hf.capture_states.
    Raises ValueError on an unknown layer, or an architecture TransformerLens does not know.
    """
    names = chosen_layers(model, layers)
    states: dict[str, Tensor] = {}

    def keep(layer: str) -> Any:
        def hook(hidden: Tensor, hook: Any) -> None:
            states[layer] = hidden if select is None else hidden[select]

        return hook

    mask, positions = mask_and_positions(attention_mask)
    _bridge(model).run_with_hooks(
        ids,
        return_type=None,
        fwd_hooks=[(hook_point(layer), keep(layer)) for layer in {*names, "final_norm"}],
        attention_mask=mask,
        position_ids=positions,
        use_cache=False,
    )
    return Capture(states["final_norm"], {name: states[name] for name in names})


def _bridge(model: Any) -> Any:
    weights = weight_versions(model)
    if model not in _bridges or _bridges[model][0] != weights:
        _bridges.pop(model, None)  # frees the former copy first
        twin = copy.deepcopy(model).eval()
        _bridges[model] = weights, build_bridge_from_module(twin, type(twin).__name__, hf_config=twin.config)
    return _bridges[model][1]
