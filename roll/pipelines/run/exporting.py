"""From a checkpoint to a Hugging Face folder, without training."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from roll.checkpoint.files import Checkpoint, CheckpointError, CheckpointWriteError, read_json
from roll.checkpoint.model_export import write_model
from roll.checkpoint.store import verify
from roll.configs.catalog.entries import OWN_PATH
from roll.configs.schema.run_config import RunConfig
from roll.distributed.executors import make_executor
from roll.pipelines.run.actor_export import export_actor
from roll.pipelines.run.clusters import placements, ray_address
from roll.pipelines.workers.train_worker import TrainWorker, train_spec
from roll.strategies.merging import Merge, merge_foreign, merge_states
from roll.strategies.training.model_folder import DESCRIPTION

ROLE = "actor_train"


def export_checkpoint(
    checkpoint: Checkpoint, target: Path, merge: Merge, *, role: str = ROLE, config: RunConfig | None = None
) -> None:
    """Write the model of a role in a checkpoint to `target`, whole or not at all.

    States are merged in this process, whichever backend and however many ranks wrote them. Those of a backend of the
    user's own are read by it, which takes the configuration of the run. A checkpoint that holds a Hugging Face folder
    already (`hf_model`) is copied, unless `merge` asks for something else.
    """
    verify(checkpoint.path)
    seed = read_json(checkpoint.path / "pipeline.json").get("seed")
    record = {"exp_name": checkpoint.meta.get("exp_name"), "seed": seed, "step": checkpoint.step}
    ready = checkpoint.path / "hf_model"
    if role == ROLE and merge in (Merge(), Merge(base=merge.base)) and (ready / "config.json").is_file():
        write_model(target, lambda folder: _copy(ready, folder), record)
        return
    states = checkpoint.path / role
    if not states.is_dir():
        there = sorted(path.name for path in checkpoint.path.iterdir() if path.is_dir())
        raise CheckpointError(f"{checkpoint.path} holds no {role}; it holds {', '.join(there) or 'no weights'}")
    if OWN_PATH.match(checkpoint.meta.get("strategies", {}).get(role, "")):
        _export_own(config, states, target, merge, role, record)
        return
    kind = "policy"
    if config is not None:
        kind = config.kind_of(role)
        if merge.base is None and not (states / DESCRIPTION).is_dir():
            merge = replace(merge, base=config.model_path(role))
    _written(target, lambda folder: merge_states(states, folder, merge, kind), record)


def export_foreign(folder: Path, target: Path, merge: Merge) -> None:
    """Write the model of a checkpoint that another program wrote with DeepSpeed or Megatron-core."""
    _written(target, lambda path: merge_foreign(folder, path, merge), {"exp_name": None, "source": str(folder)})


def _written(target: Path, write: Callable[[Path], None], record: dict[str, Any]) -> None:
    try:
        write_model(target, write, record)
    except CheckpointWriteError as error:
        if isinstance(error.__cause__, ValueError):  # what was to be read or asked for, not what was to be written
            raise error.__cause__ from None
        raise


def _export_own(
    config: RunConfig | None, states: Path, target: Path, merge: Merge, role: str, record: dict[str, Any]
) -> None:
    """Start the role's ranks alone, on the devices and with the backend of the configuration."""
    if config is None or merge != Merge():
        raise ValueError(
            f"{states} was written by a backend of your own, which alone reads it: export it by its run's folder, "
            "without options"
        )
    placement = next(one for one in placements(config) if one.role == role)
    executor = make_executor(
        config.executor,
        [placement],
        rpc_timeout=config.rpc_timeout,
        log_dir=config.logging_path / "workers",
        ray_address=ray_address(config),
    )
    with executor:
        spec = train_spec(config, role, kind=config.kind_of(role), trains=True, total_optimizer_steps=1)
        cluster = executor.create_cluster(placement, TrainWorker, (config, spec), balance=config.balance_batch)
        cluster.call(TrainWorker.load, str(states.absolute()))
        export_actor(cluster, target, record)


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)
