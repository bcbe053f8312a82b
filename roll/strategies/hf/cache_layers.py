"""The layers of a cache whose rows come and go: keys and values of attention, and states of recurrent layers.

Keys and values grow by a position per token, and a mask tells which of them are padding. A state (of a delta rule, a
state-space layer or a short convolution) has one size however many tokens it has seen; transformers keeps padding out
of it, and nothing can be taken out of it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

BLOCK = 64  # positions added at a time: a row of 512 tokens costs 8 copies instead of 512


@dataclass(frozen=True, slots=True)
class LayerStates:
    """What a layer keeps of the tokens that it has seen."""

    keys: bool = True
    """A key and a value per position."""
    states: int = 0
    """Recurrent states, and convolutions with the tokens that they look back at."""

    def empty(self, ahead: int) -> KeyLayer | StateLayer | KeyAndStateLayer:
        """Return a layer of a cache; `ahead` as of `RowCache`."""
        if not self.states:
            return KeyLayer(ahead)
        return KeyAndStateLayer(ahead, self.states) if self.keys else StateLayer(self.states)


def layer_states(config: Any) -> tuple[LayerStates, ...]:
    """Return what each layer of a transformers model keeps, by the cache that transformers makes for its config."""
    from transformers import DynamicCache

    layers = DynamicCache(config=config).layers
    return tuple(
        LayerStates(isinstance(layer, CacheLayerMixin), getattr(layer, "number_of_states", 0)) for layer in layers
    ) or (LayerStates(),) * int(config.num_hidden_layers)


class KeyLayer(CacheLayerMixin):
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

    def select(self, rows: Tensor, cut: int) -> None:
        """Keep these rows, int64 [B], without their first `cut` positions."""
        assert self.keys is not None and self.values is not None
        self.keys, self.values = self.keys[rows, :, cut:], self.values[rows, :, cut:]
        self.length -= cut

    def repeat(self, count: int, rows: Tensor, room: int) -> None:
        """Write copies of these rows, int64 [B], behind the first `count`; `room` as of `RowCache.repeat`."""
        assert self.keys is not None and self.values is not None
        end = count + len(rows)
        if len(self.keys) < end:
            filled = (slice(count), slice(None), slice(self.length))
            self.keys = _grown(self.keys[filled], self.length, self.ahead, max(room, end))
            self.values = _grown(self.values[filled], self.length, self.ahead, max(room, end))
        for states in (self.keys, self.values):
            states[count:end, :, : self.length] = states[rows, :, : self.length]

    def move(self, rows: Sequence[int], targets: Sequence[int], count: int) -> None:
        """Put rows in the place of others; the first `count` are kept."""
        del count  # the room of the others is freed when the layer grows next
        assert self.keys is not None and self.values is not None
        for states in (self.keys, self.values):
            filled = states[:, :, : self.length]
            for target, row in zip(targets, rows, strict=True):
                filled[target] = filled[row]

    def begin(self, other: KeyLayer, rows: Tensor, columns: Tensor) -> None:
        """Take over these positions, int64 [B, T], of rows, int64 [B], of another layer."""
        assert other.keys is not None and other.values is not None
        self.update(*(states[rows[:, None], :, columns].transpose(1, 2) for states in (other.keys, other.values)))

    def adopt(self, count: int, other: KeyLayer, others: int, ahead: int) -> None:
        """Append the `others` rows of another layer to the `count` of this one."""
        assert self.keys is not None and self.values is not None
        assert other.keys is not None and other.values is not None
        first, second = (count, self.length), (others, other.length)
        self.ahead = ahead
        self.keys = _stacked(self.keys, first, other.keys, second, ahead)
        self.values = _stacked(self.values, first, other.values, second, ahead)
        self.length = max(self.length, other.length)


class StateLayer(LinearAttentionCacheLayerMixin):
    """States of one layer, `[B, ...]` each, as they are after the last token of every row.

    transformers writes the states of decode steps into these tensors, and hands over new ones after several tokens.
    """

    def __init__(self, number_of_states: int = 1) -> None:
        super().__init__(number_of_states=number_of_states)

    def lazy_initialization(self, *_: object, **__: object) -> None:
        """Do nothing: tensors are taken over as they come."""

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: object
    ) -> Tensor:
        """Return what the convolution reads, [B, C, T or more], and keep its last `conv_kernel_size` positions."""
        before = self.conv_states[state_idx]
        size = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        if before is not None:
            full = torch.cat([before, conv_states], dim=-1)
        else:
            full = F.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        self.conv_states[state_idx] = full[..., -size:].clone()
        self.conv_kernel_size[state_idx] = size
        self.is_conv_states_initialized[state_idx] = self.has_previous_state[state_idx] = True
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: object) -> Tensor:
        """Keep the states after the last token."""
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states

    def _change(self, *others: StateLayer, by: Any) -> None:
        """Put `by(states, *states of others)` in the place of each of the states."""
        for number in range(self.number_of_states):
            for name in ("conv_states", "recurrent_states"):
                mine, *theirs = (getattr(layer, name)[number] for layer in (self, *others))
                if mine is not None:
                    getattr(self, name)[number] = by(mine, *theirs)

    def select(self, rows: Tensor, cut: int) -> None:
        """Keep these rows, int64 [B]; padding at their left is in no state."""
        del cut
        self._change(by=lambda states: states[rows])

    def repeat(self, count: int, rows: Tensor, room: int) -> None:
        """Append copies of these rows, int64 [B], to the first `count`."""
        del room
        self._change(by=lambda states: torch.cat([states[:count], states[rows]]))

    def move(self, rows: Sequence[int], targets: Sequence[int], count: int) -> None:
        """Put rows in the place of others; the first `count` are kept."""

        def moved(states: Tensor) -> Tensor:
            for target, row in zip(targets, rows, strict=True):
                states[target] = states[row]
            return states[:count]

        self._change(by=moved)

    def adopt(self, count: int, other: StateLayer, others: int, ahead: int) -> None:
        """Append the `others` rows of another layer to the `count` of this one."""
        del count, others, ahead
        self._change(other, by=lambda mine, theirs: torch.cat([mine, theirs]))


class KeyAndStateLayer(StateLayer, KeyLayer):  # type: ignore[override]  # transformers' own bases disagree
    """Keys and values of attention beside the states of a recurrent half of the same layer."""

    def __init__(self, ahead: int, number_of_states: int = 1) -> None:
        KeyLayer.__init__(self, ahead)
        StateLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *states: Tensor, **_: object) -> None:  # type: ignore[override]
        KeyLayer.lazy_initialization(self, *states)

    def select(self, rows: Tensor, cut: int) -> None:
        StateLayer.select(self, rows, cut)
        KeyLayer.select(self, rows, cut)

    def repeat(self, count: int, rows: Tensor, room: int) -> None:
        StateLayer.repeat(self, count, rows, room)
        KeyLayer.repeat(self, count, rows, room)

    def move(self, rows: Sequence[int], targets: Sequence[int], count: int) -> None:
        StateLayer.move(self, rows, targets, count)
        KeyLayer.move(self, rows, targets, count)

    def adopt(self, count: int, other: Any, others: int, ahead: int) -> None:
        StateLayer.adopt(self, count, other, others, ahead)
        KeyLayer.adopt(self, count, other, others, ahead)


def _grown(states: Tensor, length: int, ahead: int, rows: int = 0) -> Tensor:
    """Return a copy with room for more positions than `length`, and for `rows`."""
    buffer = _room(states, max(rows, len(states)), length, ahead)
    buffer[: len(states), :, : states.shape[2]] = states
    return buffer


def _room(like: Tensor, rows: int, length: int, ahead: int) -> Tensor:
    """Return room for more than `length` positions, not filled: nobody reads on behind the filled ones.

    Of short responses a whole block would be mostly empty.
    """
    capacity = min(-(-(length + 1) // BLOCK) * BLOCK, length + max(ahead, 1))
    return like.new_empty(rows, like.shape[1], capacity, like.shape[3])


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
