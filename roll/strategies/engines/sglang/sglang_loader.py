"""Inside SGLang's scheduler processes: the weight loader that reads buckets of memory that others share.

SGLang imports it there by the path in its argument `custom_weight_loader`. Its own way for tensors of an accelerator
(`load_format="flattened_bucket"`) uses the same inter-process handles, but a process that can't open one ends the
engine before anybody can choose another way.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from roll.distributed.transports.bucket_layout import Entry
from roll.strategies.engines.buckets import BucketReader, open_device, settle
from roll.strategies.engines.sglang.sglang_channel import answer

logger = logging.getLogger(__name__)

LOADER = "roll.strategies.engines.sglang.sglang_loader.load"

_readers: dict[str, BucketReader] = {}  # of the update that is under way, by its name
_written: set[int] = set()  # memory that it has written to


class _Watch(TorchDispatchMode):
    """Notes to which memory is written: many of SGLang's models leave out names they don't know, and say nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], Tensor):
            _written.add(args[0].untyped_storage().data_ptr())
        return func(*args, **(kwargs or {}))


def untouched(model: Any) -> list[str]:
    """Return the parameters to whose memory the update has written nothing."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.numel() and parameter.untyped_storage().data_ptr() not in _written
    ]


def message(update: str, answers: str, path: str = "", entries: Sequence[Entry] = (), *, trial: bool = False) -> bytes:
    """Return what `load` gets for one bucket, in the form that SGLang passes on; without entries the update ends.

    `answers`: where `load` says that it is done, or in a `trial` whether it can open the memory.
    """
    text = json.dumps([update, answers, path, list(entries), trial])
    tensor = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    # By value. SGLang's own serializer would send a file descriptor, which only the first pipeline stage could take.
    return pickle.dumps([("bucket", tensor)])


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load the tensors of this bucket into the model, from where they lie."""
    ((_, text),) = named_tensors
    update, answers, path, entries, trial = json.loads(bytes(text.cpu().numpy()))
    if trial:
        answer(answers, open_device(path))
        return
    if update not in _readers:
        _readers.clear()
        _written.clear()
        _readers[update] = BucketReader()
    if entries:
        device = next(model.parameters()).device
        tensors = _readers[update].read(path, entries)
        # A bucket on another rank's device: layers needn't take what is elsewhere.
        with _Watch():
            model.load_weights((name, tensor.to(device) if tensor.is_cuda else tensor) for name, tensor in tensors)
        settle(device)  # copies on the device may still be under way, and the bucket is written again after the answer
    else:
        del _readers[update]
        answer(answers, _is_complete(model))
        return
    answer(answers, yes=True)


def _is_complete(model: Any) -> bool:
    """Return whether the update has filled the model; on an accelerator, where kernels keep numbers of their own, the
    log says what it hasn't."""
    left = untouched(model)
    if not left:
        return True
    logger.error(
        "the weight update left %d parameters of SGLang's %s untouched, e.g. %s: its loader knows them by other names "
        "than transformers does", len(left), type(model).__name__, ", ".join(left[:3]),
    )  # fmt: skip
    return next(model.parameters()).device.type != "cpu"
