"""A cache whose rows come and go.

transformers' `DynamicCache` copies itself at every step and can't take in new rows. This one grows in blocks, is
left-padded, and keeps all positions of every layer: sliding windows come from the attention mask. Recurrent layers have
states instead of keys and values (`cache_layers`), which go with their rows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from roll.configs.catalog.family_ways import CACHE_ARGUMENTS
from roll.strategies.hf.cache_layers import BLOCK, KeyLayer, LayerStates, StateLayer


class RowCache:
    """The cache of a running batch plus each row's left padding.

    `ahead`: how many positions its rows may add to those that they begin with; more is possible, in further blocks.
    """

    def __init__(self, layers: Sequence[LayerStates], padding: Tensor, ahead: int = BLOCK) -> None:
        self.ahead = ahead
        self.layers: list[Any] = [layer.empty(ahead) for layer in layers]
        self._states = tuple(layers)
        self.cache = Cache(layers=list(self.layers))
        self._pad(padding)

    def _pad(self, padding: Tensor) -> None:
        self.padding = padding  # int64 [B], positions at the left of each row that hold nothing
        self._padded = bool(padding.any())

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.padding)

    @property
    def _keys(self) -> list[KeyLayer]:
        return [layer for layer in self.layers if isinstance(layer, KeyLayer)]

    @property
    def length(self) -> int:
        """Return filled positions, padding included; the same for every row."""
        return self._keys[0].length

    @property
    def recurrent(self) -> bool:
        """Return whether a layer has states, which are those after the last token and no other."""
        return any(isinstance(layer, StateLayer) for layer in self.layers)

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
            layer.select(rows, cut)

    def repeat(self, rows: Sequence[int], room: int) -> None:
        """Append copies of these rows; `room` is the number of rows that there may be later."""
        if not rows:
            return
        index = torch.tensor(rows, device=self.padding.device)
        for layer in self.layers:
            layer.repeat(len(self), index, room)
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
            layer.move(moved, free, len(order))
        return order

    def shorten(self, positions: int) -> None:
        """Forget so many positions at the end; not of a recurrent cache."""
        assert not self.recurrent
        for layer in self._keys:
            layer.length -= positions

    def beginnings(self, rows: Tensor, lengths: Tensor, ahead: int = BLOCK) -> RowCache:
        """Return a cache whose rows are the first `lengths` int64 [B] tokens of these rows of this one, int64 [B].

        Not of a recurrent cache, whose states are those after all tokens.
        """
        assert not self.recurrent
        length = int(lengths.max())
        cache = RowCache(self._states, length - lengths, ahead)
        positions = torch.arange(length, device=rows.device)
        columns = positions[None, :] + (self.padding[rows] - cache.padding)[:, None]
        columns = columns.clamp(min=0)  # what stands for padding is any number
        for mine, theirs in zip(cache.layers, self.layers, strict=True):
            mine.begin(theirs, rows, columns)
        return cache

    def adopt(self, other: RowCache) -> None:
        """Append the rows of `other`; the shorter of the two is padded at the left."""
        length, self.ahead = max(self.length, other.length), max(self.ahead, other.ahead)
        padding = torch.cat([self.padding + length - self.length, other.padding + length - other.length])
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.adopt(len(self), theirs, len(other), self.ahead)
        self._pad(padding)


@functools.cache
def cache_argument(model: type) -> str:
    """Return what the forward pass of a class of models calls its cache of keys and values."""
    names = inspect.signature(model.forward).parameters  # type: ignore[attr-defined]
    return next((name for name in CACHE_ARGUMENTS if name in names), CACHE_ARGUMENTS[0])


def forward(
    model: Any, ids: Tensor, cache: RowCache, *, keep: int | None = None, moved: Tensor | None = None
) -> Tensor:
    """Run a model's own forward pass over more tokens [B, T] of the cache's rows: logits after the last, [B, V].

    `keep`: after the last so many, [B, keep, V]. `moved`: int64 [B], by how much the positions of rows are others than
    those that count their tokens.
    """
    mask = cache.mask(extra=ids.shape[1])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions if moved is None else positions + moved[:, None],
        **{cache_argument(model.__class__): cache.cache},
        use_cache=True,
        logits_to_keep=keep or 1,
    )
    logits: Tensor = output.logits if keep else output.logits[:, -1]
    return logits
