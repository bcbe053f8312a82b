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
    """Keys and values of one layer, `[B or more, heads, length or more, dim]`: room for more rows and positions."""

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
        rows, end = len(key_states), self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            self.keys = _grown(self.keys[:rows], end, self.ahead)
            self.values = _grown(self.values[:rows], end, self.ahead)
        self.keys[:rows, :, self.length : end] = key_states
        self.values[:rows, :, self.length : end] = value_states
        self.length = end
        return self.keys[:rows, :, :end], self.values[:rows, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


def _grown(states: Tensor, length: int, ahead: int, rows: int = 0) -> Tensor:
    """Return a copy with room for more positions than `length`, and for `rows`."""
    buffer = _room(states, max(rows, len(states)), length, ahead)
    buffer[: len(states), :, : states.shape[2]] = states
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

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.padding)

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

    def repeat(self, rows: Sequence[int], room: int) -> None:
        """Append copies of these rows; `room` is the number of rows that there may be later."""
        if not rows:
            return
        count, index = len(self), torch.tensor(rows, device=self.padding.device)
        end = count + len(rows)
        for layer in self.layers:
            assert layer.keys is not None and layer.values is not None
            if len(layer.keys) < end:
                filled = (slice(count), slice(None), slice(layer.length))
                layer.keys = _grown(layer.keys[filled], layer.length, self.ahead, max(room, end))
                layer.values = _grown(layer.values[filled], layer.length, self.ahead, max(room, end))
            for states in (layer.keys, layer.values):
                states[count:end, :, : layer.length] = states[index, :, : layer.length]
        self._pad(torch.cat([self.padding, self.padding[index]]))

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Keep these rows and return their new order: the last ones move to the places of those that go.

        Only they are copied, and room is freed when the cache grows next. Where an eighth of the columns or more is
        padding in all rows that are left, all are copied without it.
        """
        order, retained = list(range(len(rows))), set(rows)
        moved = [row for row in rows if row >= len(rows)]
        free = [target for target in order if target not in retained]
        for target, row in zip(free, moved, strict=True):
            order[target] = row
        index = torch.tensor(order, device=self.padding.device)
        if self._padded and 8 * int(self.padding[index].min()) >= self.length:
            self.select(index)
            return order
        self._pad(self.padding[index])
        for layer in self.layers:
            assert layer.keys is not None and layer.values is not None
            for states in (layer.keys, layer.values):
                filled = states[:, :, : layer.length]
                for target, row in zip(free, moved, strict=True):
                    filled[target] = filled[row]
        return order

    def shorten(self, positions: int) -> None:
        """Forget so many positions at the end."""
        for layer in self.layers:
            layer.length -= positions

    def beginnings(self, rows: Tensor, lengths: Tensor, ahead: int = _BLOCK) -> RowCache:
        """Return a cache whose rows are the first `lengths` int64 [B] tokens of these rows of this one, int64 [B]."""
        length = int(lengths.max())
        cache = RowCache(len(self.layers), length - lengths, ahead)
        positions = torch.arange(length, device=rows.device)
        columns = positions[None, :] + (self.padding[rows] - cache.padding)[:, None]
        columns = columns.clamp(min=0)  # what stands for padding is any number
        for mine, theirs in zip(cache.layers, self.layers, strict=True):
            assert theirs.keys is not None and theirs.values is not None
            mine.update(*(states[rows[:, None], :, columns].transpose(1, 2) for states in (theirs.keys, theirs.values)))
        return cache

    def adopt(self, other: RowCache) -> None:
        """Append the rows of `other`; the shorter of the two is padded at the left."""
        length, self.ahead = max(self.length, other.length), max(self.ahead, other.ahead)
        padding = torch.cat([self.padding + length - self.length, other.padding + length - other.length])
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            assert mine.keys is not None and mine.values is not None
            assert theirs.keys is not None and theirs.values is not None
            first, second = (len(self), mine.length), (len(other), theirs.length)
            mine.ahead = self.ahead
            mine.keys = _stacked(mine.keys, first, theirs.keys, second, self.ahead)
            mine.values = _stacked(mine.values, first, theirs.values, second, self.ahead)
            mine.length = length
        self._pad(padding)


def _stacked(
    first: Tensor, first_size: tuple[int, int], second: Tensor, second_size: tuple[int, int], ahead: int
) -> Tensor:
    """Return the rows of both; sizes are (rows, positions) that are filled."""
    length = max(first_size[1], second_size[1])
    buffer = _room(first, first_size[0] + second_size[0], length, ahead)
    start = 0
    for states, (rows, filled) in ((first, first_size), (second, second_size)):
        part = buffer[start : start + rows]
        part[:, :, : length - filled] = 0  # padding is masked, which multiplies it by 0: it must be a number
        part[:, :, length - filled : length] = states[:rows, :, :filled]
        start += rows
    return buffer


def forward(model: Any, ids: Tensor, cache: RowCache, *, keep: int | None = None) -> Tensor:
    """Run a model's own forward pass over more tokens [B, T] of the cache's rows: logits after the last, [B, V].

    `keep`: after the last so many, [B, keep, V].
    """
    mask = cache.mask(extra=ids.shape[1])
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :],
        past_key_values=cache.cache,
        use_cache=True,
        logits_to_keep=keep or 1,
    )
    logits: Tensor = output.logits if keep else output.logits[:, -1]
    return logits
