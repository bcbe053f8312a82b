"""Optimizer, schedules and batch of a role that trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll.configs.schema.acts_if import BACKEND, acting, needs, unless
from roll.configs.schema.fields import number

_COSINES = needs("lr_scheduler_type", "cosine", "cosine_with_restarts", "warmup_stable_decay")
_WSD = needs("lr_scheduler_type", "wsd", "warmup_stable_decay")
_FALLS = needs(
    "lr_scheduler_type", "linear", "cosine", "cosine_with_restarts", "polynomial", "wsd", "warmup_stable_decay"
)
_WARMS_UP = needs(
    "warms_up", words="with `warmup_steps` or `warmup_ratio`", fix="{section}.warmup_steps=10, or remove it"
)
_MUON = needs("optimizer", "muon")
_CUT = "it cuts weights into flat parts, and Muon needs whole matrices"


@dataclass(frozen=True, kw_only=True)
class TrainingArgs:
    """Optimizer, schedules and batch of a role that trains."""

    learning_rate: float = number(1e-6, ge=0, le=100)
    """Peak learning rate."""
    min_lr_ratio: float = number(0.0, ge=0, le=1)
    """Lowest learning rate as a share of the peak: where falling schedules end, and below which `inverse_square_root`
    doesn't go."""
    lr_scheduler_type: Literal[
        "constant",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "inverse_square_root",
        "wsd",
        "warmup_stable_decay",
    ] = acting(
        "constant",
        also={
            "constant_with_warmup": "constant",
            "cosine_with_min_lr": "cosine",
            "cosine_with_hard_restarts": "cosine_with_restarts",
            "inverse_sqrt": "inverse_square_root",
            "inverse-square-root": "inverse_square_root",
            "WSD": "wsd",
        },
    )
    """Shape after the warm-up; `wsd` (Megatron's) and `warmup_stable_decay` (transformers') stay and fall at the end,
    in a line unless `wsd_decay_style` says otherwise, and along a cosine. Counts optimizer steps actually taken.
    Formulas: docs/backends.md."""
    warmup_steps: int = number(0, ge=0)
    """Optimizer steps of linear warm-up."""
    warmup_ratio: float = number(0.0, ge=0, lt=1, acts_if=(unless("warmup_steps"),))
    """Warm-up as a share of all planned optimizer steps. 0: off."""
    warmup_init_ratio: float = number(0.0, ge=0, le=1, acts_if=(_WARMS_UP,))
    """Learning rate that the warm-up rises from, as a share of the peak."""
    lr_decay_steps: int | None = number(None, ge=1, acts_if=(_FALLS,))
    """Optimizer steps, warm-up included, after which the lowest learning rate is reached and kept. null: all that are
    planned."""
    num_cycles: float | None = number(None, gt=0, acts_if=(_COSINES,))
    """Waves of the cosine, of `warmup_stable_decay` in its fall; of `cosine_with_restarts` falls from the peak. null:
    0.5 (one fall), or 1."""
    lr_decay_power: float = number(1.0, gt=0, acts_if=(needs("lr_scheduler_type", "polynomial"),))
    """Exponent of `polynomial`."""
    lr_timescale: int | None = number(None, ge=1, acts_if=(needs("lr_scheduler_type", "inverse_square_root"),))
    """Steps after the warm-up in which `inverse_square_root` falls to 1 / sqrt(2) of the peak. null: the steps of the
    warm-up, without one 10000."""
    wsd_decay_ratio: float = number(0.1, gt=0, le=1, acts_if=(_WSD, unless("num_decay_steps")))
    """Share of the steps after the warm-up in which `wsd` and `warmup_stable_decay` fall, the last ones."""
    num_decay_steps: int | None = number(None, ge=1, acts_if=(_WSD,))
    """Optimizer steps in which they fall, the last ones before `lr_decay_steps`. null: `wsd_decay_ratio` says it."""
    wsd_decay_style: Literal["linear", "cosine", "minus_sqrt", "exponential"] | None = acting(
        None, _WSD, idle=("linear",), also={"1-sqrt": "minus_sqrt"}
    )
    """How they fall there. null: `linear` with `wsd`, `cosine` with `warmup_stable_decay`."""
    optimizer: Literal["adamw", "muon"] = acting(
        "adamw",
        unless(BACKEND, "deepspeed", "megatron", words="without `deepspeed_*` and `megatron_*`",
               why={"deepspeed": _CUT, "megatron": _CUT}),
        also={"AdamW": "adamw", "adam": "adamw", "adamw_torch": "adamw", "Muon": "muon"},
    )  # fmt: skip
    """`muon`: matrices of the decoder layers by Muon (arXiv:2502.16982), all else (embeddings, heads, vectors) by
    AdamW; docs/backends.md. For `fsdp2_train`."""
    muon_momentum: float = number(0.95, ge=0, lt=1, acts_if=(_MUON,))
    """Decay of Muon's running mean of gradients, which is used with Nesterov's look ahead."""
    muon_ns_steps: int = number(5, ge=1, le=99, acts_if=(_MUON,))
    """Newton-Schulz iterations that orthogonalise an update."""
    muon_adjust_lr_fn: Literal["match_rms_adamw", "original"] = acting("match_rms_adamw", _MUON)
    """Scale of an update of a matrix [A, B]: 0.2 sqrt(max(A, B)), with which a learning rate that suits AdamW suits
    Muon; or sqrt(max(1, A / B))."""
    weight_decay: float = number(0.0, ge=0)
    """Decoupled decay of the weights, for matrices only (not for biases and norms)."""
    end_weight_decay: float | None = number(None, ge=0)
    """Weight decay at the end of the planned optimizer steps, to which it moves from `weight_decay`. null: it stays."""
    weight_decay_incr_style: Literal["linear", "cosine"] = acting("linear", needs("end_weight_decay"))
    """How it moves there."""
    adam_beta1: float = number(0.9, ge=0, lt=1)
    """Decay of the running mean of gradients."""
    adam_beta2: float = number(0.999, ge=0, lt=1)
    """Decay of the running mean of squared gradients."""
    adam_epsilon: float = number(1e-8, gt=0)
    """Added to the denominator of the update."""
    per_device_train_batch_size: int = number(1, ge=1)
    """Responses per forward/backward pass on one rank. Changes memory and speed, never the gradient."""
    gradient_accumulation_steps: int = number(1, ge=1)
    """Passes per optimizer step. Mini-batch = per device x accumulation x data-parallel ranks, in responses;
    it must divide `rollout_batch_size * num_return_sequences_in_group`."""

    @property
    def decay_style(self) -> str:
        """Return how `wsd` and `warmup_stable_decay` fall."""
        return self.wsd_decay_style or ("cosine" if self.lr_scheduler_type == "warmup_stable_decay" else "linear")

    @property
    def warms_up(self) -> bool:
        """Return whether the learning rate rises at first."""
        return self.warmup_steps > 0 or self.warmup_ratio > 0
