"""A rank's part of a parameter as rectangles of whole tensors, which it writes to checkpoints and reads by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Block = tuple[list[int], list[int]]
"""(offsets, sizes) in each dimension."""


def blocks_between(sizes: Sequence[int], strides: Sequence[int], start: int, stop: int) -> Iterator[Block]:
    """Yield blocks of a strided array that are together its elements at places `start` to `stop` of its memory.

    Of a matrix that lies row by row: the rest of a row, whole rows, the beginning of a row. No two elements share a
    place.
    """
    order = sorted(range(len(sizes)), key=lambda dim: -strides[dim])
    for block in _blocks([(dim, sizes[dim], strides[dim]) for dim in order], start, stop):
        yield [block[dim][0] for dim in range(len(sizes))], [block[dim][1] for dim in range(len(sizes))]


def _blocks(dims: list[tuple[int, int, int]], start: int, stop: int) -> Iterator[dict[int, tuple[int, int]]]:
    if not dims:
        if start <= 0 < stop:
            yield {}
        return
    (dim, size, stride), inner = dims[0], dims[1:]
    extent = 1 + sum((other - 1) * step for _, other, step in inner)
    stride = max(stride, 1)  # of a single element the stride may be anything
    low = min(max(-(-start // stride), 0), size)
    high = max(min((stop - extent) // stride + 1, size), 0)
    if low < high:
        yield {dim: (low, high - low), **{other: (0, count) for other, count, _ in inner}}
    for row in sorted({low - 1, high}):
        if 0 <= row < size and not low <= row < high:
            for rest in _blocks(inner, start - row * stride, stop - row * stride):
                yield {dim: (row, 1), **rest}


@dataclass(frozen=True, kw_only=True)
class Rectangle:
    """A share of a parameter that is a rectangle of a whole tensor."""

    key: str
    """Name of the whole tensor in a checkpoint."""
    full_shape: tuple[int, ...]
    """Shape of the whole tensor."""
    begins: tuple[int, ...]
    """Where the rectangle begins in it."""
    sizes: tuple[int, ...]
    """Of the rectangle, perhaps without dimensions of size 1 in front."""
    offset: int
    """Place of its first element in the memory of the parameter."""
    strides: tuple[int, ...]
    """In the memory of the parameter."""
    may_grow: bool = False
    """Whether the stored tensor may have another shape, as a padded vocabulary."""


def pieces_of(rectangles: Iterable[Rectangle], part: slice, flat: Tensor, key: str = "") -> list[Any]:
    """Return the places in whole tensors of `part` of a parameter's elements, each with its view of `flat`.

    Args:
        rectangles: all of the parameter.
        part: of its memory.
        flat: the numbers of `part`, one after the other.
        key: put before the names of the tensors.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    pieces = []
    for all_of_it in rectangles:
        strides, first = all_of_it.strides, all_of_it.offset - part.start
        ones = (1,) * (len(all_of_it.full_shape) - len(all_of_it.sizes))
        for offsets, sizes in blocks_between(all_of_it.sizes, strides, -first, part.stop - all_of_it.offset):
            at = first + sum(i * stride for i, stride in zip(offsets, strides, strict=True))
            data = flat.as_strided(sizes, strides, flat.storage_offset() + at).view(*ones, *sizes)
            begins = (*[0] * len(ones), *offsets)
            pieces.append(
                ShardedTensor(
                    key=key + all_of_it.key,
                    data=data,
                    dtype=data.dtype,
                    local_shape=tuple(data.shape),
                    global_shape=all_of_it.full_shape,
                    global_offset=tuple(a + b for a, b in zip(all_of_it.begins, begins, strict=True)),
                    axis_fragmentations=None,  # of no regular grid: torch checks that they cover the tensor
                    allow_shape_mismatch=all_of_it.may_grow,
                )
            )
    return pieces


def rectangles_of(sharded: Any, parameter: nn.Parameter) -> list[Rectangle]:
    """Return the shares of a parameter that Megatron stores at `place`: a `ShardedTensor`, or a factory of some."""
    return [
        Rectangle(
            key=source.key,
            full_shape=source.global_shape,
            begins=source.global_offset,
            sizes=tuple(source.local_shape),
            offset=offset,
            strides=strides,
            may_grow=source.allow_shape_mismatch,
        )
        for source, offset, strides in _divided(sharded, parameter)
    ]


def _divided(sharded: Any, parameter: nn.Parameter) -> Iterator[tuple[Any, int, tuple[int, ...]]]:
    """Yield each tensor that holds a share of the parameter, the place of its first element there, its strides."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(sharded, ShardedTensor):
        yield sharded, 0, parameter.stride()
        return
    assert isinstance(sharded, ShardedTensorFactory), f"{type(sharded).__name__} has no place for a parameter"
    data = parameter.detach()
    for source in nested_values(sharded.build_fn(sharded.key, data, sharded.replica_id, None)):
        if source.data.untyped_storage()._cdata == data.untyped_storage()._cdata:
            yield source, source.data.storage_offset() - data.storage_offset(), source.data.stride()
            continue
        yield from _copied(sharded, parameter)
        return


def _copied(sharded: Any, parameter: nn.Parameter) -> Iterator[tuple[Any, int, tuple[int, ...]]]:
    """Yield the same of a factory that copies: find out by the numbers of the elements."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    numbers = torch.arange(parameter.numel()).view(parameter.shape)
    for source in nested_values(sharded.build_fn(sharded.key, numbers, sharded.replica_id, None)):
        first = source.data[(0,) * source.data.dim()]
        second = [source.data.select(dim, min(1, size - 1)) for dim, size in enumerate(source.data.shape)]
        strides = tuple(int(each[(0,) * each.dim()] - first) for each in second)
        yield source, int(first), strides
