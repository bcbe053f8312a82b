"""Fused kernels of liger-kernel (arXiv:2410.10989): norms and gated MLPs, and log-probs straight from hidden states.

Checked against liger-kernel 0.8.5; earlier versions compute a wrong weight gradient for per-token losses.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from roll.configs.catalog.family_table import FAMILIES, family_of
from roll.configs.checks.machine_checks import MISSING
from roll.strategies.training.logits import HeadRequest


def require_liger(key: str, device: torch.device) -> None:
    """Raise `ValueError` unless liger-kernel can run here."""
    if device.type == "cpu":
        raise ValueError(f"{key} needs an accelerator, and this rank has none: remove it")
    try:
        import liger_kernel.transformers  # noqa: F401
    except ImportError:
        raise ValueError(f"{key}: {MISSING['liger_kernel']}") from None


def use_liger_layers(model: nn.Module) -> None:
    """Let this model compute its norms and gated MLPs with liger's kernels; others of its class stay as they are.

    Rotary embeddings stay transformers' own: liger can only replace them for all models of the process. Raises
    `ValueError` for a type of model that wasn't checked.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    kind = str(model.config.model_type)  # type: ignore[union-attr]
    kernels = family_of(kind).liger
    if kernels is None:
        known = sorted((family.liger == "norms", name) for name, family in FAMILIES.items() if family.liger)
        expected = ", ".join(name for _, name in known)
        raise ValueError(f"use_liger: models of type {kind} can't use it; those that can: {expected}")
    source = sys.modules[type(model).__module__]
    before = dict(vars(source))
    try:
        _apply_liger_kernel_to_instance(
            model=model,
            rope=False,
            cross_entropy=False,
            fused_linear_cross_entropy=False,
            rms_norm=True,
            swiglu=kernels == "norms and MLPs",
        )
    finally:
        # It also puts its classes in the place of transformers', for models built later by anyone.
        for name, value in before.items():
            setattr(source, name, value)


def fused_logprobs(hidden: Tensor, head: nn.Module, targets: Tensor, temperature: float) -> Tensor:
    """Return log softmax(head(hidden) / temperature) at `targets` without logits in memory: float32 [N].

    `hidden` is [N, D], `head` a linear layer, `targets` int64 [N]. The backward pass computes the logits once more.
    """
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    weight: Any = head.weight
    bias: Any = head.bias
    if temperature != 1.0:
        hidden = hidden / temperature
        bias = None if bias is None else bias / temperature
    # Gradients of a weight shared by many tokens are sums: float32, whatever the weight's own type.
    return -liger_fused_linear_cross_entropy(
        hidden, weight, targets, bias=bias, reduction="none", accum_dtype=torch.float32
    )


def can_fuse(head: Any, softcap: float | None, request: HeadRequest) -> bool:
    """Return whether `fused_logprobs` computes what is asked: log-probs alone, no soft cap, a plain linear head."""
    return type(head) is nn.Linear and softcap is None and request == HeadRequest()
