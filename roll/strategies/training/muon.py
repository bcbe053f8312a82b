"""Muon: matrices step along their orthogonalised momentum (kellerjordan.github.io/posts/muon, arXiv:2502.16982).

With G the gradient of a matrix W [A, B], beta the momentum, lr the learning rate, wd the weight decay:

    M = beta M + (1 - beta) G             its running mean
    U = (1 - beta) G + beta M             Nesterov's look ahead
    O = NS(U)                             nearly the orthogonal matrix next to U
    W = (1 - lr wd) W - lr scale O        scale: 0.2 sqrt(max(A, B)), or sqrt(max(1, A / B))

NS: X = U / |U| (Frobenius norm), then a few times X = a X + b (X X^T) X + c (X X^T)^2 X with (a, b, c) = (3.4445,
-4.7750, 2.0315), which brings all singular values near 1. torch.optim.Muon computes the same, but of whole matrices
only, in bfloat16, and of none with three dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7
BUFFER = "momentum_buffer"

AdjustLr = Literal["match_rms_adamw", "original"]


class Muon(torch.optim.Optimizer):
    """Muon of matrices, whole or in FSDP2's shards; of more dimensions the last two are the matrix, e.g. of experts.

    Momentum stays in shards. Each update is gathered, and every rank orthogonalises it and keeps its part: the result
    is the same on any number of ranks, and one matrix at a time is whole. In float32, on an accelerator in bfloat16.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr = "match_rms_adamw",
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._ns_steps, self._adjust_lr_fn = ns_steps, adjust_lr_fn
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() < 2:
                    raise ValueError(f"Muon takes matrices, not a parameter of shape {tuple(parameter.shape)}")
                self.state[parameter] = {BUFFER: torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take a step along the gradients; a parameter without one stays. Every rank of a shard calls it."""
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                buffer = self.state[parameter][BUFFER]
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                ahead = parameter.grad.lerp(buffer, group["momentum"])
                update = _like(orthogonalized(_whole(ahead), self._ns_steps), parameter)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * update_scale(parameter.shape, self._adjust_lr_fn))


def orthogonalized(update: Tensor, steps: int) -> Tensor:
    """Return [..., A, B] with singular values near 1: Newton-Schulz from the matrix over its norm."""
    a, b, c = COEFFICIENTS
    x = update.bfloat16() if update.device.type == "cuda" else update
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPSILON)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).to(update.dtype)


def update_scale(shape: Iterable[int], adjust_lr_fn: AdjustLr) -> float:
    """Return the factor on an orthogonal update of this shape.

    `match_rms_adamw` gives its entries the root mean square that AdamW's have by experience, 0.2.
    """
    rows, columns = tuple(shape)[-2:]
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _like(full: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor that every rank has whole, in the shards of a parameter."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(parameter, DTensor):
        return full
    mesh = parameter.device_mesh
    everywhere = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=parameter.placements)
