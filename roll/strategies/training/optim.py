"""What a training backend counts and sets at an optimizer step: schedules, skipped steps, parameter groups."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from roll.configs.schema.checkpoint_config import CheckpointContent
from roll.configs.schema.training_args import TrainingArgs
from roll.strategies.base import TrainSpec
from roll.types.metrics import Metrics

logger = logging.getLogger(__name__)

MAX_CONSECUTIVE_SKIPS = 5
"""Non-finite gradients in a row: one is an accident of a batch, this many are a diverged model."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Of AdamW, as torch and DeepSpeed both name them."""


class TrainingProgress:
    """How far a role's training is: the optimizer steps that it has taken, which its schedules go by."""

    def __init__(self, spec: TrainSpec) -> None:
        self._spec = spec
        self.steps = 0
        """Optimizer steps taken: the position in the learning-rate schedule."""
        self.updates = 0
        """Steps that the optimizer's moments have seen; fewer, if only `steps` came from a checkpoint."""
        self._skipped = 0
        if spec.trains:
            args = spec.training.training_args
            self._lr_factor = schedule_from(args, spec.total_optimizer_steps)
            self._weight_decay_at = weight_decay_from(args, spec.total_optimizer_steps)

    def learning_rate(self) -> float:
        """Return that of the coming optimizer step."""
        return self._spec.training.training_args.learning_rate * self._lr_factor(self.steps)

    def weight_decay(self) -> float:
        """Return that of the coming optimizer step."""
        return self._weight_decay_at(self.steps)

    def record(self, metrics: Metrics, norm: float, lr: float, *, finite: bool, reports: bool) -> None:
        """Count a step that was taken (`finite`) or skipped; a rank that `reports` adds it to its metrics.

        Raises `FloatingPointError` if too many steps in a row had to be skipped.
        """
        if finite:
            self.steps += 1
            self.updates += 1
        else:
            logger.warning("%s: gradient norm is %s; this optimizer step is skipped", self._spec.role, norm)
        self._skipped = 0 if finite else self._skipped + 1
        if self._skipped >= MAX_CONSECUTIVE_SKIPS:
            raise FloatingPointError(
                f"{self._spec.role}: the gradient was not finite in {self._skipped} optimizer steps in a row, after "
                f"{self.steps} good ones. The weights or the loss have diverged: lower learning_rate, clip with "
                "max_grad_norm, and go on from an earlier checkpoint"
            )
        if reports:
            prefix = self._spec.metric_prefix
            if finite:
                metrics.add_mean(f"{prefix}/grad_norm", norm)
            metrics.add_mean(f"{prefix}/lr", lr)
            metrics.add_sum(f"{prefix}/optimizer_steps", float(finite))
            metrics.add_sum(f"{prefix}/skipped_steps", float(not finite))

    def text(self, contents: Sequence[CheckpointContent]) -> str:
        """Return the text of the small file beside the tensors of a checkpoint."""
        counts = {"optimizer_steps": self.steps if "extra" in contents else 0, "updates": self.updates}
        return json.dumps(counts if "optimizer" in contents else {**counts, "updates": 0})

    def restore(self, text: str, contents: Sequence[CheckpointContent]) -> None:
        """Go on from such a text, as far as it is one of `contents`."""
        counts = json.loads(text)
        self.steps = counts["optimizer_steps"] if "extra" in contents else 0
        self.updates = counts.get("updates", counts["optimizer_steps"]) if "optimizer" in contents else 0


def schedule_from(args: TrainingArgs, total_steps: int) -> Callable[[int], float]:
    """Return the learning rate as a share of its peak for an optimizer step, counted from 0.

    Warm-up rises linearly from `warmup_init_ratio` i and reaches the peak at its end; its first step is
    i + (1 - i) / (warm-up steps + 1), not i, so no update is wasted. After it the share is m + (1 - m) s, with m the
    `min_lr_ratio`, x the progress from 0 at the end of the warm-up to 1 at `lr_decay_steps`, and s:

        constant              1, whatever m is
        linear                1 - x
        polynomial            (1 - x)^power
        cosine                (1 + cos(2 pi cycles x)) / 2
        cosine_with_restarts  (1 + cos(pi (cycles x mod 1))) / 2, and 0 at x = 1
        wsd                   1, and in the last steps (num_decay_steps, or a wsd_decay_ratio of those after the
        warmup_stable_decay   warm-up), with y from 0 to 1, one of 1 - y, 1 - sqrt(y), (1 + cos(2 pi cycles y)) / 2,
                              2 / 2^y - 1 (arXiv:2404.06395)

    The first falls in a line unless told otherwise, the second along a cosine, and its warm-up begins at m at least.
    `inverse_square_root` is max(m, sqrt(T / (T + n))), n steps after the warm-up, with T the `lr_timescale`. After the
    warm-up these are transformers' and Megatron-core's formulas; its first step has a rate of 0 in transformers, and i
    in Megatron-core.
    """
    warmup = args.warmup_steps or math.ceil(args.warmup_ratio * total_steps)
    end, least, first = args.lr_decay_steps or total_steps, args.min_lr_ratio, args.warmup_init_ratio
    timescale = args.lr_timescale or warmup or 10_000
    if args.lr_scheduler_type == "warmup_stable_decay":
        first = max(first, least)
    fall = args.num_decay_steps or args.wsd_decay_ratio * max(1, end - warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return first + (1.0 - first) * (step + 1) / (warmup + 1)
        if args.lr_scheduler_type == "constant":
            return 1.0
        if args.lr_scheduler_type == "inverse_square_root":
            return max(least, math.sqrt(timescale / (timescale + step - warmup)))
        if args.lr_scheduler_type in ("wsd", "warmup_stable_decay"):
            return least + (1.0 - least) * _fall(args, min(1.0, max(0.0, 1 - (end - step) / fall)))
        progress = min(1.0, (step - warmup) / max(1, end - warmup))
        return least + (1.0 - least) * _remaining(args, progress)

    return factor


def _remaining(args: TrainingArgs, progress: float) -> float:
    """Return what is left of the way from the peak down to the lowest learning rate."""
    schedule = args.lr_scheduler_type
    if schedule == "cosine":
        return _half_cosine(2 * (0.5 if args.num_cycles is None else args.num_cycles) * progress)
    if schedule == "cosine_with_restarts":
        return 0.0 if progress >= 1 else _half_cosine((args.num_cycles or 1.0) * progress % 1.0)
    return (1.0 - progress) ** (args.lr_decay_power if schedule == "polynomial" else 1.0)


def _fall(args: TrainingArgs, progress: float) -> float:
    """Return what is left of the way down in the last steps of `wsd` and `warmup_stable_decay`."""
    style = args.decay_style
    if progress >= 1:
        return 0.0
    if style == "cosine":
        return _half_cosine(2 * (0.5 if args.num_cycles is None else args.num_cycles) * progress)
    if style == "minus_sqrt":
        return 1.0 - math.sqrt(progress)
    return 2.0 * 0.5**progress - 1.0 if style == "exponential" else 1.0 - progress


def _half_cosine(x: float) -> float:
    """Return half a cosine: 1 at 0, falling to 0 at 1."""
    return 0.5 * (1 + math.cos(math.pi * x))


def weight_decay_from(args: TrainingArgs, total_steps: int) -> Callable[[int], float]:
    """Return the weight decay of an optimizer step, counted from 0: `weight_decay` first, then as its schedule says.

    With x = step / total steps: start + (end - start) x, or with `cosine` start + (end - start) (1 - cos(pi x)) / 2.
    """
    start, end, cosine = args.weight_decay, args.end_weight_decay, args.weight_decay_incr_style == "cosine"

    def decay(step: int) -> float:
        if end is None:
            return start
        progress = min(1.0, step / max(1, total_steps))
        return start + (end - start) * (1 - _half_cosine(progress) if cosine else progress)

    return decay


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return trainable parameters in two groups: matrices decay; vectors (norms, biases) don't."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    decayed, plain = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adamw_kernels(device: torch.device) -> dict[str, bool]:
    """Return which of torch's AdamW to take for parameters on this device: they differ in speed and temporaries.

    `fused` is one pass over a parameter, without temporaries and with its count of steps on the device, so that nothing
    waits for the host. On the host it takes a tenth of the time of the plain one, which reads memory at every operator.
    """
    return {"foreach": False, "fused": device.type in ("cpu", "cuda")}


def begin_moments(optimizer: torch.optim.AdamW) -> None:
    """Give every parameter its state, as torch does at a first step; the fused kernel reads `step` on its device."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            device = parameter.device if group["fused"] else torch.device("cpu")
            moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
            optimizer.state[parameter] = {"step": torch.zeros((), device=device), **moments}


def decaying(groups: Iterable[dict[str, Any]]) -> tuple[bool, ...]:
    """Return which of the groups of `parameter_groups` decay, before a backend flattens their parameters."""
    return tuple(any(parameter.dim() > 1 for parameter in group["params"]) for group in groups)


def set_rates(groups: Sequence[dict[str, Any]], decays: Sequence[bool], lr: float, weight_decay: float) -> None:
    """Give parameter groups the learning rate of a step, and those that decay its weight decay."""
    for group, decayed in zip(groups, decays, strict=True):
        group["lr"] = lr
        group["weight_decay"] = weight_decay if decayed else 0.0
