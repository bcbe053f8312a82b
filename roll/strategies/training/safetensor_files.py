"""The safetensors files of a model, and slices of their tensors without loading the rest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor


def safetensors_files(path: str) -> list[Path]:
    """Return the safetensors files of a folder or hub model; none where it has other formats only.

    Where it has a single file and an index beside it, the file, as transformers does. Raises `ValueError` if an index
    is none.
    """
    from transformers.utils import cached_file

    def find(name: str) -> Path | None:
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        return None if file is None else Path(file)

    if path.endswith(".gguf"):
        return []
    single = find("model.safetensors")
    if single is not None:
        return [single]
    index = find("model.safetensors.index.json")
    if index is None:
        return []
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} isn't the index of a model's files ({error}); get the model again") from error
    return [file for file in map(find, shards) if file is not None]


def names_in_files(path: str) -> list[str]:
    """Return the names of the tensors in the safetensors files of a folder or hub model."""
    names: list[str] = []
    for file in safetensors_files(path):
        with open_safetensors(file) as handle:
            names.extend(handle.keys())
    return names


class StoredTensors:
    """Names and shapes of the tensors in some files, and their rows.

    Files are closed after each read: what was read of an open one stays mapped, and counts as memory of this process.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Name -> shape."""
        self.types: dict[str, str] = {}
        """Name -> type, as safetensors spells it: BF16, F32."""
        for file in files:
            with open_safetensors(file) as handle:
                for name in handle.keys():  # noqa: SIM118 - no mapping
                    self._files[name] = file
                    tensor = handle.get_slice(name)
                    self.shapes[name], self.types[name] = tuple(tensor.get_shape()), tensor.get_dtype()

    def read(self, name: str, start: int = 0, stop: int | None = None, *, within: slice | None = None) -> Tensor:
        """Return rows `start` to `stop` (None: to the last) of a tensor, on the host; of a scalar all there is.

        `within`: of each of these rows only a part, along the second dimension.
        """
        with open_safetensors(self._files[name]) as handle:
            if not self.shapes[name]:
                full: Tensor = handle.get_tensor(name)
                return full
            rows = slice(start, self.shapes[name][0] if stop is None else stop)
            part: Tensor = handle.get_slice(name)[rows if within is None else (rows, within)]
            return part


def open_safetensors(file: Path) -> Any:
    """Return an opened file, a context manager. Raises `ValueError` if it is torn or of another format."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is no whole safetensors file ({error}); get the model again") from error
