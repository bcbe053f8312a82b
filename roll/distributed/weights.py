"""Weights in buckets of named tensors behind handles; `roll.distributed.transports` chooses between this way and
others.

Under `ray` a bucket lies in the object store, written once and read in place by every receiver of the machine. In one
process the handles lead to copies.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from roll.distributed.byte_account import count_copied
from roll.distributed.handles import Handle, crosses_processes, put, resolve

WeightPart: TypeAlias = Literal["merged", "base", "adapters"]
"""Of a model with LoRA: adapters merged into its weights, its weights without them, or the adapters alone. Any other
model is `merged`."""


class WeightSyncError(RuntimeError):
    """New weights didn't arrive, or not as they were sent; the engines must not go on with what they have."""


class WeightMismatch(WeightSyncError, ValueError):
    """Buckets that don't belong together, or not to the version that was asked for."""


@dataclass(frozen=True, slots=True)
class _Packed:
    """A tensor as plain bytes, which Ray keeps in shared memory without another copy."""

    data: Any  # numpy uint8, flat
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Bucket:
    version: int
    index: int
    last: bool
    tensors: tuple[tuple[str, Any], ...]  # (name, `_Packed` or the tensor itself)


class BucketWriter:
    """Collects a stream into buckets of about `bucket_bytes`, each behind a handle once it is full.

    One bucket at a time is held here; what is behind the handles is freed when the last of them is. In one process too
    they lead to copies, which stay as they are while the trainer goes on.
    """

    def __init__(self, bucket_bytes: int, version: int) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be >= 1, got {bucket_bytes}")
        self._bucket_bytes = bucket_bytes
        self._version = version
        self._handles: list[Handle] = []
        self._waiting: list[tuple[str, Tensor]] = []
        self._size = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add the next tensor; one that is larger than a bucket has a bucket of its own."""
        if self._waiting and self._size + tensor.nbytes > self._bucket_bytes:
            self._flush(last=False)
        self._waiting.append((name, tensor.detach() if crosses_processes() else tensor.detach().clone()))
        self._size += tensor.nbytes

    def finish(self) -> list[Handle]:
        """Return the handles of all buckets, in stream order."""
        self._flush(last=True)
        return self._handles

    def _flush(self, *, last: bool) -> None:
        contents: tuple[tuple[str, Any], ...] = tuple(self._waiting)
        if crosses_processes():
            contents = tuple((name, _pack(tensor)) for name, tensor in self._waiting)
        count_copied(self._size)  # by Ray, or before
        self._handles.append(put(_Bucket(self._version, len(self._handles), last, contents)))
        self._waiting, self._size = [], 0


def receive_weights(
    handles: Sequence[Handle], version: int = 0, *, timeout: float = 3600.0
) -> Iterator[tuple[str, Tensor]]:
    """Yield the (name, tensor) stream that a `BucketWriter` took, on the CPU if it crossed processes.

    The tensors may lie in memory that others read: copy them into the model, never write to them or keep them. Raises
    `WeightMismatch` for another version, or for buckets that are missing, doubled or out of order, and `TimeoutError`
    for one that doesn't come within `timeout` seconds.
    """
    complete = False
    for index, handle in enumerate(handles):
        maker = f"the trainer's rank 0, which has bucket {index} of weights of version {version},"
        bucket = resolve(handle, timeout=timeout, maker=maker)
        if bucket.version != version:
            raise WeightMismatch(f"expected weights of version {version}, bucket {index} holds {bucket.version}")
        if bucket.index != index or complete:
            raise WeightMismatch(f"bucket {bucket.index} arrived at place {index} of {len(handles)}")
        complete = bucket.last
        for name, content in bucket.tensors:
            yield name, _unpack(content) if isinstance(content, _Packed) else content
    if not complete:
        raise WeightMismatch(f"the last of the buckets of version {version} is missing, got {len(handles)}")


class Checksum:
    """A hash of names, dtypes, shapes and bytes of tensors, in whatever order they come; one pass, 16 bytes each."""

    def __init__(self) -> None:
        self._digests: list[bytes] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Take in one tensor."""
        head = f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|"
        digest = hashlib.blake2b(head.encode(), digest_size=16)
        digest.update(_bytes_of(tensor))
        self._digests.append(digest.digest())

    def hexdigest(self) -> str:
        """Return the hash of all tensors so far, 32 characters."""
        return hashlib.blake2b(b"".join(sorted(self._digests)), digest_size=16).hexdigest()


def weights_checksum(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return `Checksum` of a whole stream."""
    checksum = Checksum()
    for name, tensor in named:
        checksum.add(name, tensor)
    return checksum.hexdigest()


def _bytes_of(tensor: Tensor) -> Any:
    """Return the tensor's content as a flat numpy uint8 array; no copy for a contiguous tensor on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _pack(tensor: Tensor) -> _Packed:
    return _Packed(_bytes_of(tensor), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _unpack(packed: _Packed) -> Tensor:
    dtype = getattr(torch, packed.dtype)
    if packed.data.size == 0:
        return torch.empty(packed.shape, dtype=dtype)
    return tensor_of(packed.data).view(dtype).reshape(packed.shape)


def tensor_of(array: Any) -> Tensor:
    """Return a tensor on the memory of a numpy array, which it keeps alive; the array may be read-only."""
    with warnings.catch_warnings():
        # Whoever gets the tensor is told not to write.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
