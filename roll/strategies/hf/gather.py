"""Whole tensors from the shards of FSDP2, many to a collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roll.distributed.byte_account import count_gathered

Travelling: TypeAlias = tuple[str, Tensor, torch.dtype | None]
"""Name, perhaps sharded tensor, the type that its values are sent in; None: the one that they have."""
Gather: TypeAlias = Callable[[Iterable[Travelling]], Iterator[tuple[str, Tensor]]]
"""Whole tensors in the types that they are sent in, in the same order; every rank goes through all of it."""

_ALIGN = 64  # bytes; a multiple of every element's size, which a typed view needs
_HOST_BYTES = 32 << 20
_DEVICE_BYTES = 256 << 20
"""Bytes of whole tensors in one collective: enough for the speed of the link, little beside the weights."""


SentTypes: TypeAlias = Callable[[str, Tensor], torch.dtype | None]
"""(name, tensor of the model) -> type that it is sent in; None: the one that it has."""


def sent_types(model: nn.Module, dtype: torch.dtype | None) -> SentTypes:
    """Return what types the weights of `model` are sent in to an engine that computes in `dtype` (None: in their own).

    Engines cast what they load, so nothing is made wider for the way. Buffers, and what transformers keeps in float32
    whatever a model computes in, stay as they are.
    """
    names: set[str] = set()
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        names.update(getattr(model, attribute, None) or ())
    narrow = dtype if dtype is not None and dtype.itemsize < torch.float32.itemsize else None

    def sent(name: str, tensor: Tensor) -> torch.dtype | None:
        casts = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        return narrow if casts and not any(part in name for part in names) else None

    return sent


@dataclass(frozen=True)
class _Share:
    """A tensor that is cut over the ranks of `group`: along its first dimension as torch.chunk cuts, or its second."""

    name: str
    local: Tensor
    shape: torch.Size
    dtype: torch.dtype
    group: dist.ProcessGroup
    dim: int

    @property
    def part_bytes(self) -> int:
        """Return bytes of every rank's part but those of the last ranks, which may be smaller."""
        rows = -(-self.shape[self.dim] // dist.get_world_size(self.group))
        return rows * self.shape.numel() // self.shape[self.dim] * self.dtype.itemsize

    @property
    def padded_bytes(self) -> int:
        """Return what one rank's part takes in a batch."""
        return -(-self.part_bytes // _ALIGN) * _ALIGN


def gathered(stream: Iterable[Travelling]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors, cast before they are gathered; see `Gather`.

    What isn't sharded is yielded as it is, cast where it has another type. A batch is on its way while the tensors of
    the one before are used: two batches and one whole tensor are in memory beside the weights.
    """
    batch: list[_Share] = []
    used = 0
    ahead: Iterator[tuple[str, Tensor]] = iter(())
    for name, tensor, dtype in stream:
        dtype = dtype or tensor.dtype
        share = _share(name, tensor, dtype)
        size = 0 if share is None else share.padded_bytes * dist.get_world_size(share.group)
        if batch and (share is None or share.group is not batch[0].group or used + size > limit(share.local.device)):
            arriving = _begun(batch)
            yield from ahead
            ahead, batch, used = arriving, [], 0
        if share is None:
            yield from ahead
            ahead = iter(())
            yield name, _full(tensor.detach().to(dtype))
        else:
            batch.append(share)
            used += size
    arriving = _begun(batch) if batch else iter(())
    yield from ahead
    yield from arriving


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renames it


def limit(device: torch.device) -> int:
    """Return how many bytes of whole tensors one collective gathers."""
    return _HOST_BYTES if device.type == "cpu" else _DEVICE_BYTES


def _full(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    if full is not tensor:
        count_gathered(full.nbytes)
    return full


def _share(name: str, tensor: Any, dtype: torch.dtype) -> _Share | None:
    """Return this rank's part of a DTensor that is cut over one dimension of its mesh; None of any other."""
    if not hasattr(tensor, "full_tensor") or not tensor.dim():
        return None
    cut = [(i, placement) for i, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(cut) != 1 or not (cut[0][1].is_shard(0) or cut[0][1].is_shard(1)):
        return None
    (mesh_dim, placement), local = cut[0], tensor.detach().to_local()
    return _Share(name, local, tensor.shape, dtype, tensor.device_mesh.get_group(mesh_dim), placement.dim)


def _begun(batch: Sequence[_Share]) -> Iterator[tuple[str, Tensor]]:
    """Begin to gather a batch in one collective; what is returned waits for it, and cuts one tensor at a time out."""
    group, device = batch[0].group, batch[0].local.device
    ranks = dist.get_world_size(group)
    mine = torch.empty(sum(share.padded_bytes for share in batch), dtype=torch.uint8, device=device)
    start = 0
    for share in batch:
        part = mine[start : start + share.local.numel() * share.dtype.itemsize]
        part.view(share.dtype).view(share.local.shape).copy_(share.local)
        start += share.padded_bytes
    all_ranks = torch.empty(ranks * len(mine), dtype=torch.uint8, device=device)
    work = _all_gather(all_ranks, mine, group=group, async_op=True)
    assert work is not None
    count_gathered(len(all_ranks))
    return _arrived(batch, work, mine, all_ranks.view(ranks, -1))


def _arrived(batch: Sequence[_Share], work: dist.Work, mine: Tensor, table: Tensor) -> Iterator[tuple[str, Tensor]]:
    work.wait()
    del mine  # the collective may have read it until here
    start = 0
    for share in batch:
        yield share.name, _assembled(share, table[:, start : start + share.part_bytes])
        start += share.padded_bytes


def _assembled(share: _Share, parts: Tensor) -> Tensor:
    """Return a tensor from the parts of every rank, uint8 [ranks, bytes]; those of the last ranks may be padded."""
    full = torch.empty(share.shape, dtype=share.dtype, device=parts.device)
    # Where the second dimension is cut, the parts of all ranks follow each other in each of the first.
    lines = share.shape[0] if share.dim else 1
    table, size = full.view(-1).view(torch.uint8).view(lines, -1), parts.shape[1] // lines
    for rank, part in enumerate(parts):
        target = table[:, rank * size : (rank + 1) * size]
        target.copy_(part.view(lines, -1)[:, : target.shape[1]])
    return full
