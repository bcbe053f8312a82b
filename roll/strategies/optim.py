"""AdamW parameter groups and learning-rate schedules, shared by the backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch import nn

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Of AdamW, as torch and DeepSpeed both name them."""

ScheduleName = Literal["constant", "linear", "cosine", "wsd"]


def lr_factor(step: int, *, schedule: ScheduleName, total_steps: int, warmup_steps: int, min_lr_ratio: float) -> float:
    """Learning rate as a share of its peak for optimizer step `step`, counted from 0.

    Warm-up rises linearly and reaches the peak at step `warmup_steps`; its first step is 1 / (warmup_steps + 1), not 0,
    so no update is wasted. After it: `constant` stays, `linear` and `cosine` fall to `min_lr_ratio` at `total_steps`,
    `wsd` (warm-up, stable, decay; arXiv:2404.06395) stays and falls linearly over the last tenth.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    span = max(1, total_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / span)
    if schedule == "wsd":
        progress = max(0.0, (progress - 0.9) / 0.1)
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress
    return min_lr_ratio + (1.0 - min_lr_ratio) * remaining


def schedule_from(training_args: Any, total_steps: int) -> Callable[[int], float]:
    """Return the factor function of a role's `training_args`."""
    warmup = training_args.warmup_steps
    if not warmup and training_args.warmup_ratio:
        warmup = math.ceil(training_args.warmup_ratio * total_steps)

    def factor(step: int) -> float:
        return lr_factor(
            step,
            schedule=training_args.lr_scheduler_type,
            total_steps=total_steps,
            warmup_steps=warmup,
            min_lr_ratio=training_args.min_lr_ratio,
        )

    return factor


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: matrices decay; vectors (norms, biases) don't."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for _, parameter in named:
        if parameter.requires_grad:
            (decayed if parameter.dim() > 1 else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
