"""Inside SGLang's scheduler processes: the weight loader that reads buckets of shared memory.

SGLang imports it there by the path in its argument `custom_weight_loader`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from roll.strategies.buckets import BucketReader, Piece

LOADER = "roll.strategies.sglang.loader.load"

_readers: dict[str, BucketReader] = {}  # of the update that is under way, by its name


def message(update: str, path: str = "", pieces: Sequence[Piece] = ()) -> list[tuple[str, Tensor]]:
    """Return what `load` gets for one bucket, in the form that SGLang passes on; without pieces the update ends."""
    text = json.dumps([update, path, list(pieces)])
    return [("bucket", torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))]


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load the tensors that are complete with this bucket into the model, from where they lie."""
    ((_, text),) = named_tensors
    update, path, pieces = json.loads(bytes(text.cpu().numpy()))
    if update not in _readers:
        _readers.clear()
        _readers[update] = BucketReader()
    if pieces:
        model.load_weights(_readers[update].read(path, pieces))
    else:
        _readers.pop(update).finish()
