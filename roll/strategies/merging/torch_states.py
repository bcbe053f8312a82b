"""Reading checkpoints in torch's distributed format as whole tensors, in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from roll.utils.pickles import plain_values_only


def torch_names(folder: Path) -> dict[str, torch.Size]:
    """Return name -> shape of the tensors of a checkpoint in torch's distributed format."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with plain_values_only(folder):
        metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: entry.size for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def read_torch(folder: Path, keep: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return the whole tensors of a checkpoint in torch's distributed format whose names `keep` takes.

    Raises `UnsafeCheckpoint` for one that would run code, `ValueError` for one that can't be read.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with plain_values_only(folder):
        entries = FileSystemReader(folder).read_metadata().state_dict_metadata
        state = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata) and keep(name)
        }
        try:
            with warnings.catch_warnings():
                # It assumes one process, which was asked for with `no_dist`.
                warnings.filterwarnings("ignore", message=".*assuming the intent is to", category=UserWarning)
                dcp.load(state, checkpoint_id=folder, no_dist=True)
        except CheckpointException as error:
            causes = "; ".join(dict.fromkeys(str(cause) for cause, _ in error.failures.values()))
            raise ValueError(f"{folder} can't be read: {causes}") from None
    return state
