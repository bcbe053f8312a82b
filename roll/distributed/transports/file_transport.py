"""`file`: a folder of safetensors shards with Hugging Face's index, complete from the moment it has its name.

Across machines it must lie on a file system that all of them see.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from roll.distributed.byte_account import count_copied
from roll.distributed.handles import Handle
from roll.distributed.transports import NamedWeights, Transfer, Transport
from roll.distributed.weights import WeightMismatch, WeightSyncError

_INDEX = "model.safetensors.index.json"
_VERSION = "version-"
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class FileTransport(Transport):
    """A folder of shards for each version."""

    name: ClassVar[str] = "file"

    folder: str
    """Where the versions are."""

    def send(self, stream: NamedWeights, rank: int) -> list[Handle]:
        """Write the shards, then give the folder its name. What was begun is removed if it can't be finished."""
        del rank
        root, version = Path(self.folder), self.transfer.version
        begun = root / f"{_UNFINISHED}{self.transfer.name}"
        try:
            begun.mkdir(parents=True)
            _write(begun, self.transfer, stream)
            done = root / f"{_VERSION}{version:06d}-{self.transfer.name}"
            begun.rename(done)
        except OSError as error:
            raise WeightSyncError(f"weights of version {version} couldn't be written to {root}: {error}") from error
        finally:
            shutil.rmtree(begun, ignore_errors=True)
        return [str(done)]

    def receive(self, handles: Sequence[Handle], rank: int) -> NamedWeights:
        folder, expected = Path(handles[0]), self.transfer.version
        try:
            index = json.loads((folder / _INDEX).read_text())
            version = index["metadata"]["version"]
            if version != expected:
                raise WeightMismatch(f"expected weights of version {expected}, {folder} holds {version}")
            shards: dict[str, list[str]] = {}
            for name, shard in index["weight_map"].items():
                shards.setdefault(shard, []).append(name)
            for shard, names in shards.items():
                with safe_open(folder / shard, framework="pt") as file:
                    for name in names:
                        yield name, file.get_tensor(name)
        except (OSError, SafetensorError, json.JSONDecodeError) as error:
            raise WeightSyncError(
                f"engine {rank} couldn't read weights of version {expected} from {folder}: {error}; across machines, "
                "weight_transport: file needs an output_dir that all of them see"
            ) from error

    def discard(self, retained: Sequence[Handle]) -> None:
        """Delete other versions than these, finished or not."""
        root, names = Path(self.folder), {Path(handle).name for handle in retained}
        for folder in [*root.glob(f"{_VERSION}*"), *root.glob(f"{_UNFINISHED}*")]:
            if folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        self.discard([])
        with contextlib.suppress(OSError):
            Path(self.folder).rmdir()


def _write(folder: Path, transfer: Transfer, stream: NamedWeights) -> None:
    weight_map: dict[str, str] = {}
    waiting: dict[str, Tensor] = {}
    sizes = [0, 0]  # of what is waiting, of all

    def flush() -> None:
        shard = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        try:
            save_file(waiting, folder / shard, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, among others
            raise OSError(str(error)) from error
        weight_map.update(dict.fromkeys(waiting, shard))
        waiting.clear()
        sizes[0] = 0

    for name, tensor in stream:
        if waiting and sizes[0] + tensor.nbytes > transfer.bucket_bytes:
            flush()
        # A file can't hold two names for one memory, nor a view of a larger one.
        waiting[name] = tensor.detach().cpu().clone().contiguous()
        count_copied(2 * tensor.nbytes)  # here and in the page cache
        sizes[0] += tensor.nbytes
        sizes[1] += tensor.nbytes
    flush()
    metadata = {"total_size": sizes[1], "version": transfer.version}
    (folder / _INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
