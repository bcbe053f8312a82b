"""Discounted sums along rows whose masked entries are stepped over, without a loop over tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 64
"""Tokens that one matrix product sums; the loop runs over chunks."""


class PackedRows:
    """Puts the masked entries of [B, T] side by side, [B, n] in float64, and back; n is the longest row's number."""

    def __init__(self, mask: Tensor) -> None:
        self._mask, lengths = mask, mask.sum(1)
        self._width = int(lengths.max()) if len(lengths) else 0
        self._source = mask.flatten().nonzero()[:, 0]
        shift = torch.arange(len(lengths), device=mask.device) * self._width - (lengths.cumsum(0) - lengths)
        ranks = torch.arange(len(self._source), device=mask.device)
        self._place = ranks + shift.repeat_interleave(lengths)

    def pack(self, values: Tensor) -> Tensor:
        """Move the masked entries of [B, T] to [B, n], zeros behind each row's last entry."""
        packed = values.new_zeros(len(self._mask) * self._width, dtype=torch.float64)
        packed.index_copy_(0, self._place, values.flatten()[self._source].to(torch.float64))
        return packed.view(len(self._mask), self._width)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Move [B, n] back to [B, T], zeros outside the mask."""
        values = torch.zeros(self._mask.numel(), dtype=dtype, device=packed.device)
        values[self._source] = packed.flatten()[self._place].to(dtype)
        return values.view(self._mask.shape)


def discounted_sums(terms: Tensor, factor: float) -> Tensor:
    """Return sum_{s >= t} factor^(s - t) terms_s along each row, [B, n]; chunk by chunk, from right to left."""
    rows, width = terms.shape
    chunks = -(-width // _CHUNK)
    padded = F.pad(terms, (0, chunks * _CHUNK - width)).view(rows, chunks, _CHUNK)
    place = torch.arange(_CHUNK, device=terms.device)
    distance = place[:, None] - place[None, :]
    base = torch.tensor(factor, dtype=terms.dtype, device=terms.device)
    sums = padded @ (base ** distance.clamp(min=0)).tril()
    to_next_chunk = base ** (_CHUNK - place)
    carried = terms.new_zeros(rows, 1)
    for chunk in reversed(range(chunks)):
        sums[:, chunk] += carried * to_next_chunk
        carried = sums[:, chunk, :1].clone()
    return sums.view(rows, chunks * _CHUNK)[:, :width]
