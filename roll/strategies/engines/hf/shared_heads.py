"""Attention of a decode step on a CPU without copies of the keys and values that query heads share.

transformers repeats them for each query head wherever there is a mask, which at every step copies the whole cache as
often as heads share one. torch's kernel for CPUs takes shared heads as they are, and gives the same bits (a test
compares them). Without gradients: the backward pass would add up in another order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ATTENTION = "roll_shared_heads"  # name of our function among those of transformers


def share_heads(model: nn.Module) -> None:
    """Have a model on a CPU that attends by `sdpa` use this function; any other stays as it is."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    config: Any = model.config
    config = config.get_text_config()
    heads, shared = getattr(config, "num_attention_heads", 0), getattr(config, "num_key_value_heads", 0)
    settable = getattr(model, "_can_set_attn_implementation", None)
    if config._attn_implementation != "sdpa" or not shared or heads <= shared or settable is None or not settable():
        return
    if next(model.parameters()).device.type != "cpu":
        return
    AttentionInterface.register(_ATTENTION, shared_heads_attention)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
    model.set_attn_implementation(_ATTENTION)  # type: ignore[operator]


def attends_by_sdpa(model: nn.Module) -> bool:
    """Return whether a model attends by torch's own kernels, through this function or transformers'."""
    config: Any = model.config
    return config.get_text_config()._attn_implementation in ("sdpa", _ATTENTION)


def shared_heads_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' `AttentionInterface` wants it: ([B, T, H, E], no attention weights).

    `query` is [B, H, T, D], `key` and `value` [B, K, S, D] with K a divisor of H. What is asked for beyond a mask is
    left to transformers' own function.
    """
    plain = attention_mask is not None and query.shape[1] != key.shape[1] and not torch.is_grad_enabled()
    if not plain or options.get("position_bias") is not None or options.get("cache") is not None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return attended
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None
