"""`roll resume` and `roll export`: runs that are there already, by their folders."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from roll.api.launch import inside, relocated, resumed, stored_config
from roll.checkpoint import CheckpointStore
from roll.checkpoint.best import LINK, best_of
from roll.checkpoint.files import MANIFEST, Checkpoint, read_manifest
from roll.cli.exits import Exit
from roll.cli.train import run
from roll.configs.schema.checkpoint_config import is_address
from roll.configs.schema.run_config import RunConfig
from roll.pipelines.run.stored_config import CONFIG_FILE, run_directory
from roll.utils.secrets import without_passwords
from roll.utils.terminal import say

if TYPE_CHECKING:
    from roll.strategies.merging import Merge

_DOWNLOAD_SECONDS = 24 * 3600.0


def resume(options: argparse.Namespace) -> int:
    """Go on with a run."""
    with resumed(options.run_folder, options.overrides) as config:
        return run(config)


def export(options: argparse.Namespace) -> int:
    """Write the model of a checkpoint, which is a folder itself or one of a run's."""
    target = options.output.absolute() if options.output else None
    if is_address(options.run_folder):
        from roll.checkpoint.remote_store import download

        with tempfile.TemporaryDirectory() as staging:
            checkpoint = download(options.run_folder, Path(staging), _DOWNLOAD_SECONDS)
            return _export_folder(checkpoint.path, target, options)
    folder = Path(options.run_folder).resolve()
    if (folder / MANIFEST).is_file():
        return _export_folder(folder, target, options)
    if not (folder / CONFIG_FILE).is_file() and _is_foreign(folder):
        return _export_foreign(folder, target, options)
    config = stored_config(folder)
    with inside(run_directory(folder)):
        config = stored_config(folder, relocated(config, folder))
        checkpoint = _checkpoint(config, options.step)
        of_role = "" if options.role == "actor_train" else f"-{options.role}"
        target = target or folder / "exported" / f"step-{checkpoint.step}{of_role}"
        _export(checkpoint, target, options, config)
    return Exit.DONE


def _export_folder(folder: Path, target: Path | None, options: argparse.Namespace) -> int:
    """Write the model of a checkpoint without its run."""
    if options.step is not None:
        raise ValueError(f"--step: {folder} is one checkpoint; --step chooses among those of a run")
    of_role = "" if options.role == "actor_train" else f"-{options.role}"
    _export(read_manifest(folder), target or Path.cwd() / f"{folder.name}{of_role}-hf", options, None)
    return Exit.DONE


def _is_foreign(folder: Path) -> bool:
    """Return whether a folder may be a checkpoint of another program's, without importing what reads it."""
    pointers = ("latest", "latest_checkpointed_iteration.txt", ".metadata")
    return any((folder / name).is_file() for name in pointers) or any(folder.glob("*mp_rank_00_model_states.pt"))


def _export_foreign(folder: Path, target: Path | None, options: argparse.Namespace) -> int:
    """Write the model of a checkpoint that another program wrote."""
    if options.step is not None or options.role != "actor_train":
        raise ValueError(f"--step and --role: {folder} is no run of this program; give the folder of one checkpoint")
    target = target or Path.cwd() / f"{folder.name}-hf"
    _check_empty(target)
    from roll.pipelines.run.exporting import export_foreign

    export_foreign(folder, target, _merge(options))
    say(f"the model is in {target}")
    return Exit.DONE


def _check_empty(target: Path) -> None:
    if target.is_dir() and any(target.iterdir()):
        raise ValueError(f"{target} isn't empty; name another folder with -o")
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file, expected a folder to write")


def _merge(options: argparse.Namespace) -> Merge:
    from roll.strategies.merging import Merge

    return Merge(
        dtype=options.dtype, max_shard_size=options.max_shard_size, adapters_only=options.adapters, base=options.base
    )


def _export(checkpoint: Checkpoint, target: Path, options: argparse.Namespace, config: RunConfig | None) -> None:
    _check_empty(target)
    from roll.pipelines.run.exporting import export_checkpoint

    export_checkpoint(checkpoint, target, _merge(options), role=options.role, config=config)
    what = "the adapters" if options.adapters else "the model"
    say(f"{what} of step {checkpoint.step} {'are' if options.adapters else 'is'} in {target}")


def _checkpoint(config: RunConfig, step: int | str | None) -> Checkpoint:
    """Return the checkpoint of a step, the best or the newest one."""
    store = CheckpointStore(config.checkpoint_path)
    there = store.complete()
    if not there:
        hint = (
            f"; the trained model is in {config.export_path}" if (config.export_path / "config.json").is_file() else ""
        )
        raise ValueError(f"{config.checkpoint_path} has no complete checkpoint{hint}")
    if step == LINK:
        if (best := store.best()) is None:
            raise ValueError(_no_best(config, there[0]))
        return best
    chosen = [checkpoint for checkpoint in there if step in (None, checkpoint.step)]
    if not chosen:
        steps = ", ".join(str(checkpoint.step) for checkpoint in reversed(there))
        raise ValueError(f"--step: there is no checkpoint of step {step}; there are those of {steps}")
    return chosen[0]


def _no_best(config: RunConfig, newest: Checkpoint) -> str:
    best, address = best_of(newest.meta), config.checkpoint_config.address
    if best is None:
        return f"--step best: {config.checkpoint_path} has no best checkpoint; save_best chooses one while a run trains"
    where = f"; it is at {without_passwords(address, '***')}, from where roll export takes it" if address else ""
    return f"--step best: that is checkpoint-{best.step}, which isn't in {config.checkpoint_path}{where}"
