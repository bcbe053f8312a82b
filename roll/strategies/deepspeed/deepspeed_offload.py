"""Taking an engine's states off its device with DeepSpeed's own calls.

DeepSpeed moves float32 weights with the weights that compute, and moments, at stages 1 and 2, and at stage 3 if its
fused optimizer runs. What stays where it is counts as nothing freed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from roll.strategies.base import StatePart


def moves_states(engine: Any) -> bool:
    """Whether DeepSpeed can move the states of this engine itself; None: a plain module without one."""
    return engine is not None and hasattr(engine.optimizer, "offload_states") and not engine.zero_offload_param()


def offload(engine: Any, parts: Iterable[StatePart], device: torch.device) -> None:
    """Take these parts off the device; `engine.reload_states` brings them all back."""
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as States

    kinds = {
        "parameters": [States.lp_params, States.hp_params],
        "gradients": [States.lp_grads, States.contiguous_grad_buffer],
        "optimizer": [States.optim_states],
    }
    states = [state for part in sorted(parts) for state in kinds[part]]
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp16_partitioned_groups") and type(optimizer.optimizer) is not FusedAdam:
        states = [state for state in states if state not in (States.hp_params, States.optim_states)]
    engine.offload_states(include=states, pin_memory=device.type == "cuda")
    if device.type == "cuda":
        torch.cuda.empty_cache()
