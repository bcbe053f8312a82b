"""`delta_weight_sync`: of weights that both ends have from the sync before, only what has changed travels.

    trainer:  whole stream -> WeightCopy.encoded -> transport        compares with what it sent last
    engine:   transport -> WeightCopy.decoded -> whole stream        patches its copy and hands on all of it

Both ends keep a copy of the weights on the host, in the type that they travel in, under a name. A delta says which copy
it belongs to, and is refused by an end that has another one: never put on other weights. A copy that isn't complete,
because a transfer failed half way, has no name.

Of a tensor in which few elements changed, their places and new values travel; of others the whole; of one that is as it
was, nothing. Elements are compared bit by bit, so that also the sign of a zero and the bits of a NaN are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.distributed.byte_account import count_copied
from roll.distributed.transports.shm_places import share
from roll.distributed.weights import WeightMismatch

_INDEX, _VALUES = "@index", "@values"
"""After the name of a tensor: places in the flat tensor, then what stands there now."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Delta:
    """What a transfer of changes is between, by the names of the copies that both ends have."""

    snapshot: str
    """Of the weights that are sent: both ends have a copy of them afterwards."""
    base: str = ""
    """Of the copy that all ends have, of which only the changes travel. Empty: all weights do."""


class WeightCopy:
    """Weights of one end on the host, as they travelled last. `name` is empty while they aren't complete."""

    def __init__(self) -> None:
        self.name = ""
        self._tensors: dict[str, Tensor] = {}
        self._old: dict[str, Tensor] = {}  # those of the version before, while all weights come

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors.items())

    def encoded(self, weights: Iterator[tuple[str, Tensor]], base: str, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield what has to travel of `weights`, on the host; the copy is then of them, under `name`.

        `base`: name of the copy that the receivers have; empty: all of them travel. Raises `WeightMismatch` if this
        copy isn't the one of that name, or has other names, shapes or types.
        """
        before = self._begin(base)
        for each, tensor in weights:
            current = tensor.detach().cpu().contiguous()
            known = next(before, ("", current))
            if base and (each, current.shape, current.dtype) != (known[0], known[1].shape, known[1].dtype):
                raise WeightMismatch(f"weight {each!r} has a name, shape or type that it didn't have in {base}")
            if base:
                yield from self._changes(each, known[1], current)
            else:
                self._keep(each, current)
                yield each, current
            del tensor, current
        if base and (missing := next(before, None)) is not None:
            raise WeightMismatch(f"weight {missing[0]!r} of {base} is missing")
        self._end(name)

    def decoded(self, stream: Iterator[tuple[str, Tensor]], base: str, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights, given what came of them; the copy is then of them, under `name`.

        Tensors lie in the copy: they may be read until the next update, and never be written. Raises `WeightMismatch`
        if this copy isn't the one that the stream belongs to.
        """
        before = self._begin(base)
        index: Tensor | None = None
        for each, tensor in stream:
            if each.endswith(_INDEX):
                index = tensor
                continue
            arrived = each.removesuffix(_VALUES)
            for other, unchanged in before:
                if other == arrived:
                    break
                yield other, unchanged
            else:
                if base:
                    raise WeightMismatch(f"weight {arrived!r} isn't in the weights {base}, or came twice")
            if index is None:
                self._keep(arrived, tensor)
            else:
                _patch(self._tensors[arrived], index.long(), tensor)
            index = None
            del tensor  # its memory is needed for what comes next
            yield arrived, self._tensors[arrived]
        yield from before
        share(self._tensors.values())  # an engine's own processes read it where it lies
        self._end(name)

    def _begin(self, base: str) -> Iterator[tuple[str, Tensor]]:
        """Return what a delta is put on, in order; nothing where all weights come."""
        if base and base != self.name:
            raise WeightMismatch(f"a delta to weights {base} came to weights {self.name or 'that are not complete'}")
        self.name = ""
        self._old, self._tensors = self._tensors, dict(self._tensors) if base else {}
        return iter(list(self._tensors.items()))

    def _end(self, name: str) -> None:
        self._old = {}
        self.name = name

    def _keep(self, name: str, tensor: Tensor) -> None:
        """Copy a whole tensor, into the memory of the one before if it fits."""
        copy = self._old.pop(name, None)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._tensors[name] = copy.copy_(tensor)
        count_copied(tensor.nbytes)

    def _changes(self, name: str, previous: Tensor, current: Tensor) -> Iterator[tuple[str, Tensor]]:
        bits = _bits(current)
        index = (bits != _bits(previous)).nonzero().flatten()
        if not len(index):
            return
        short = torch.int32 if current.numel() <= torch.iinfo(torch.int32).max else torch.int64
        if len(index) * (short.itemsize + current.itemsize) >= current.nbytes:
            self._keep(name, current)
            yield name, current
            return
        values = current.view(-1)[index]
        _patch(previous, index, values)
        yield name + _INDEX, index.to(short)
        yield name + _VALUES, values


def _bits(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as flat whole numbers."""
    return tensor.view(-1).view(_BITS[tensor.itemsize])


def _patch(previous: Tensor, index: Tensor, values: Tensor) -> None:
    _bits(previous).index_copy_(0, index, _bits(values))
    count_copied(values.nbytes)
