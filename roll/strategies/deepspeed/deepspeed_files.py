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
from torch import Tensor

from roll.strategies.state_files import StateFiles

_FILE_BYTES = 1 << 30
COUNTS = "schedule.json"
"""How far the schedule and the optimizer are."""


def write(path: Path, tensors: Iterable[tuple[str, Tensor]], files: StateFiles, *, rank: int, ranks: int) -> None:
    """Write what all ranks see in the same order."""
    path.mkdir(parents=True, exist_ok=True)
    mine: dict[str, str] = {}
    shapes: dict[str, list[int]] = {}
    held: dict[str, Tensor] = {}

    def flush() -> None:
        if held:
            name = f"{rank}-{len(set(mine.values()))}.safetensors"
            files.tensors(path / name, held)
            mine.update(dict.fromkeys(held, name))
            held.clear()

    for i, (key, tensor) in enumerate(tensors):
        shapes[key] = list(tensor.shape)
        if i % ranks == rank:
            held[key] = tensor.detach().to("cpu", copy=True).contiguous()
        if sum(t.nbytes for t in held.values()) >= _FILE_BYTES:
            flush()
    flush()
    everyone: list[dict[str, str]] = [{} for _ in range(ranks)]
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        file_of = {key: file for part in everyone for key, file in part.items()}
        files.text(path / "index.json", json.dumps({"files": file_of, "shapes": shapes}))


class DeepSpeedCheckpoint:
    """What `write` left at `path`."""

    def __init__(self, path: Path, role: str) -> None:
        self._path, self._role = path, role
        try:
            index = json.loads((path / "index.json").read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} holds no checkpoint of {role} that DeepSpeed roles wrote: {error}") from None
        counts = path / COUNTS  # earlier versions have them in the index
        self.counts = counts.read_text() if counts.is_file() else json.dumps(index)
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
        """Return one tensor, on the CPU."""
        tensor: Tensor = self._open(self._files[key]).get_tensor(key)
        return tensor

    def _open(self, name: str) -> Any:
        try:
            return safe_open(self._path / name, framework="pt").__enter__()
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self._path} of {self._role} can't be read: {name}: {error}") from None
