"""Sizes of a decoder-only model, from its published configuration: parameters, bytes of its cache, memory units."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A Llama-like model: RoPE, RMS norms, gated MLP of three matrices. Facts of its config.json."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    head_dim: int
    tied: bool  # the output head is the embedding
    positions: int  # tokens of the longest context
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def block(self) -> int:
        """Parameters of one block."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * query + 2 * key)
        bias = query + 2 * key if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return attention + bias + norms + 3 * self.hidden * self.intermediate

    @property
    def ends(self) -> int:
        """Parameters outside the blocks: embedding, head where it is its own, final norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.block + self.ends

    @property
    def kv_bytes(self) -> int:
        """Of the key/value cache, a token, in bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


def _qwen25(hidden: int, layers: int, heads: int, kv: int, intermediate: int, vocabulary: int, tied: bool) -> Shape:
    return Shape(hidden, layers, heads, kv, intermediate, vocabulary, 128, tied, 32768, qkv_bias=True)


SHAPES: dict[str, Shape] = {
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen25(1536, 28, 12, 2, 8960, 151936, True),
    "Qwen/Qwen2.5-3B-Instruct": _qwen25(2048, 36, 16, 2, 11008, 151936, True),
    "Qwen/Qwen2.5-7B-Instruct": _qwen25(3584, 28, 28, 4, 18944, 152064, False),
    "Qwen/Qwen3-1.7B": Shape(2048, 28, 16, 8, 6144, 151936, 128, True, 40960, qk_norm=True),
    "Qwen/Qwen3-4B": Shape(2560, 36, 32, 8, 9728, 151936, 128, True, 40960, qk_norm=True),
    "Qwen/Qwen3-8B": Shape(4096, 36, 32, 8, 12288, 151936, 128, False, 40960, qk_norm=True),
}
TINY = Path(__file__).parents[1] / "models" / "assets" / "tiny"


def shape_of(name: str) -> Shape:
    """The sizes of a model: of a name in SHAPES, or of a folder's config.json; nothing is loaded or downloaded.

    Raises: ValueError for a name that is neither, and for a model of another kind.
    """
    if name in SHAPES:
        return SHAPES[name]
    path = (TINY if name == "tiny" else Path(name)) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"the sizes of model {name!r} are not known here: give a folder with its config.json, or one of "
            f"{', '.join(SHAPES)}"
        )
    return _from_config(json.loads(path.read_text(encoding="utf-8")), path)


def _from_config(config: Mapping[str, Any], path: Path) -> Shape:
    kind = config.get("model_type")
    if kind not in ("llama", "qwen2", "qwen3"):
        raise ValueError(f"{path} is of a {kind} model; the plan knows the sizes of llama, qwen2 and qwen3 models")
    heads = config["num_attention_heads"]
    return Shape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        tied=bool(config.get("tie_word_embeddings", False)),
        positions=config["max_position_embeddings"],
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
    )
