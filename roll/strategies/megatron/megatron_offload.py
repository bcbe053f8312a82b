"""Device memory of a sleeping Megatron role: weights and optimizer in host memory, gradient buffers given up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from roll.strategies.base import StatePart
from roll.strategies.megatron.optimizer import Optimizer
from roll.strategies.offload import Shelf, num_bytes, storages


class Memory:
    """What is asleep of one rank's chunks and optimizer."""

    def __init__(self, chunks: Sequence[Any], optimizer: Optimizer | None, device: torch.device) -> None:
        self._chunks, self._optimizer, self._device = chunks, optimizer, device
        self._shelves: dict[StatePart, Shelf] = {"parameters": Shelf(), "optimizer": Shelf()}
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []

    def sleep(self, parts: Sequence[StatePart]) -> int:
        """Bytes freed on the device. Without an accelerator only gradients can go."""
        freed = self._drop_gradients() if "gradients" in parts else 0
        if self._device.type == "cuda":
            for part, shelf in self._shelves.items():
                if part in parts and not shelf:
                    freed += shelf.store(self._resident(part), self._device)
            torch.cuda.empty_cache()  # for the other processes on this device
        return freed

    def wake(self, parts: Sequence[StatePart]) -> None:
        """Bring back what is asleep of these; gradients as zeros."""
        for part in parts:
            if part == "gradients":
                for storage, size in self._emptied:
                    storage.resize_(size)
                self._emptied.clear()
                for buffer in self._gradients():
                    buffer.zero_()
            else:
                self._shelves[part].restore()

    def asleep(self, *parts: StatePart) -> list[StatePart]:
        """Those of `parts` that nobody may read now."""
        return [part for part in parts if (self._emptied if part == "gradients" else self._shelves[part])]

    def _gradients(self) -> list[Tensor]:
        """Return the buffers that all gradients are views of."""
        if self._optimizer is None:
            return []
        return [buffer.grad_data for chunk in self._chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]

    def _drop_gradients(self) -> int:
        freed = num_bytes(self._gradients(), self._device)
        for storage in storages(self._gradients(), self._device):
            if storage.nbytes():
                self._emptied.append((storage, storage.nbytes()))
                storage.resize_(0)
        return freed

    def _resident(self, part: StatePart) -> Iterator[Tensor]:
        parameters = [parameter for chunk in self._chunks for parameter in chunk.parameters()]
        if part == "parameters":
            yield from parameters
        elif self._optimizer is not None:
            # Float32 weights are their own master copies: they go with the parameters.
            shared = {storage._cdata for storage in storages(parameters, self._device)}
            for tensor in self._optimizer.tensors():
                if tensor.untyped_storage()._cdata not in shared:
                    yield tensor
