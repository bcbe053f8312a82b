"""Checkpoints in one format for every ZeRO stage and number of ranks: named whole tensors in safetensors files.

Each rank keeps every n-th tensor and writes files of bounded size; `index.json` says which file has which tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_FILE_BYTES = 1 << 30


def write(path: Path, tensors: Iterable[tuple[str, Tensor]], steps: int, *, rank: int, ranks: int) -> None:
    """Write what all ranks see in the same order, and the optimizer steps taken."""
    path.mkdir(parents=True, exist_ok=True)
    mine: dict[str, str] = {}
    shapes: dict[str, list[int]] = {}
    held: dict[str, Tensor] = {}
    for i, (key, tensor) in enumerate(tensors):
        shapes[key] = list(tensor.shape)
        if i % ranks == rank:
            held[key] = tensor.detach().to("cpu", copy=True).contiguous()
        if sum(t.nbytes for t in held.values()) >= _FILE_BYTES:
            mine.update(_flush(path, held, f"{rank}-{len(set(mine.values()))}.safetensors"))
    mine.update(_flush(path, held, f"{rank}-{len(set(mine.values()))}.safetensors"))
    everyone: list[dict[str, str]] = [{} for _ in range(ranks)]
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        files = {key: file for part in everyone for key, file in part.items()}
        (path / "index.json").write_text(json.dumps({"optimizer_steps": steps, "files": files, "shapes": shapes}))


def _flush(path: Path, held: dict[str, Tensor], name: str) -> dict[str, str]:
    if held:
        save_file(held, path / name)
    written = dict.fromkeys(held, name)
    held.clear()
    return written


class Checkpoint:
    """What `write` left at `path`."""

    def __init__(self, path: Path, role: str) -> None:
        self._path, self._role = path, role
        try:
            index = json.loads((path / "index.json").read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} holds no checkpoint of {role} that DeepSpeed roles wrote: {error}") from None
        self.steps: int = index["optimizer_steps"]
        self._files: dict[str, str] = index["files"]
        self._shapes = {key: tuple(shape) for key, shape in index["shapes"].items()}

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `ValueError` unless the weights are those of a model with these names and shapes."""
        misfit = f"{self._path} doesn't fit the model of {self._role}"
        weights = {key for key in self._shapes if ":" not in key}
        for what, names in (("no", shapes.keys() - weights), ("one more,", weights - shapes.keys())):
            if names:
                raise ValueError(f"{misfit}: {len(names)} tensors differ; it has {what} {min(names)!r}")
        for name, shape in shapes.items():
            if self._shapes[name] != shape:
                raise ValueError(f"{misfit}: {name!r} has shape {self._shapes[name]}, expected {shape}")

    def read(self, key: str) -> Tensor:
        """One tensor, on the CPU."""
        tensor: Tensor = self._open(self._files[key]).get_tensor(key)
        return tensor

    def _open(self, name: str) -> Any:
        try:
            return safe_open(self._path / name, framework="pt").__enter__()
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self._path} of {self._role} can't be read: {name}: {error}") from None
