"""Gradient checkpointing of a model that otherwise computes as it does when it isn't trained.

transformers computes activations again only in modules whose `training` is true, and in train mode a model does more
than that: it drops, draws experts by chance (Phi-3.5-MoE), adds noise to routers, clips weights (Gemma 3n). The ratio
of new and old log-probs would be noise. So the model stays in eval mode, and only the layers that are computed again
are in train mode for as long as transformers asks them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
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


def recompute_activations(model: Any, *, selective: bool) -> None:
    """Put a transformers model into eval mode and have its layers computed again in the backward pass.

    `selective`: all but the products (`keep_products`). Raises `ValueError` for a model that can't.
    """
    how: dict[str, Any] = {"use_reentrant": False}
    if selective:
        how["context_fn"] = keep_products
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    except ValueError as error:  # transformers'
        raise ValueError(
            f"{type(model).__name__} can't compute activations again in the backward pass ({str(error).rstrip('.')}): "
            "write model_args.disable_gradient_checkpointing: true"
        ) from None
    model.eval()
    asked = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    layers = [module for module in asked if _asks_itself(module)]
    for module in layers or asked:
        module.training = True
        if layers:
            module._gradient_checkpointing_func = partial(_in_eval_mode, module, module._gradient_checkpointing_func)
        else:
            _drop_nothing(module)  # code of the folder's own, where a stack asks for its layers


def _asks_itself(module: nn.Module) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)


def _in_eval_mode(layer: nn.Module, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
    """Call `checkpoint` on a layer's pass, each run of which has the layer in eval mode."""

    def run(*inputs: Any) -> Any:
        layer.training = False
        try:
            return function(*inputs)
        finally:
            layer.training = True

    return checkpoint(run, *args)


def _drop_nothing(module: nn.Module) -> None:
    """Zero the probabilities of dropping that a module keeps as numbers; the modules below it are in eval mode."""
    for name, value in list(vars(module).items()):
        if isinstance(value, float) and "drop" in name:
            setattr(module, name, 0.0)
