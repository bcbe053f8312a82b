"""Atomic checkpoints: a folder is complete, or it isn't one."""

from roll.checkpoint.files import Checkpoint, CheckpointError, CheckpointWriteError
from roll.checkpoint.store import CheckpointStore

__all__ = ["Checkpoint", "CheckpointError", "CheckpointStore", "CheckpointWriteError"]
