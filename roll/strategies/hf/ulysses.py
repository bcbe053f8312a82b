"""Ranks that share every row: DeepSpeed-Ulysses sequence parallelism (arXiv:2309.14509) on Hugging Face modules.

Consecutive ranks form a group that works on the same rows. A micro-batch is one line of rows laid end to end, padded to
a multiple of the group's size; each rank runs the model on its shard, attention exchanges heads for tokens
(`split_attention`), and the head runs where the shard predicts a scored token. Its outputs are gathered, so that every
rank computes the same loss, and each keeps the gradient of its own: summed over all ranks, parameters get it once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from roll.distributed.layout import RankLayout
from roll.distributed.worker import WorkerInfo
from roll.strategies.attention import check_heads, join_shards
from roll.strategies.micro import MicroLayout


@dataclass(frozen=True, eq=False)
class SequenceGroup:
    """This rank's place among those that share its rows."""

    rank: int
    """Index of its shard."""
    size: int
    group: ProcessGroup | None
    """Process group of the ranks that share its rows."""
    peers: ProcessGroup | None
    """Process group of the ranks with the same shard of other rows: all rows, each once."""
    layout: RankLayout

    @classmethod
    def join(cls, info: WorkerInfo, size: int, device: torch.device) -> SequenceGroup:
        """Form the groups; the ranks of the role must be connected. Every rank calls this.

        Raises:
            ValueError: `size` doesn't divide the role's ranks.
        """
        if info.world_size % size:
            raise ValueError(
                f"{info.role}.model_args.ulysses_size: {size} ranks to share each sequence don't divide the role's "
                f"{info.world_size} rank(s)"
            )
        from torch.distributed.device_mesh import init_device_mesh

        groups = info.world_size // size
        mesh = init_device_mesh(device.type, (groups, size), mesh_dim_names=("data", "sequence"))
        place = RankLayout(dp_rank=info.rank // size, dp_size=groups, collects=info.rank % size == 0)
        return cls(info.rank % size, size, mesh.get_group("sequence"), mesh.get_group("data"), place)

    def check_heads(self, model: nn.Module) -> None:
        """Raise `ValueError` for a model whose heads can't be spread over the group."""
        config: Any = model.config
        text = config.get_text_config()
        heads = text.num_attention_heads
        try:
            check_heads(heads, getattr(text, "num_key_value_heads", None) or heads, self.size)
        except ValueError as error:
            raise ValueError(f"model_args.ulysses_size: {type(model).__name__}: {error}") from None

    def shard(self, layout: MicroLayout) -> MicroLayout:
        """Return this rank's part of a packed layout whose length is a multiple of the group's size."""
        width = layout.ids.shape[1] // self.size
        part = slice(self.rank * width, (self.rank + 1) * width)
        mine = self._mine(layout)
        return replace(
            layout,
            ids=layout.ids[:, part],
            positions=layout.positions[:, part],
            index=layout.index[mine] - self.rank * width,
            targets=layout.targets[mine],
            group=self.group,
        )

    def _mine(self, layout: MicroLayout) -> Tensor:
        """bool [S], which of the scored tokens this rank's shard predicts."""
        return layout.index // (layout.ids.shape[1] // self.size) == self.rank

    def gather(self, scored: Tensor, layout: MicroLayout) -> Tensor:
        """Values at the scored positions of every rank's shard, in the order of the whole `layout`: [S, ...]."""
        return join_shards(scored, self._mine(layout).nonzero()[:, 0], len(layout.index), self.group)
