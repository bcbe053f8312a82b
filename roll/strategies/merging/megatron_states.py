"""Megatron-core's distributed checkpoints (`torch_dist`): whole tensors by its names, whatever ranks wrote them.

Two ways of naming layers are read: one name per layer (`decoder.layers.3.mlp...`, as this project writes them) and
one name for all of them, with the layers stacked in front (`decoder.layers.mlp...`, Megatron-LM's default).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from roll.strategies.megatron.mapping import MappedParameter, WeightTable
from roll.strategies.megatron.megatron_architecture import architecture
from roll.strategies.megatron.megatron_weights import assembled, entries_of, module_name
from roll.strategies.merging.torch_states import read_torch, torch_names

_EMBEDDING = "embedding.word_embeddings.weight"
_HEADS = {"value": "value_head.weight", "reward": "value_head.weight"}
_STORED = {
    # Where a norm is fused into the layer after it, and where it stands alone.
    "pre_mlp_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
}


def megatron_weights(state: Path, config: Any, kind: str) -> dict[str, Tensor]:
    """Return the weights in such a checkpoint under the names of the role's module.

    Raises `ValueError` for a model that Megatron roles can't have, and for tensors that are missing or don't fit.
    """
    table = WeightTable(architecture(config))
    names = torch_names(state)
    prefix = next((name.removesuffix(_EMBEDDING) for name in names if name.endswith(_EMBEDDING)), None)
    if prefix is None:
        raise ValueError(f"{state} holds no model of Megatron: it has no {_EMBEDDING}")
    tensors = read_torch(state, lambda name: name.startswith(prefix) and not name.startswith("optimizer"))
    stored = _Stored({name.removeprefix(prefix): tensor for name, tensor in tensors.items()}, state)
    weights: dict[str, Tensor] = {}
    owner = {"policy": "lm.", "value": "backbone.", "reward": "classifier."}[kind]
    for layer, entry in entries_of(table, kind):
        matrix = stored.find(entry, layer)
        for tensor, full in zip(entry.tensors, assembled(entry, [matrix]), strict=True):
            weights[owner + module_name(tensor, kind)] = full
    if kind in _HEADS:
        head = stored.full_tensor(_HEADS[kind])
        weights["value_head.weight" if kind == "value" else "classifier.score.weight"] = head
    return weights


class _Stored:
    def __init__(self, tensors: dict[str, Tensor], state: Path) -> None:
        self._tensors, self._state = tensors, state

    def full_tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ValueError(f"{self._state} lacks {name}, which the model has")
        return self._tensors[name]

    def find(self, entry: MappedParameter, layer: int | None) -> Tensor:
        """Return the matrix of an entry, of all experts if it has some; padding of the vocabulary is cut off."""
        tried = _names(entry)
        for name in tried:
            if layer is None and name in self._tensors:
                return _fitting(self._tensors[name], entry, name)
            if layer is not None and f"decoder.layers.{layer}.{name}" in self._tensors:
                return _fitting(self._tensors[f"decoder.layers.{layer}.{name}"], entry, name)
            if layer is not None and f"decoder.layers.{name}" in self._tensors:
                return _fitting(self._tensors[f"decoder.layers.{name}"][layer], entry, name)
        where = "" if layer is None else f"decoder.layers.{layer}."
        raise ValueError(f"{self._state} lacks {' and '.join(where + name for name in tried)}, which the model has")


def _names(entry: MappedParameter) -> tuple[str, ...]:
    """Return the names that a checkpoint may have for an entry."""
    if entry.experts:
        linear = "linear_fc1" if "linear_fc1" in entry.parameters[0] else "linear_fc2"
        return (f"mlp.experts.experts.{linear}.weight", f"mlp.experts.{linear}.weight")
    return tuple(dict.fromkeys(each for name in entry.parameters for each in _STORED.get(name, (name,))))


def _fitting(matrix: Tensor, entry: MappedParameter, name: str) -> Tensor:
    leading = (entry.experts,) if entry.experts else ()
    dim = 0 if entry.dim is None else entry.dim
    size = sum(segment.size for segment in entry.segments)
    wanted = list(entry.tensors[0].shape)
    wanted[dim] = size
    cut = matrix.narrow(0, 0, size) if name in (_EMBEDDING, "output_layer.weight") and len(matrix) >= size else matrix
    if tuple(cut.shape) != (*leading, *wanted):
        raise ValueError(
            f"{name} has shape {tuple(matrix.shape)} in the checkpoint, and the model's configuration says "
            f"{(*leading, *wanted)}: it is of another model"
        )
    return cut
