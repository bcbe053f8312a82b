"""From a checkpoint to a Hugging Face folder, without training."""

from __future__ import annotations

import shutil
from pathlib import Path

from roll.checkpoint.files import Checkpoint
from roll.checkpoint.model_export import write_model
from roll.checkpoint.store import verify
from roll.configs.schema.run_config import RunConfig
from roll.distributed.executors import make_executor
from roll.pipelines.clusters import placements, ray_address
from roll.workers.train import TrainWorker, train_spec

ROLE = "actor_train"


def export_checkpoint(config: RunConfig, checkpoint: Checkpoint, target: Path) -> None:
    """Write the actor of a checkpoint to `target`, whole or not at all.

    Starts the actor's ranks alone, on the devices and with the backend of the configuration: only that backend reads
    its own states. A checkpoint that holds such a folder already (`save_hf_model`) is copied.
    """
    verify(checkpoint.path)
    record = {"exp_name": config.exp_name, "seed": config.seed, "step": checkpoint.step}
    ready = checkpoint.path / "hf_model"
    if (ready / "config.json").is_file():
        write_model(target, lambda folder: _copy(ready, folder), record)
        return
    placement = next(one for one in placements(config) if one.role == ROLE)
    executor = make_executor(
        config.executor,
        [placement],
        rpc_timeout=config.rpc_timeout,
        log_dir=config.logging_path / "workers",
        ray_address=ray_address(config),
    )
    with executor:
        spec = train_spec(config, ROLE, kind=config.kind_of(ROLE), trains=True, total_optimizer_steps=1)
        cluster = executor.create_cluster(placement, TrainWorker, (config, spec), balance=config.balance_batch)
        cluster.call(TrainWorker.load, str(checkpoint.path / ROLE))
        write_model(target, lambda folder: cluster.call(TrainWorker.export, str(folder)), record)


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)
