"""Hidden states of a causal language model; hf.py (forward hooks) is the reference backend."""

from diagnostics.capture.hf import Capture, capture_states, layer_names

__all__ = ["Capture", "capture_states", "layer_names"]
