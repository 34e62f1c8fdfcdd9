"""A key/value cache whose rows grow on their own: column c of a row holds its token at position c.

No padding ever enters a row, so there are no holes to mask or to compact, and the mask of a query at position p is
simply c <= p. Writes go in place into buffers that grow by half; live rows are the first slots of the buffers, so
leaving finished rows out is a view, not a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, [slots, heads, capacity, head_dim]."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots = slots
        self.positions = torch.empty(0, 0, dtype=torch.long)
        self.width = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros, not empty memory: a masked column still enters the product with weight 0, and 0 * NaN is NaN.
        self.keys = key_states.new_zeros(self.slots, key_states.shape[1], 0, key_states.shape[3])
        self.values = value_states.new_zeros(self.slots, value_states.shape[1], 0, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.width > self.keys.shape[2]:
            capacity = max(self.width, int(1.5 * self.keys.shape[2]))
            self.keys, self.values = _grown(self.keys, capacity), _grown(self.values, capacity)
        rows = key_states.shape[0]
        slot = torch.arange(rows, device=key_states.device)[:, None]
        self.keys[slot, :, self.positions] = key_states.transpose(1, 2)
        self.values[slot, :, self.positions] = value_states.transpose(1, 2)
        return self.keys[:rows, :, : self.width], self.values[:rows, :, : self.width]

    def swap(self, a: Tensor, b: Tensor, width: int) -> None:
        for buffer in (self.keys, self.values) if self.is_initialized else ():
            used = buffer[:, :, :width]
            used[a], used[b] = used[b], used[a]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.width, 0

    def get_seq_length(self) -> int:
        return self.width

    def get_max_cache_shape(self) -> int:
        return -1


class RaggedCache(Cache):
    """One RaggedLayer a decoder block. `place` says where the tokens of the coming forward pass belong."""

    def __init__(self, layers: int, slots: int) -> None:
        self.ragged = [RaggedLayer(slots) for _ in range(layers)]
        super().__init__(layers=list(self.ragged))

    def place(self, positions: Tensor, width: int) -> None:
        """positions int64 [rows, T]; width = 1 + the largest of them."""
        for layer in self.ragged:
            layer.positions, layer.width = positions, width

    def swap(self, a: Tensor, b: Tensor, width: int) -> None:
        """Exchange the first `width` columns of slots a and b (int64 [n] each, disjoint)."""
        for layer in self.ragged:
            layer.swap(a, b, width)


def causal_mask(positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [rows, 1, T, width]: 0 where column <= position, -inf elsewhere; every query sees itself."""
    hidden = torch.arange(width, device=positions.device) > positions[:, None, :, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, float("-inf"))


def _grown(buffer: Tensor, capacity: int) -> Tensor:
    rows, heads, used, dim = buffer.shape
    grown = buffer.new_zeros(rows, heads, capacity, dim)
    grown[:, :, :used] = buffer
    return grown
