"""`file`: a folder of safetensors shards with Hugging Face's index, complete from the moment it has its name.

Across machines it must lie on a file system that all of them see.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from roll.distributed.byte_account import count_copied
from roll.distributed.handles import Handle
from roll.distributed.transports import NamedWeights, Route
from roll.distributed.weights import WeightMismatch, WeightSyncError

_INDEX = "model.safetensors.index.json"
_VERSION = "version-"
_UNFINISHED = ".unfinished-"


def send(route: Route, stream: NamedWeights) -> list[Handle]:
    """Write the shards, then give the folder its name. What was begun is removed if it can't be finished."""
    root = Path(route.folder)
    begun = root / f"{_UNFINISHED}{route.transfer}"
    try:
        begun.mkdir(parents=True)
        _write(begun, route, stream)
        done = root / f"{_VERSION}{route.version:06d}-{route.transfer}"
        begun.rename(done)
    except OSError as error:
        raise WeightSyncError(f"weights of version {route.version} couldn't be written to {root}: {error}") from error
    finally:
        shutil.rmtree(begun, ignore_errors=True)
    return [str(done)]


def receive(route: Route, handles: Sequence[Handle], rank: int) -> Iterator[tuple[str, Tensor]]:
    """See `roll.distributed.transports.receive`."""
    folder = Path(handles[0])
    try:
        index = json.loads((folder / _INDEX).read_text())
        version = index["metadata"]["version"]
        if version != route.version:
            raise WeightMismatch(f"expected weights of version {route.version}, {folder} holds {version}")
        shards: dict[str, list[str]] = {}
        for name, shard in index["weight_map"].items():
            shards.setdefault(shard, []).append(name)
        for shard, names in shards.items():
            with safe_open(folder / shard, framework="pt") as file:
                for name in names:
                    yield name, file.get_tensor(name)
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise WeightSyncError(
            f"engine {rank} couldn't read weights of version {route.version} from {folder}: {error}; across machines, "
            "weight_transport: file needs an output_dir that all of them see"
        ) from error


def discard(root: Path, *, keep: Sequence[Handle] = ()) -> None:
    """Delete versions below `root` other than these, finished or not."""
    retained = {Path(handle).name for handle in keep}
    for folder in [*root.glob(f"{_VERSION}*"), *root.glob(f"{_UNFINISHED}*")]:
        if folder.name not in retained:
            shutil.rmtree(folder, ignore_errors=True)


def _write(folder: Path, route: Route, stream: NamedWeights) -> None:
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
        if waiting and sizes[0] + tensor.nbytes > route.bucket_bytes:
            flush()
        # A file can't hold two names for one memory, nor a view of a larger one.
        waiting[name] = tensor.detach().cpu().clone().contiguous()
        count_copied(2 * tensor.nbytes)  # here and in the page cache
        sizes[0] += tensor.nbytes
        sizes[1] += tensor.nbytes
    flush()
    index: dict[str, Any] = {"metadata": {"total_size": sizes[1], "version": route.version}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index))
