"""Atomic checkpoints: a folder is complete, or it isn't one."""

from roll.checkpoint.files import CheckpointError, CheckpointWriteError
from roll.checkpoint.manifest import Checkpoint
from roll.checkpoint.store import CheckpointStore

__all__ = ["Checkpoint", "CheckpointError", "CheckpointStore", "CheckpointWriteError"]
