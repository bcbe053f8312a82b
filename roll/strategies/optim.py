"""AdamW parameter groups and learning-rate schedules, shared by the backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from roll.configs.schema.worker_config import TrainingArgs

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Of AdamW, as torch and DeepSpeed both name them."""


def schedule_from(args: TrainingArgs, total_steps: int) -> Callable[[int], float]:
    """Return the learning rate as a share of its peak for an optimizer step, counted from 0.

    Warm-up rises linearly and reaches the peak at its end; its first step is 1 / (warm-up steps + 1), not 0, so no
    update is wasted. After it: `constant` stays, `linear` and `cosine` fall to `min_lr_ratio` at `total_steps`, `wsd`
    (warm-up, stable, decay; arXiv:2404.06395) stays and falls linearly over the last tenth.
    """
    warmup = args.warmup_steps or math.ceil(args.warmup_ratio * total_steps)
    schedule, least = args.lr_scheduler_type, args.min_lr_ratio

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if schedule == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        if schedule == "wsd":
            progress = max(0.0, (progress - 0.9) / 0.1)
        remaining = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress
        return least + (1.0 - least) * remaining

    return factor


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: matrices decay; vectors (norms, biases) don't."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    decayed, plain = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
