"""What of a micro-batch one rank feeds to the model: all rows; with context parallelism a shard of their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from roll.strategies.micro import MicroLayout
from roll.utils.logits import HeadRequest


@dataclass(frozen=True)
class ContextShard:
    """Tokens `start` to `start + width` of every row of a layout that was padded to a width all ranks can share."""

    ids: Tensor
    """int64 [B, W]"""
    positions: Tensor
    """int64 [B, W]; 0 begins a new row."""
    all_positions: Tensor
    """int64 [B, ranks * W], those of all shards."""
    index: Tensor
    """int64 [S], flattened position in `ids` of each scored token that this shard predicts."""
    targets: Tensor
    """int64 [S] or [S, 1 + K], these tokens, as in the layout."""
    place: Tensor
    """int64 [S], their numbers among the scored tokens of the whole layout."""

    def through(self, chunk: Any, request: HeadRequest) -> Any:
        """Return what a chunk of the model gives for it, see `TokenGPT.forward`."""
        return chunk(
            self.ids, self.positions, self.all_positions, index=self.index, targets=self.targets, request=request
        )


def context_shard(
    layout: MicroLayout, *, rank: int, ranks: int, multiple: int, least: tuple[int, int] = (0, 0)
) -> ContextShard:
    """Part `rank` of `ranks` equal parts of the layout, each padded to a multiple of `multiple` tokens.

    `least`: rows and tokens per row that the whole has at least, filled up with padding.
    """
    rows, tokens = layout.ids.shape
    padding = max(0, least[1] - tokens)
    padding += -(tokens + padding) % (ranks * multiple)
    width = (tokens + padding) // ranks
    more = max(0, least[0] - rows)
    ids = F.pad(layout.ids, (0, padding, 0, more))
    # In a packed line the padding is a row of its own; at the end of padded rows nothing looks at it.
    first = 0 if layout.packed else tokens
    device = layout.ids.device
    tail = torch.arange(first, first + padding, device=device).expand(rows, -1)
    positions = torch.cat([layout.positions, tail], dim=1)
    positions = torch.cat([positions, torch.arange(width * ranks, device=device).expand(more, -1)])
    row, column = layout.index // tokens, layout.index % tokens
    place = (column // width == rank).nonzero()[:, 0]
    part = slice(rank * width, (rank + 1) * width)
    return ContextShard(
        ids=ids[:, part],
        positions=positions[:, part],
        all_positions=positions,
        index=row[place] * width + column[place] - rank * width,
        targets=layout.targets[place],
        place=place,
    )
