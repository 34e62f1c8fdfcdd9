"""Hidden states of a causal language model: one signature, four backends.

    capture_states(model, ids, attention_mask, layers, select) -> Capture

Each is given the live Hugging Face model and leaves it as it is. `hf` (forward hooks) is the reference and the fastest,
the only one through which gradients flow; `transformer_lens` and `nnsight` read a twin of it through those libraries;
`vllm` reads a vLLM engine that is opened on its weights. Layer names, positions and shapes are the same from each.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from diagnostics.capture.hf import Capture, capture_states, layer_names

__all__ = ["BACKENDS", "Capture", "CaptureStates", "backend", "capture_states", "layer_names"]

CaptureStates = Callable[..., Capture]  # (model, ids, attention_mask, layers, select)

BACKENDS: dict[str, tuple[str, str, str]] = {  # name -> our module, the library it needs, what pip installs
    "hf": ("hf", "transformers", "transformers"),
    "transformer_lens": ("lens", "transformer_lens", '"undertow[backends]"'),
    "nnsight": ("nnsight", "nnsight", '"undertow[backends]"'),
    "vllm": ("vllm", "vllm", "vllm"),
}


def backend(name: str) -> CaptureStates:
    """The `capture_states` of that backend; its library is imported only now.

    Raises: ValueError on an unknown name (with the nearest), or a library that is not installed (with what installs
    it).
    """
    if name not in BACKENDS:
        near = difflib.get_close_matches(name, BACKENDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"backends are {', '.join(BACKENDS)}"
        raise ValueError(f"unknown backend {name!r}; {hint}")
    module, library, package = BACKENDS[name]
    if find_spec(library) is None:
        raise ValueError(f"backend {name!r} needs {library}, which is not installed: run pip install {package}")
    capture: CaptureStates = import_module(f"diagnostics.capture.{module}").capture_states
    return capture
