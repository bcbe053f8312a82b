"""Router replay in Megatron's layers.

Megatron's own queue of choices belongs to a whole process and to one order of passes. Here a layer's attention tells
its router which rows it runs, so any schedule of pipeline stages and whole recomputed layers find the right ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from roll.strategies.hf.hf_expert_replay import replayed
from roll.strategies.megatron.megatron_attention import MegatronPackedRows


class MegatronExpertReplay:
    """Stands for Megatron's `RouterReplay` in one layer."""

    def __init__(self, index: int) -> None:
        self.index = index
        """Of the layer."""
        self.rows: MegatronPackedRows | None = None
        """The micro-batch that the layer runs; set by its attention."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (scores, experts), both [N, K], of scores [N, E]; called by Megatron."""
        assert default_compute_topk is not None
        assert self.rows is not None
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.rows.experts is None:
            return values, own
        return replayed(scores, own, self.rows.experts[:, :, self.index].flatten(0, 1))


def attach(decoder: Any, sparse: tuple[bool, ...]) -> None:
    """Let the routers of a chunk's layers replay; `sparse` says which layers of the whole model have experts."""
    for layer in decoder.layers:
        if sparse[layer.layer_number - 1]:
            replay = MegatronExpertReplay(layer.layer_number - 1)
            layer.mlp.router.router_replay = layer.self_attention.core_attention.replay = replay
