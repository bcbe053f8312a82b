"""Read torch's distributed checkpoints without running what is in them.

Such a folder has a pickle, `.metadata`, and values that torch pickles one by one; a pickle names functions that are
called while it is read. So resuming a checkpoint from somebody else would run their code. Here the index is read by an
unpickler that knows only the classes a checkpoint is made of, and torch is told to read the values in the same way.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PLAIN = {
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("builtins", "slice"),
    ("builtins", "complex"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch.distributed.checkpoint.filesystem", "SerializationFormat"),
    ("torch.distributed.checkpoint.api", "StorageMeta"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.metadata", "ShardMetadata"),
}
_METADATA = "torch.distributed.checkpoint.metadata"
_METADATA_CLASSES = {
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "_MEM_FORMAT_ENCODING",
}
_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_NOT_WEIGHTS_ONLY = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"  # torch refuses to have both


class UnsafeCheckpoint(ValueError):
    """A checkpoint whose pickle would call something that no checkpoint needs."""


class _IndexUnpickler(pickle.Unpickler):
    """Finds the classes that torch's index is made of, and dtypes; nothing that does something."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN or (module == _METADATA and name in _METADATA_CLASSES):
            return super().find_class(module, name)
        if module == "torch" and name.isidentifier():
            import torch

            value = getattr(torch, name, None)
            if isinstance(value, torch.dtype):
                return value
        raise UnsafeCheckpoint(f"it names {module}.{name}")


@contextlib.contextmanager
def plain_values_only(folder: Path) -> Iterator[None]:
    """Check the index of a distributed checkpoint, and have torch read plain values and tensors only meanwhile.

    Without an index nothing is checked: whoever reads the folder says what is missing.

    Raises:
        UnsafeCheckpoint: its index would call a function.
    """
    index = folder / ".metadata"
    if index.is_file():
        try:
            with index.open("rb") as file:
                _IndexUnpickler(file).load()
        except UnsafeCheckpoint as error:
            raise UnsafeCheckpoint(
                f"{index} isn't the index of a checkpoint that this library or torch wrote: {error}, which would run "
                "when it is read; don't resume from it, and ask where it came from"
            ) from None
        except Exception as error:  # any kind: a damaged pickle fails in many ways
            raise UnsafeCheckpoint(f"{index} can't be read: {type(error).__name__}: {error}") from error
    before = {name: os.environ.pop(name, None) for name in (_WEIGHTS_ONLY, _NOT_WEIGHTS_ONLY)}
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
