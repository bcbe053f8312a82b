"""Adapters on their way into vLLM, which reads them from a folder in peft's format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from roll.strategies.engines.async_engine import AsyncEngine
from roll.strategies.engines.engine_backend import AdapterBackend

PREFIX = "base_model.model."
"""What peft puts before every name."""
_ENDS = (".lora_A.weight", ".lora_B.weight")


class AdapterEngine(AsyncEngine):
    """Gets LoRA adapters apart from the base weights, and takes requests only once it has both."""

    _backend: AdapterBackend

    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._load(version, weights, self._backend.load, lacks_adapters=True)

    def update_adapters(self, version: int, adapters: Iterable[tuple[str, Tensor]]) -> None:
        self._load(version, adapters, self._backend.load_adapters)


class AdapterFiles:
    """Writes folders of adapters, all for the same layers, of rank `max_rank` at most."""

    def __init__(self, max_rank: int) -> None:
        self._max_rank = max_rank
        self._shapes: dict[str, tuple[int, ...]] = {}

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write a folder for adapters whose matrices B are scaled already.

        Raises `ValueError` for a foreign name, half of a pair, a rank above `max_rank`, or layers that differ from
        before.
        """
        ranks = self._check(tensors)
        largest = max(ranks.values())
        other = {layer: rank for layer, rank in ranks.items() if rank != largest}
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
            "bias": "none",
            "target_modules": list(ranks),
            # alpha = rank: a scaling of 1, for every layer.
            "r": largest,
            "lora_alpha": largest,
            "rank_pattern": other,
            "alpha_pattern": other,
        }
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config))

    def _check(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the rank by layer."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if self._shapes and shapes != self._shapes:
            odd = sorted(dict(shapes.items() ^ self._shapes.items()))
            raise ValueError(f"{len(odd)} adapter tensors are missing, unknown or of another shape, e.g. {odd[:3]}")
        ranks: dict[str, int] = {}
        for name, shape in shapes.items():
            layer = name.removeprefix(PREFIX).removesuffix(_ENDS[0]).removesuffix(_ENDS[1])
            pair = [PREFIX + layer + end for end in _ENDS]
            if name not in pair or not set(pair) <= set(shapes) or shapes[pair[0]][0] != shapes[pair[1]][1]:
                raise ValueError(f"adapter tensor {name!r}, of shape {shape}, is no half of a pair A and B")
            ranks[layer] = shapes[pair[0]][0]
        if not ranks:
            raise ValueError("an update of adapters brought none")
        if max(ranks.values()) > self._max_rank:
            raise ValueError(f"adapters have rank {max(ranks.values())}, the engine was started for {self._max_rank}")
        self._shapes = shapes
        return ranks
