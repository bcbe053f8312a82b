"""Reading parts of Hugging Face weights: from safetensors without loading the rest, or from tensors in memory."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from roll.configs.catalog.family_table import FAMILIES
from roll.strategies.megatron.mapping import HfTensor
from roll.strategies.training.safetensor_files import open_safetensors, safetensors_files

_EXPERTS = tuple(family.experts for family in FAMILIES.values() if family.experts is not None)
_PARTS = {
    stored: part
    for experts in _EXPERTS
    for stored, part in zip(experts.parts_in_files, ("gate_proj", "up_proj", "down_proj"), strict=True)
}
"""What checkpoints call a matrix of an expert -> what it is."""
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""What a stacked tensor of experts consists of in checkpoints that keep each expert apart."""


def backbone_name(name: str) -> str:
    """Return the name in a backbone module of a tensor in a checkpoint, where experts may have other names."""
    name = name.removeprefix("model.")
    for experts in _EXPERTS:
        name = name.replace(f".{experts.folder_in_files}.", ".mlp.")
    return re.sub(r"(\.experts\.\d+\.)(\w+)\.", lambda m: f"{m[1]}{_PARTS.get(m[2], m[2])}.", name)


class WeightSource:
    """Tensors under their backbone names. `slices` maps the names they came with to anything with shape and slicing."""

    def __init__(self, slices: Mapping[str, Any]) -> None:
        self._slices = {backbone_name(name): value for name, value in slices.items()}

    @property
    def names(self) -> set[str]:
        """Return the backbone names of all tensors there are."""
        return set(self._slices)

    def parts(self, tensor: HfTensor, experts: int) -> list[str]:
        """Return names under which `tensor` is stored: its own, or without it those of its experts' parts."""
        if not experts or tensor.name in self._slices:
            return [tensor.name]
        folder, name = tensor.name.rsplit(".", 1)
        return [f"{folder}.{expert}.{part}.weight" for expert in range(experts) for part in _STACKED[name]]

    def check(self, tensor: HfTensor, experts: int) -> None:
        """Raise `ValueError` unless what is stored has the tensor's shape."""
        names = self.parts(tensor, experts)
        shape = tensor.shape
        if experts:
            parts = len(names) // experts
            shape = (experts, *shape) if names == [tensor.name] else (shape[0] // parts, *shape[1:])
        for name in names:
            actual = tuple(self._shape(name))
            if actual != shape:
                raise ValueError(f"weight {name!r} has shape {actual}, the model's configuration says {shape}")

    def _shape(self, name: str) -> Any:
        stored = self._slices[name]
        return stored.shape if isinstance(stored, Tensor) else stored.get_shape()

    def read(self, tensor: HfTensor, expert: int | None, dim: int | None, start: int, stop: int) -> Tensor:
        """Return `start` to `stop` along `dim` (None: all) of a tensor, or of one expert's part of it."""
        name, leading = tensor.name, ((expert,) if expert is not None and tensor.name in self._slices else ())
        if expert is not None and not leading:
            folder, stacked = name.rsplit(".", 1)
            parts = _STACKED[stacked]
            rows = tensor.shape[0] // len(parts)
            part = start // rows if dim == 0 else 0
            name = f"{folder}.{expert}.{parts[part]}.weight"
            if dim == 0:
                start, stop = start - part * rows, stop - part * rows
        window = () if dim is None else (*(slice(None),) * dim, slice(start, stop))
        result: Tensor = self._slices[name][(*leading, *window) or slice(None)]
        return result


@contextlib.contextmanager
def open_weights(source: str | Path | Mapping[str, Tensor]) -> Iterator[WeightSource]:
    """Yield the weights of a folder, a hub id, a GGUF file, or tensors that are there already.

    Only GGUF files and folders without safetensors are loaded as a whole, by transformers. Raises `ValueError` if a
    file is torn.
    """
    if isinstance(source, Mapping):
        yield WeightSource(source)
        return
    with contextlib.ExitStack() as opened:
        files = safetensors_files(str(source))
        yield WeightSource(_lazy(files, opened) if files else _loaded(str(source)))


def _lazy(files: list[Path], opened: contextlib.ExitStack) -> dict[str, Any]:
    slices = {}
    for file in files:
        handle = opened.enter_context(open_safetensors(file))
        slices.update({name: handle.get_slice(name) for name in handle.keys()})  # noqa: SIM118 - no mapping
    return slices


def _loaded(path: str) -> dict[str, Tensor]:
    import torch

    from roll.configs.schema.worker_config import ModelArgs
    from roll.strategies.training.pretrained import load_causal_lm, named_tensors

    return dict(named_tensors(load_causal_lm(ModelArgs(model_name_or_path=path), torch.float32)))
