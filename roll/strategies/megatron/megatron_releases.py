"""Where the releases of Megatron-core differ that this package runs on: 0.16.1, the last for Python 3.11, and 0.19.2.

Both build, train, save and load the same models here; what they don't share stands in this file and nowhere else.
Megatron's optimizers, gradient buffers and packed rows are used by what both have
(`tests/strategies/test_megatron_releases.py`, and `make evidence EVIDENCE=megatron_release` for the other one).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from roll.strategies.state_files import StateFiles
from roll.utils.logging import errors_only

TRIED = ("0.16.1", "0.19.2")
"""docs/dependencies.md says how far."""
_COMMON = "common.pt"
"""Where 0.16.1 keeps what is no tensor; 0.19.2 reads it, and itself writes an object among the tensors instead."""


def checkpoint_writer(files: StateFiles) -> Any:
    """Return Megatron's format, written by torch's writer in this process.

    Megatron's own writer forks two processes per rank for each checkpoint, which a process with Ray's and gloo's
    threads in it mustn't do, and a daemonic one can't. 0.16.1 takes whatever derives from an abstract strategy, which
    0.19.2 hasn't got: there it must derive from the strategy for torch's format, which both have.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        TorchDistSaveShardedStrategy,
        mcore_to_pyt_state_dict,
    )
    from torch.distributed.checkpoint import save

    class Writer(TorchDistSaveShardedStrategy):  # type: ignore[misc]
        def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
            parts: dict[str, list[Any]] = {}
            for part in nested_values(sharded_state_dict):
                if is_main_replica(part.replica_id):
                    key = part.unique_key if isinstance(part, ShardedObject) else part.key
                    parts.setdefault(key, []).append(part)
            save(
                mcore_to_pyt_state_dict(parts, False),
                storage_writer=files.torch_writer(checkpoint_dir),
                planner=MCoreSavePlanner(flatten_state_dict=False),
            )

    return Writer("torch_dist", 1)


def check_readable(state: Path) -> None:
    """Raise `ValueError` for a checkpoint of a later release than the installed one, which would look for a file."""
    installed = metadata.version("megatron-core")
    if Version(installed) < Version(TRIED[-1]) and (state / ".metadata").is_file() and not (state / _COMMON).is_file():
        raise ValueError(
            f"it was written by a later release of Megatron-core than {installed}, without the file {_COMMON}; resume "
            f"with megatron-core=={TRIED[-1]}, which needs Python 3.12, or start from an exported model"
        )


def cpu_replacements(random: Any) -> list[tuple[Any, str, Any]]:
    """Return (owner, attribute, replacement) of what a release does on a CPU without need.

    Where an activation is recomputed by itself, 0.19.2 lets two tensors share their memory, by code that it compiles at
    the first use: a minute on a CPU, and for ever if an earlier process was killed meanwhile. 0.16.1 copies.
    """
    return [(random, "_get_share_storage", lambda: copy_storage)] if hasattr(random, "_get_share_storage") else []


@torch.no_grad()
def copy_storage(target: Tensor, source: Tensor) -> None:
    """Give the storage of `target`, which was emptied, the numbers of `source`; views of it see them."""
    storage, numbers = target.untyped_storage(), source.untyped_storage()
    storage.resize_(numbers.size())
    storage.copy_(numbers)


def quiet_models() -> AbstractContextManager[None]:
    """Build models without the warning of 0.19.2 that `GPTModel` gets no new features."""
    return errors_only("megatron.core.models.gpt.gpt_model")
