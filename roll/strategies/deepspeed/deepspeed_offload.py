"""Taking an engine's states off its device and back, with DeepSpeed's own calls where it has them.

DeepSpeed moves float32 weights with the weights that compute, and moments, at stages 1 and 2, and at stage 3 if its
fused optimizer runs. Elsewhere tensors are moved here. What stays where it is counts as nothing freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from roll.strategies.base import StatePart


class Memory:
    """What is asleep of one engine, or of a plain module without one."""

    def __init__(self, engine: Any, module: nn.Module, device: torch.device) -> None:
        self._engine, self._module, self._device = engine, module, device
        self._asleep: set[StatePart] = set()

    def sleep(self, parts: Sequence[StatePart]) -> int:
        """Bytes freed on the device; nothing where the device is the host."""
        before = self._allocated()
        self._asleep.update(parts)
        self._move()
        return max(0, before - self._allocated())

    def wake(self, parts: Sequence[StatePart]) -> None:
        """DeepSpeed brings back all that sleeps; what should sleep on goes to sleep again."""
        if not self._asleep & set(parts):
            return
        if self._native:
            self._engine.reload_states()
        else:
            for tensor in self._tensors(self._asleep):
                tensor.data = tensor.data.to(self._device)
        self._asleep.difference_update(parts)
        if self._asleep:
            self._move()

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    @property
    def _native(self) -> bool:
        """Whether DeepSpeed can move the states itself."""
        return (
            self._engine is not None
            and hasattr(self._engine.optimizer, "offload_states")
            and not self._engine.zero_offload_param()
        )

    def _move(self) -> None:
        if self._native:
            self._engine.offload_states(include=self._states(), pin_memory=self._device.type == "cuda")
        else:
            for tensor in self._tensors(self._asleep):
                tensor.data = tensor.data.to("cpu")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _states(self) -> list[Any]:
        from deepspeed.ops.adam import FusedAdam
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as States

        kinds = {
            "parameters": [States.lp_params, States.hp_params],
            "gradients": [States.lp_grads, States.contiguous_grad_buffer],
            "optimizer": [States.optim_states],
        }
        states = [state for part in sorted(self._asleep) for state in kinds[part]]
        if (
            hasattr(self._engine.optimizer, "fp16_partitioned_groups")
            and type(self._engine.optimizer.optimizer) is not FusedAdam
        ):
            states = [state for state in states if state not in (States.hp_params, States.optim_states)]
        return states

    def _tensors(self, parts: set[StatePart]) -> Iterator[Tensor]:
        """Those of a replicated module, and of its optimizer."""
        replicated = self._engine is None or isinstance(self._engine.optimizer, torch.optim.Optimizer)
        if replicated and "parameters" in parts:
            yield from self._module.parameters()
            yield from self._module.buffers()
        if self._engine is None or "optimizer" not in parts or not replicated:
            return
        for state in self._engine.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim())
