"""From the names of transformers' modules to those of checkpoints, which other libraries load.

They differ for experts: modules have one stacked tensor per layer, checkpoints keep each expert's matrices apart.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

_APART = {
    "mixtral": ("w1", "w3", "w2"),
    "qwen2_moe": ("gate_proj", "up_proj", "down_proj"),
    "qwen3_moe": ("gate_proj", "up_proj", "down_proj"),
}
"""Model type -> names of an expert's gate, up and down matrices in its checkpoints."""


def checkpoint_tensors(model_type: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Return the tensor or tensors of a checkpoint that hold `tensor` of the module; views, nothing is copied."""
    if model_type == "mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    folder, _, last = name.rpartition(".")
    if model_type not in _APART or not folder.endswith(".experts"):
        yield name, tensor
        return
    gate, up, down = _APART[model_type]
    for expert, matrix in enumerate(tensor):
        if last == "gate_up_proj":
            yield f"{folder}.{expert}.{gate}.weight", matrix[: len(matrix) // 2]
            yield f"{folder}.{expert}.{up}.weight", matrix[len(matrix) // 2 :]
        else:
            yield f"{folder}.{expert}.{down}.weight", matrix
