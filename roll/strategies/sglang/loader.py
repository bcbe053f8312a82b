"""Inside SGLang's scheduler processes: the weight loader that reads buckets of shared memory.

SGLang imports it there by the path in its argument `custom_weight_loader`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from roll.distributed.transports.bucket_layout import Entry
from roll.strategies.buckets import BucketReader

LOADER = "roll.strategies.sglang.loader.load"

_readers: dict[str, BucketReader] = {}  # of the update that is under way, by its name


def message(update: str, path: str = "", entries: Sequence[Entry] = ()) -> list[tuple[str, Tensor]]:
    """Return what `load` gets for one bucket, in the form that SGLang passes on; without entries the update ends."""
    text = json.dumps([update, path, list(entries)])
    return [("bucket", torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))]


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load the tensors of this bucket into the model, from where they lie."""
    ((_, text),) = named_tensors
    update, path, entries = json.loads(bytes(text.cpu().numpy()))
    if update not in _readers:
        _readers.clear()
        _readers[update] = BucketReader()
    if entries:
        model.load_weights(_readers[update].read(path, entries))
    else:
        del _readers[update]
