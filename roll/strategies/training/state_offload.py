"""Device memory given back for a while: the tensors of a role that sleeps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from roll.strategies.base import STATE_PARTS, StatePart


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor; a plain tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def storages(tensors: Iterable[Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """Return the memory behind tensors, each piece once, as far as it is on `device`."""
    by_data = {}
    for tensor in map(local, tensors):
        storage = tensor.untyped_storage()
        if tensor.device.type == device.type and storage.nbytes():
            by_data[storage._cdata] = storage
    return list(by_data.values())


def num_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Return bytes behind tensors on `device`; shared memory counts once."""
    return sum(storage.nbytes() for storage in storages(tensors, device))


_LARGEST_PIECE, _SMALLEST_PIECE = 1 << 30, 1 << 20
_ALIGNED = 512  # bytes on which a storage begins


def piece_sizes(total: int) -> list[int]:
    """Return powers of two that hold `total` bytes and at most 1 MiB more: 1 GiB each, the rest in falling sizes.

    torch's allocator of pinned memory rounds each request up to a power of two, so a request of any other size wastes
    up to as much as it asks for.
    """
    sizes = [_LARGEST_PIECE] * (total // _LARGEST_PIECE)
    rest = -(-(total % _LARGEST_PIECE) // _SMALLEST_PIECE) * _SMALLEST_PIECE
    while rest:
        sizes.append(1 << (rest.bit_length() - 1))
        rest -= sizes[-1]
    return sizes


def host_bytes(size: int, *, pinned: bool) -> Tensor:
    """Return uint8 [size] in host memory."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


def _laid_end_to_end(sizes: Iterable[int], *, pinned: bool) -> list[list[Tensor]]:
    """Return the host memory for each of the sizes: uint8 parts of pieces, several where one crosses an end."""
    sizes = list(sizes)
    pieces = piece_sizes(sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes))
    current, room, buffers = host_bytes(0, pinned=False), 0, []
    for size in sizes:
        parts, left = [], size
        while left:
            if not room:
                current = host_bytes(pieces.pop(0), pinned=pinned)
                room = len(current)
            taken = min(left, room)
            parts.append(current[len(current) - room :][:taken])
            left -= taken
            room -= min(room, -(-taken // _ALIGNED) * _ALIGNED)
        buffers.append(parts)
    return buffers


class Shelf:
    """Where tensors are while their role sleeps.

    The memory behind a tensor is emptied, not the tensor replaced: whoever refers to it (optimizer, FSDP's flat
    buffers, views) finds it again after `restore`.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[torch.UntypedStorage, int, list[Tensor] | None]] = []

    def __bool__(self) -> bool:
        return bool(self._kept)

    def store(self, tensors: Iterable[Tensor], device: torch.device, *, copy: bool = True) -> int:
        """Copy what is on `device` to host memory and free it there; returns the bytes freed.

        Without a copy, zeros come back.
        """
        stored, pinned = storages(tensors, device), device.type == "cuda"
        sizes = [storage.nbytes() for storage in stored]
        buffers: list[list[Tensor]] | list[None] = [None] * len(stored)
        if copy:
            buffers = _laid_end_to_end(sizes, pinned=pinned)
            for storage, parts in zip(stored, buffers, strict=True):
                _copy(storage, parts, back=False)
            if pinned:
                torch.cuda.synchronize(device)
        for storage, size, host in zip(stored, sizes, buffers, strict=True):
            storage.resize_(0)
            self._kept.append((storage, size, host))
        return sum(sizes)

    def restore(self) -> None:
        """Bring everything back to where it was."""
        for storage, size, host in self._kept:
            storage.resize_(size)
            if host is None:
                storage.fill_(0)  # type: ignore[attr-defined]
            else:
                _copy(storage, host, back=True)
        self._kept.clear()


class Shelves:
    """The shelves of a role's parts.

    `on_host`: those that wait on the host between their uses, so that whoever needs one brings it back.
    """

    def __init__(self, role: str) -> None:
        self._role = role
        self._shelves: dict[StatePart, Shelf] = {part: Shelf() for part in STATE_PARTS}
        self.on_host: frozenset[StatePart] = frozenset()

    def __getitem__(self, part: StatePart) -> Shelf:
        return self._shelves[part]

    def asleep(self, *parts: StatePart) -> list[StatePart]:
        """Return those of `parts` that nobody may read now."""
        return [part for part in parts if self._shelves[part]]

    def require_awake(self, *parts: StatePart) -> None:
        """Raise `RuntimeError` while one of these parts sleeps, unless it is `on_host`."""
        asleep = [part for part in parts if self._shelves[part] and part not in self.on_host]
        if asleep:
            raise RuntimeError(f"{self._role} sleeps without its {' and '.join(asleep)}: call wake first")


def _copy(storage: torch.UntypedStorage, parts: list[Tensor], *, back: bool) -> None:
    """Copy a storage's bytes to these parts, or `back`; in the order of the device's stream."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    for mine, part in zip(flat.split([len(part) for part in parts]), parts, strict=True):
        source, target = (part, mine) if back else (mine, part)
        target.copy_(source, non_blocking=part.is_pinned())
