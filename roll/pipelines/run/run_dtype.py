"""Settles `model_args.dtype: auto` for a run: once, before anything reads it, by the controller for all machines.

    a checkpoint to go on from --> its type, whatever the machines have
    else                       --> what the machines of the roles have (roll/configs/checks/dtype_choice.py)

Workers get the settled configuration, and so does the run's folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from roll.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from roll.checkpoint.files import MANIFEST, parse_manifest
from roll.checkpoint.remote_store import RemoteCheckpoints, RemoteError
from roll.configs.checks.dtype_choice import THIS_MACHINE, auto_roles, choose_dtype, sentence, with_dtypes
from roll.configs.checks.machine_checks import Machine, this_machine
from roll.configs.schema.checkpoint_config import is_address
from roll.configs.schema.run_config import RunConfig

logger = logging.getLogger(__name__)
C = TypeVar("C", bound=RunConfig)


def settled(config: C) -> C:
    """Return the configuration with a type in place of every `auto`, and log which and why."""
    if not auto_roles(config):
        return config
    checkpoint = _resumed_from(config, remote=True)
    dtypes, line = _chosen(config, checkpoint, {} if _is_stored(checkpoint) else _machines(config))
    logger.info("%s", line)
    return with_dtypes(config, dtypes)


def foreseen(config: RunConfig) -> str | None:
    """Return the line that a run would begin with, as far as this machine and its disk tell; None: nothing is auto."""
    roles = auto_roles(config)
    if not roles:
        return None
    checkpoint = _resumed_from(config, remote=False)
    if config.num_nodes > 1 and not _is_stored(checkpoint):
        return f"dtype: auto of {', '.join(roles)} is chosen when the run has joined its {config.num_nodes} machines"
    return _chosen(config, checkpoint, {THIS_MACHINE: _here()})[1]


def dtypes_of(config: RunConfig) -> dict[str, str]:
    """Return the types by role, for a checkpoint."""
    return {role: worker.model_args.dtype for role, worker in config.roles.items()}


def _is_stored(checkpoint: Checkpoint | None) -> bool:
    return checkpoint is not None and "actor_train" in checkpoint.meta.get("dtypes", {})


def _chosen(
    config: RunConfig, checkpoint: Checkpoint | None, machines: Mapping[str, Machine]
) -> tuple[dict[str, str], str]:
    """Return the types of the roles with `auto`, and the line that says so."""
    roles = auto_roles(config)
    if checkpoint is None or not _is_stored(checkpoint):
        choice = choose_dtype(machines)
        return dict.fromkeys(roles, choice.dtype), sentence(choice.dtype, roles, choice.reason)
    stored = checkpoint.meta["dtypes"]
    dtypes = {role: str(stored.get(role, stored["actor_train"])) for role in roles}
    reason = f"{checkpoint.path} was written so"
    if config.num_nodes == 1 and (here := choose_dtype({THIS_MACHINE: _here()})).dtype not in dtypes.values():
        reason += f"; a new run would take {here.dtype}, because {here.reason}"
    return dtypes, sentence(" and ".join(dict.fromkeys(dtypes.values())), roles, reason)


def _machines(config: RunConfig) -> Mapping[str, Machine]:
    """Return the machines of the roles, by name; those of several are asked through Ray."""
    if config.num_nodes == 1:
        return {THIS_MACHINE: _here()}
    from roll.pipelines.run.clusters import open_executor, placements

    with open_executor(config, placements(config)) as executor:
        machines: dict[str, Machine] = executor.on_each_machine(this_machine)
        return machines


def _here() -> Machine:
    """Return this machine, without accelerators that are hidden from its processes."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return replace(this_machine(), accelerators=()) if hidden else this_machine()


def _resumed_from(config: RunConfig, *, remote: bool) -> Checkpoint | None:
    """Return the checkpoint that the run goes on from, by its manifest alone; None: it starts at its first step, or
    there is none, which is said when the checkpoint is read. `remote`: also ask the store of `checkpoint_config`."""
    wanted, address = config.resume_from_checkpoint, config.checkpoint_config.address
    if wanted is False or "extra" not in config.checkpoint_config.load_contents:
        return None
    store = CheckpointStore(config.checkpoint_path.absolute())
    with contextlib.suppress(CheckpointError, RemoteError):
        if is_address(wanted):
            parent, _, name = str(wanted).rstrip("/").rpartition("/")
            there = RemoteCheckpoints(parent, seconds=config.rpc_timeout).complete() if remote else []
            return next((one for one in there if f"checkpoint-{one.step}" == name), there[0] if there else None)
        if wanted not in (True, "auto", "best"):
            folders = (Path(str(wanted)), store.root / str(wanted))
            return next((parse_manifest(folder) for folder in folders if (folder / MANIFEST).exists()), None)
        if wanted == "best" and (best := store.best()) is not None:
            return best
        there = store.complete()
        if remote and address is not None:
            there += RemoteCheckpoints(address, seconds=config.rpc_timeout).complete()
        return max(there, key=lambda checkpoint: checkpoint.serial, default=None)
    return None
