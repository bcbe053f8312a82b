"""Options of `deepspeed_train` and `deepspeed_infer`: DeepSpeed's own JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from roll.configs.options import StrategyConfig


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig(StrategyConfig):
    """DeepSpeed's configuration as its documentation describes it. Batch sizes, clipping, the optimizer and the
    schedule are filled in from `training_args` and `max_grad_norm`; one that contradicts them is refused."""

    zero_optimization: dict[str, Any] = field(default_factory=dict)
    """ZeRO: `stage` 0 to 3, `offload_optimizer`, `offload_param`, bucket sizes and the rest of DeepSpeed's section."""
