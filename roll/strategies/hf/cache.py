"""A key/value cache whose rows come and go.

transformers' `DynamicCache` copies itself at every step and can't take in new rows. This one grows in blocks, is
left-padded, and keeps all positions of every layer: sliding windows come from the attention mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_BLOCK = 64  # positions added at a time: a row of 512 tokens costs 8 copies instead of 512


class _GrowingLayer(CacheLayerMixin):
    """Keys and values of one layer, `[B, heads, capacity, dim]`, of which the first `length` positions are filled."""

    def __init__(self, ahead: int) -> None:
        super().__init__()
        self.length = 0
        self.ahead = ahead

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = _grown(key_states[:, :, :0], key_states.shape[2], self.ahead)
        self.values = _grown(value_states[:, :, :0], value_states.shape[2], self.ahead)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        end = self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            self.keys = _grown(self.keys, end, self.ahead)
            self.values = _grown(self.values, end, self.ahead)
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


def _grown(states: Tensor, length: int, ahead: int) -> Tensor:
    buffer = _room(states, len(states), length, ahead)
    buffer[:, :, : states.shape[2]] = states
    return buffer


def _room(like: Tensor, rows: int, length: int, ahead: int) -> Tensor:
    """Return room for more than `length` positions, not filled: nobody reads on behind the filled ones.

    Of short responses a whole block would be mostly empty.
    """
    capacity = min(-(-(length + 1) // _BLOCK) * _BLOCK, length + max(ahead, 1))
    return like.new_empty(rows, like.shape[1], capacity, like.shape[3])


class RowCache:
    """The cache of a running batch plus each row's left padding.

    `ahead`: how many positions its rows may add to those that they begin with; more is possible, in further blocks.
    """

    def __init__(self, num_layers: int, padding: Tensor, ahead: int = _BLOCK) -> None:
        self.ahead = ahead
        self.layers = [_GrowingLayer(ahead) for _ in range(num_layers)]
        self.cache = Cache(layers=list(self.layers))
        self._pad(padding)

    def _pad(self, padding: Tensor) -> None:
        self.padding = padding  # int64 [B], positions at the left of each row that hold nothing
        self._padded = bool(padding.any())

    @property
    def length(self) -> int:
        """Return filled positions, padding included; the same for every row."""
        return self.layers[0].length

    def mask(self, extra: int = 0) -> Tensor:
        """Return the int64 [B, length + extra] attention mask."""
        positions = torch.arange(self.length + extra, device=self.padding.device)
        return (positions[None, :] >= self.padding[:, None]).long()

    def seen(self, extra: int = 0) -> Tensor | None:
        """Return bool [B, 1, 1, length + extra] of what isn't padding; None if nothing is."""
        return self.mask(extra).bool()[:, None, None] if self._padded else None

    def select(self, rows: Tensor) -> None:
        """Keep these rows (repeats allowed), and drop columns that are padding in all of them."""
        padding = self.padding[rows]
        cut = int(padding.min()) if len(rows) else 0
        if cut == 0 and rows.tolist() == list(range(len(self.padding))):
            return
        self._pad(padding - cut)
        for layer in self.layers:
            assert layer.keys is not None and layer.values is not None
            layer.keys = layer.keys[rows, :, cut:]
            layer.values = layer.values[rows, :, cut:]
            layer.length -= cut

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Keep these rows and return their new order: the last ones move to the places of those that go.

        Only they are copied, and room is freed when the cache grows next.
        """
        order, retained = list(range(len(rows))), set(rows)
        moved = [row for row in rows if row >= len(rows)]
        free = [target for target in order if target not in retained]
        for target, row in zip(free, moved, strict=True):
            order[target] = row
        if self._padded:
            self.select(torch.tensor(order, device=self.padding.device))
            return order
        self._pad(self.padding[order])
        for layer in self.layers:
            assert layer.keys is not None and layer.values is not None
            for states in (layer.keys, layer.values):
                filled = states[:, :, : layer.length]
                for target, row in zip(free, moved, strict=True):
                    filled[target] = filled[row]
            layer.keys, layer.values = layer.keys[: len(rows)], layer.values[: len(rows)]
        return order

    def continued(self, padding: Tensor, ahead: int = _BLOCK) -> RowCache:
        """Return rows that begin as the only one of this cache does, moved to the right by their `padding` int64 [B].

        Each loses so many positions at the end, which are to be computed again with what follows: rows end together.
        """
        cache = RowCache(len(self.layers), padding, ahead)
        positions = torch.arange(self.length, device=padding.device)
        columns = (positions[None, :] - padding[:, None]).clamp(min=0)  # what stands for padding is any number
        for mine, theirs in zip(cache.layers, self.layers, strict=True):
            assert theirs.keys is not None and theirs.values is not None
            mine.update(*(states[0][:, columns].transpose(0, 1) for states in (theirs.keys, theirs.values)))
        return cache

    def adopt(self, other: RowCache) -> None:
        """Append the rows of `other`; the shorter of the two is padded at the left."""
        length, self.ahead = max(self.length, other.length), max(self.ahead, other.ahead)
        self._pad(torch.cat([self.padding + length - self.length, other.padding + length - other.length]))
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.ahead = self.ahead
            mine.keys = _stacked(mine.keys, mine.length, theirs.keys, theirs.length, self.ahead)
            mine.values = _stacked(mine.values, mine.length, theirs.values, theirs.length, self.ahead)
            mine.length = length


def _stacked(first: Tensor | None, first_length: int, second: Tensor | None, second_length: int, ahead: int) -> Tensor:
    assert first is not None and second is not None
    length = max(first_length, second_length)
    buffer = _room(first, len(first) + len(second), length, ahead)
    start = 0
    for states, filled in ((first, first_length), (second, second_length)):
        part = buffer[start : start + len(states)]
        part[:, :, : length - filled] = 0  # padding is masked, which multiplies it by 0: it must be a number
        part[:, :, length - filled : length] = states[:, :, :filled]
        start += len(states)
    return buffer


def forward(model: Any, ids: Tensor, cache: RowCache) -> Tensor:
    """Run a model's own forward pass over more tokens [B, T] of the cache's rows: logits after the last, [B, V]."""
    mask = cache.mask(extra=ids.shape[1])
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :],
        past_key_values=cache.cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = output.logits[:, -1]
    return logits
