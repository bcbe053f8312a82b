"""A teacher beside the student: on the student's own samples (`rlvr`, `agentic`, `distill`), or on rows (`sft`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from roll.configs.catalog.loss_table import DIVERGENCES
from roll.configs.schema.acts_if import acting, needs
from roll.configs.schema.fields import args_of, named, number, one_or_many
from roll.configs.schema.strategy_config import StrategyArgs
from roll.configs.schema.worker_config import ForwardConfig

TEACHES = needs("teacher", fix="add a section teacher, or remove it")
_LOSS = needs("use_as", "loss", fix="{section}.use_as=loss, or remove it")


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(ForwardConfig):
    """The frozen model that the student is compared with, token by token. It has the student's tokenizer."""

    strategy_args: StrategyArgs = field(default_factory=lambda: StrategyArgs(strategy_name="fsdp2_infer"))
    tags: tuple[str, ...] = one_or_many()
    """Of one of `teachers`: tags of the tasks that it teaches. Empty: its own name."""


@dataclass(frozen=True, kw_only=True)
class RowDistillation:
    """How the teacher teaches on written responses."""

    divergence: str = named("forward_kl", args="divergence_args")
    """forward_kl, reverse_kl, jensen_shannon, skewed_forward_kl, skewed_reverse_kl; or a function of your own of
    (student_logprobs, teacher_logprobs, mask) as `package.module:name` or `path/to/file.py:name`. With options:
    `{name: jensen_shannon, beta: 0.1}`."""
    divergence_args: dict[str, Any] = args_of("divergence", DIVERGENCES)
    """Options of the divergence, see below; `divergence: {name: ..., option: ...}` is short for both keys."""
    top_k: int | None = number(64, ge=1)
    """Compare the probabilities of the teacher's likeliest tokens, this many, and of all others together: a lower
    bound. null: of every token, which takes 12 bytes per token of a row and entry of the vocabulary."""
    coef: float = number(1.0, gt=0)
    """Weight of the divergence."""
    sft_coef: float = number(0.0, ge=0)
    """Weight of the rows' negative log-likelihood beside it. 0: the teacher alone."""


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """How the teacher teaches on what the student samples."""

    use_as: Literal["advantage", "loss"] = "advantage"
    """`advantage`: every sampled token has the advantage log p_teacher - log p_student, whose policy gradient is that
    of the reverse KL. `loss`: the divergence of the two distributions joins the loss."""
    divergence: str = acting("reverse_kl", _LOSS, args="divergence_args")
    """reverse_kl, forward_kl, jensen_shannon, skewed_forward_kl, skewed_reverse_kl; or a function of your own of
    (student_logprobs, teacher_logprobs, mask) as `package.module:name` or `path/to/file.py:name`. With options:
    `{name: jensen_shannon, beta: 0.1}`."""
    divergence_args: dict[str, Any] = args_of("divergence", DIVERGENCES)
    """Options of the divergence, see below; `divergence: {name: ..., option: ...}` is short for both keys."""
    top_k: int | None = number(64, ge=1, acts_if=(_LOSS,))
    """Compare the probabilities of the teacher's likeliest tokens, this many, and of all others together: a lower
    bound. null: of every token, which takes 12 bytes per token of a row and entry of the vocabulary."""
    coef: float = number(1.0, gt=0)
    """Weight of what the teacher says."""
    reward_coef: float = number(0.0, ge=0)
    """Weight of the advantages that come from rewards. 0: the teacher alone."""
