"""`recompute_granularity: selective`: what is kept of a layer that is computed again in the backward pass."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

_NAMES = (
    *("aten::mm", "aten::addmm", "aten::_grouped_mm"),
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
)
"""Matrix products with weights, and attention that keeps no scores. Not `bmm`: a product of its is as large as all
scores of eager attention."""


def _kept() -> list[Any]:
    """Return those of the operators that this torch has."""
    importlib.import_module("torch.nn.attention.varlen")  # registers its operator
    spaces = ((getattr(torch.ops, space), name) for space, _, name in (full.partition("::") for full in _NAMES))
    return [getattr(space, name).default for space, name in spaces if hasattr(space, name)]


def keep_products() -> tuple[Any, Any]:
    """Return the contexts of a layer's forward pass and of its recomputation, as `torch.utils.checkpoint` takes them.

    The outputs of `_NAMES` are kept in the first and taken in the second; all else, which is cheap to compute and a
    large part of the memory, is computed again.
    """
    return create_selective_checkpoint_contexts(_kept())
