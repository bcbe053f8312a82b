"""A residual stream in half precision, where float32 weights are computed with under autocast.

Autocast gives matrix products half precision, and nothing else: what an embedding and a norm with float32 weights hand
on is float32, and so is then all that lies between two products, with twice the bytes. Their outputs are cast here, so
that the stream has the type that FSDP's mixed precision gives it on several ranks. Weights and gradients stay float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def narrows_stream(device: torch.device, stored: torch.dtype, computed: torch.dtype) -> bool:
    """Whether a role that keeps its weights in `stored` and computes in `computed` has its stream cast on `device`.

    On a host half precision is emulated, and saves no time.
    """
    return device.type != "cpu" and stored == torch.float32 and computed == torch.bfloat16


def use_half_stream(model: nn.Module, device: torch.device, stored: torch.dtype, computed: torch.dtype) -> None:
    """Call `narrow_stream` where that pays."""
    if narrows_stream(device, stored, computed):
        narrow_stream(model, computed)


def narrow_stream(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the embeddings and norms of a transformers model, whose weights are float32, hand on `dtype`."""

    def cast(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return output.to(dtype) if isinstance(output, Tensor) and output.dtype == torch.float32 else None

    for module in model.modules():
        if isinstance(module, nn.Embedding) or _is_norm(module):
            module.register_forward_hook(cast)


def _is_norm(module: nn.Module) -> bool:
    """Whether all weights of its own have one dimension: a norm, of whatever class."""
    own = list(module.parameters(recurse=False))
    return bool(own) and all(parameter.dim() == 1 for parameter in own)
