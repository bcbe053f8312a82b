"""The trained model, written by the ranks of its role into one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll.checkpoint.model_export import write_model
from roll.distributed.cluster import Cluster
from roll.pipelines.workers.train_worker import TrainWorker


def export_actor(actor: Cluster, target: Path, record: dict[str, Any]) -> None:
    """Have the ranks of a role write its model as a Hugging Face folder, see `write_model`."""

    def write(folder: Path) -> dict[str, int]:
        of_ranks = actor.call(TrainWorker.export, str(folder))
        return {name: size for sizes in of_ranks for name, size in sizes.items()}

    hosts = ", ".join(sorted({host for host, _ in actor.processes}))
    write_model(target, write, record, writers=f"{hosts}, where {actor.role} runs" if hosts else "")
