"""A key/value cache whose rows come and go.

transformers' `DynamicCache` copies itself at every step and can't take in new rows. This one grows in blocks, is
left-padded, and keeps all positions of every layer: sliding windows come from the attention mask.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_BLOCK = 64  # positions added at a time: a row of 512 tokens costs 8 copies instead of 512


class _GrowingLayer(CacheLayerMixin):
    """Keys and values of one layer, `[B, heads, capacity, dim]`, of which the first `length` positions are filled."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = _grown(key_states[:, :, :0], key_states.shape[2])
        self.values = _grown(value_states[:, :, :0], value_states.shape[2])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        end = self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            self.keys = _grown(self.keys, end)
            self.values = _grown(self.values, end)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


def _grown(states: Tensor, length: int) -> Tensor:
    capacity = -(-(length + 1) // _BLOCK) * _BLOCK
    buffer = states.new_zeros(*states.shape[:2], capacity, states.shape[3])
    buffer[:, :, : states.shape[2]] = states
    return buffer


class RowCache:
    """The cache of a running batch plus each row's left padding."""

    def __init__(self, num_layers: int, padding: Tensor) -> None:
        self.layers = [_GrowingLayer() for _ in range(num_layers)]
        self.cache = Cache(layers=list(self.layers))
        self.padding = padding  # int64 [B], positions at the left of each row that hold nothing

    @property
    def length(self) -> int:
        """Filled positions, padding included; the same for every row."""
        return self.layers[0].length

    def mask(self, extra: int = 0) -> Tensor:
        """int64 [B, length + extra] attention mask."""
        positions = torch.arange(self.length + extra, device=self.padding.device)
        return (positions[None, :] >= self.padding[:, None]).long()

    def select(self, rows: Tensor) -> None:
        """Keep these rows (repeats allowed), and drop columns that are padding in all of them."""
        self.padding = self.padding[rows]
        cut = int(self.padding.min()) if len(rows) else 0
        self.padding = self.padding - cut
        for layer in self.layers:
            assert layer.keys is not None and layer.values is not None
            layer.keys = layer.keys[rows, :, cut:]
            layer.values = layer.values[rows, :, cut:]
            layer.length -= cut

    def adopt(self, other: RowCache) -> None:
        """Append the rows of `other`; the shorter of the two is padded at the left."""
        length = max(self.length, other.length)
        self.padding = torch.cat([self.padding + length - self.length, other.padding + length - other.length])
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.keys = _stacked(mine.keys, mine.length, theirs.keys, theirs.length)
            mine.values = _stacked(mine.values, mine.length, theirs.values, theirs.length)
            mine.length = length


def _stacked(first: Tensor | None, first_length: int, second: Tensor | None, second_length: int) -> Tensor:
    assert first is not None and second is not None
    length = max(first_length, second_length)
    buffer = _grown(first.new_zeros(len(first) + len(second), first.shape[1], 0, first.shape[3]), length)
    buffer[: len(first), :, length - first_length : length] = first[:, :, :first_length]
    buffer[len(first) :, :, length - second_length : length] = second[:, :, :second_length]
    return buffer
