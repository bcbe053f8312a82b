"""All rows of a line in one call of an attention kernel: torch's flash attention for sequences of any lengths.

Only an accelerator has it, for half precision. What it is told about the rows is made once and serves all layers, so
that no layer waits for the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import torch
import torch.nn.attention.varlen as torch_varlen
import torch.nn.functional as F
from torch import Tensor

_LARGEST_HEAD = 256
_LARGEST_FINE_HEAD = 192
"""Up to this size every multiple of 8 has a kernel. Between it and the largest, many cards have no backward pass."""


class RowPlan:
    """Rows laid end to end, for all layers of a micro-batch."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        """Tokens of each row, as the host knows them."""
        self.longest = max(self.lengths)
        self._bounds: dict[torch.device, Tensor] = {}

    def bounds(self, device: torch.device) -> Tensor:
        """Return where each row begins, and where the last one ends: int32 [rows + 1]; the first layer makes it."""
        if device not in self._bounds:
            bounds = list(accumulate(self.lengths, initial=0))
            self._bounds[device] = torch.tensor(bounds, dtype=torch.int32, device=device)
        return self._bounds[device]


def has_varlen_kernel(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Return whether `varlen_kernel` computes heads of this size and type, which is the one after autocast.

    It doesn't where `torch.backends.cuda.enable_flash_sdp(False)` was called.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or head_size > _LARGEST_HEAD:
        return False
    flash = torch.backends.cuda
    return flash.flash_sdp_enabled() and flash.is_flash_attention_available() and _has_function() and _is_new(device)


@cache
def _has_function() -> bool:
    """Return whether this release's function takes windows and shared heads, and is tried where there is no CUDA."""
    known = inspect.signature(torch_varlen.varlen_attn).parameters
    return torch.version.hip is None and {"scale", "window_size", "enable_gqa"} <= known.keys()


def _is_new(device: torch.device) -> bool:
    """Return whether it is an Ampere card or a later one: flash attention needs that."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def varlen_kernel(
    query: Tensor, key: Tensor, value: Tensor, rows: RowPlan, *, scale: float, window: int | None
) -> Tensor:
    """Return causal attention within each row: [N, H, E]; arguments as of `attention.varlen_attention`."""
    size = max(query.shape[-1], value.shape[-1])
    size = -(-size // 8) * 8 if size <= _LARGEST_FINE_HEAD else _LARGEST_HEAD
    # Zeros add nothing to a score, nor do the numbers that a wider value has more of.
    q, k, v = (F.pad(t, (0, size - t.shape[-1])) if t.shape[-1] < size else t for t in (query, key, value))
    before = -1 if window is None or window >= rows.longest else window - 1  # tokens seen beside the query's own
    bounds = rows.bounds(query.device)
    out = torch_varlen.varlen_attn(
        q,
        k,
        v,
        bounds,
        bounds,
        rows.longest,
        rows.longest,
        scale=scale,
        window_size=(before, 0),
        enable_gqa=k.shape[1] != q.shape[1],
    )
    assert isinstance(out, Tensor)
    return out.narrow(-1, 0, value.shape[-1])
