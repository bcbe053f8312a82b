"""Ranks that share every row: DeepSpeed-Ulysses sequence parallelism (arXiv:2309.14509) on Hugging Face modules.

Consecutive ranks form a group that works on the same rows. A micro-batch is one line of rows laid end to end, padded to
a multiple of the group's size; each rank runs the model on its shard, attention exchanges heads for tokens
(`split_attention`), and the head runs where the shard predicts a scored token. Its outputs are gathered, so that every
rank computes the same loss, and each keeps the gradient of its own: summed over all ranks, parameters get it once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from roll.distributed.layout import RankLayout
from roll.distributed.worker import WorkerInfo


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
        """Form the groups of `size` ranks; the ranks of the role must be connected. Every rank calls this."""
        from torch.distributed.device_mesh import init_device_mesh

        groups = info.world_size // size
        mesh = init_device_mesh(device.type, (groups, size), mesh_dim_names=("data", "sequence"))
        place = RankLayout(dp_rank=info.rank // size, dp_size=groups, collects=info.rank % size == 0)
        return cls(info.rank % size, size, mesh.get_group("sequence"), mesh.get_group("data"), place)
