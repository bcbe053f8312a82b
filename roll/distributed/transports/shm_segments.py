"""Memory that every process of a machine can open: POSIX shared memory on the host, CUDA IPC on an accelerator.

A segment on the host is a file in /dev/shm that is locked while its maker lives, which tells it from litter. Its name
goes away as soon as everybody has opened it; the memory goes away with the last who has.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from roll.distributed.weights import WeightSyncError, tensor_of

Token: TypeAlias = dict[str, Any]
"""What another process opens a segment by: a path and a size, or the parts of a CUDA handle. Travels as JSON."""

Bytes: TypeAlias = npt.NDArray[np.uint8]

FOLDER = Path("/dev/shm")
PREFIX = "roll-weights-"
_OLD = 60.0  # seconds after which a file that nobody has locked is litter; a younger one may be about to be locked

_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
"""All pages at once: one by one, when they are first touched, they take several times as long."""
_numbers = itertools.count()

_MAX_REUSABLE = 2
REUSABLE_SIZES = range(1 << 20, (64 << 20) + 1)
"""Bytes of a segment that its process keeps for the next transfer. Smaller ones cost little to make, and larger ones
are of a tensor that needed it."""
_reusable: list[ShmSegment] = []
_reusable_lock = threading.Lock()


def available() -> bool:
    """Return whether this system has shared memory of this kind."""
    return sys.platform == "linux" and os.access(FOLDER, os.W_OK)


def free_bytes() -> int:
    """Return the bytes that are free there; 0 on a system that has no such memory."""
    return shutil.disk_usage(FOLDER).free if available() else 0


class ShmSegment:
    """Shared memory of the host, made by the sender. `flat` is uint8 [size]."""

    def __init__(self, transfer: str, size: int) -> None:
        sweep()
        self._path: Path | None = FOLDER / f"{PREFIX}{transfer}-{os.getpid()}-{next(_numbers)}"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            # Asking for the pages now makes a full folder an error; the first write would be a SIGBUS.
            os.posix_fallocate(self._fd, 0, size)
            memory = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED | _POPULATE)
            self.flat = tensor_of(np.frombuffer(memory, dtype=np.uint8))
        except OSError as error:
            self.close()
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise WeightSyncError(
                f"{size / 2**20:.0f} MiB of shared memory are needed for a bucket of weights, {FOLDER} has "
                f"{shutil.disk_usage(FOLDER).free / 2**20:.0f} MiB free: lower model_update_buffer_size_mb, give the "
                "container a larger one (docker: --shm-size), or set weight_transport to broadcast or file"
            ) from error
        self.size = size
        number = self._path.name.removeprefix(PREFIX)
        self.token: Token = {"path": str(self._path), "size": size, "name": number}

    def forget(self) -> None:
        """Take the name away: nobody else will open it."""
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            self._path = None

    def outlive(self) -> None:
        """Unlink the file and keep the memory: from now on other processes open it by this process's descriptor."""
        self.forget()
        self.token = {**self.token, "path": f"/proc/{os.getpid()}/fd/{self._fd}"}

    def close(self) -> None:
        """Let go; the memory is freed when every process has."""
        self.forget()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.flat = None  # type: ignore[assignment]


class DeviceSegment:
    """Memory of the sender's accelerator. Written after torch's own sharing of CUDA tensors; not run anywhere yet."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.flat: Tensor = torch.empty(size, dtype=torch.uint8, device=device)
        parts = self.flat.untyped_storage()._share_cuda_()
        self.token: Token = {
            "cuda": [part.hex() if isinstance(part, bytes) else part for part in parts],
            "bytes": [isinstance(part, bytes) for part in parts],
            "size": size,
        }

    def forget(self) -> None:
        """Do nothing: there is no name."""

    def close(self) -> None:
        """Let go."""
        self.flat = None  # type: ignore[assignment]


def make(transfer: str, size: int, device: torch.device, *, on_device: bool) -> ShmSegment | DeviceSegment:
    """Make a segment for tensors of this device."""
    if on_device and device.type == "cuda":
        return DeviceSegment(size, device)
    with _reusable_lock:
        fitting = [segment for segment in _reusable if segment.size >= size] if size in REUSABLE_SIZES else []
        if fitting:
            _reusable.remove(fitting[0])
            return fitting[0]
    return ShmSegment(transfer, size)


def keep(segment: ShmSegment | DeviceSegment) -> None:
    """Release a segment that nobody reads any more; the next transfer of this process may reuse it.

    Fresh memory costs as much as several copies, at both ends.
    """
    if isinstance(segment, ShmSegment) and segment.size in REUSABLE_SIZES:
        segment.outlive()
        with _reusable_lock:
            if len(_reusable) < _MAX_REUSABLE:
                _reusable.append(segment)
                return
    segment.close()


def attach(token: Token) -> Bytes | Tensor:
    """Open a segment by its `token` in any process of the machine: a read-only numpy array, or a tensor on the device.

    Writing into what is read-only ends the process; a private copy of a page would go stale unseen.
    """
    if "cuda" in token:
        parts = zip(token["cuda"], token["bytes"], strict=True)
        storage = torch.UntypedStorage._new_shared_cuda(*(bytes.fromhex(p) if b else p for p, b in parts))
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (token["size"],), (1,))
    fd = os.open(token["path"], os.O_RDONLY)
    try:
        memory = mmap.mmap(fd, token["size"], flags=mmap.MAP_SHARED | _POPULATE, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    return np.frombuffer(memory, dtype=np.uint8)


def discard(transfer: str) -> None:
    """Take away the names of a transfer whose sender can't any more."""
    for path in FOLDER.glob(f"{PREFIX}{transfer}-*"):
        path.unlink(missing_ok=True)


def sweep() -> None:
    """Delete what killed processes left behind."""
    for path in FOLDER.glob(f"{PREFIX}*"):
        try:
            if time.time() - path.stat().st_mtime < _OLD:
                continue
            fd = os.open(path, os.O_RDWR)
        except OSError:
            continue  # gone already, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:
            pass  # its maker lives
        finally:
            os.close(fd)
