"""Reading a role's weights as its backend wrote them, under the names of the role's module."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from roll.strategies.hf.lora import IDENTITY
from roll.strategies.merging.torch_states import read_torch

HEAD = "value_head.weight"
"""Megatron's name for the scalar head of a critic or reward model."""


def read_deepspeed(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a role that ran on DeepSpeed."""
    from safetensors import safe_open

    index: dict[str, Any] = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    tensors = {}
    by_file: dict[str, list[str]] = {}
    for name, file in index["files"].items():
        if ":" not in name:  # a moment of AdamW
            by_file.setdefault(Path(file).name, []).append(name)
    for file, names in by_file.items():
        with safe_open(folder / file, framework="pt") as opened:
            tensors.update({name: opened.get_tensor(name) for name in names})
    return tensors


def module_weights(folder: Path, config: Any, kind: str) -> Mapping[str, Tensor]:
    """Return a role's weights under the names of the module that `kind` runs, heads included.

    Args:
        folder: of the role in a checkpoint.
        config: the model's, as transformers has it.
        kind: `policy`, `value` or `reward`.

    Raises:
        ValueError: no built-in backend writes such a folder, or it doesn't fit the model.
    """
    state = folder / "state"
    if (folder / "index.json").is_file():
        return read_deepspeed(folder)
    if not (state / ".metadata").is_file():
        raise ValueError(f"{folder} holds no states of fsdp2_train, deepspeed_train or megatron_train")
    if (state / "metadata.json").is_file() and (folder / IDENTITY).is_file():
        return _megatron_adapters(state, kind)
    if (state / "metadata.json").is_file():
        from roll.strategies.merging.megatron_states import megatron_weights

        return megatron_weights(state, config, kind)
    weights = read_torch(state, lambda name: name.startswith("model."))
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


def _megatron_adapters(state: Path, kind: str) -> dict[str, Tensor]:
    """Return what a checkpoint of Megatron with adapters holds: those, and a scalar head."""
    heads = {"value": {HEAD: HEAD}, "reward": {HEAD: "classifier.score.weight"}, "policy": {}}[kind]
    tensors = read_torch(state, lambda name: name in heads or (".lora_" in name and not name.startswith("optimizer.")))
    return {heads.get(name, name): tensor for name, tensor in tensors.items()}
