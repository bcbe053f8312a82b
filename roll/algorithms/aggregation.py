"""From a loss per token to one number, with the sizes of the *whole* mini-batch given by the caller.

Every mode is a sum over rows divided by global sizes, so adding up micro-batches and ranks gives exactly the loss (and
the gradient) of the whole mini-batch, however it was split. In every mode the mask multiplies the loss.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from roll.algorithms.masking import as_bool, masked_sum, require_shape
from roll.types.batch import Denominators

AggMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum", "prompt-mean"
]


def aggregate(
    loss: Tensor,
    mask: Tensor,
    denominators: Denominators,
    *,
    mode: AggMode,
    norm_length: float | None = None,
    row_weights: Tensor | None = None,
) -> Tensor:
    """Reduce a loss per token to this micro-batch's share of the mini-batch loss.

    token-mean                sum_i w_i sum_t l_it / tokens                       (DAPO, arXiv:2503.14476)
    seq-mean-token-sum        sum_i w_i sum_t l_it / sequences
    seq-mean-token-mean       sum_i w_i (sum_t l_it / n_i) / sequences            (GRPO, arXiv:2402.03300)
    seq-mean-token-sum-norm   sum_i w_i sum_t l_it / norm_length / sequences      (Dr.GRPO, arXiv:2503.20783)

    token-sum                 sum_i w_i sum_t l_it
    prompt-mean               token-mean with the weights of `equal_prompts`: the mean over prompts of the mean over the
                              tokens of a prompt's responses

    `loss`, `mask` are [B, T], `row_weights` w [B] (None: 1), n_i is the row's own number of masked tokens.
    `denominators` are those of the whole mini-batch over all ranks, rows of weight 0 left out. Returns a scalar, at
    least float32; 0 (with a gradient of 0) for an empty mask.
    """
    if mode not in get_args(AggMode):
        raise ValueError(f"unknown loss_agg_mode {mode!r}; expected one of {', '.join(get_args(AggMode))}")
    mask = as_bool(mask)
    require_shape("mask", mask, tuple(loss.shape), "the shape of loss")
    if row_weights is not None:
        require_shape("row_weights", row_weights, (mask.shape[0],), "[B]")
        mask = mask & (row_weights != 0).unsqueeze(1)  # so that 0 * inf can't arise
    rows = masked_sum(loss, mask, dim=1)
    if mode == "seq-mean-token-mean":
        rows = rows / mask.sum(1).clamp(min=1)
    if mode == "seq-mean-token-sum-norm":
        rows = rows / _positive_length(norm_length)
    if row_weights is not None:
        rows = rows * row_weights
    if mode == "token-sum":
        return rows.sum()
    size = denominators.tokens if mode in ("token-mean", "prompt-mean") else denominators.sequences
    return rows.sum() / (size if size > 0 else 1.0)


def equal_prompts(tokens: Tensor, group_index: Tensor) -> Tensor:
    """Return row weights with which the mean over tokens is the mean over prompts of the means over their tokens, [B].

    tokens / (groups with tokens x tokens of the row's group), of the whole mini-batch; `tokens` are [B], of each row.
    """
    _, inverse = torch.unique(group_index, return_inverse=True)
    of_group = torch.zeros(int(inverse.max()) + 1 if len(inverse) else 0).index_add(0, inverse, tokens.float())
    groups = float((of_group > 0).sum())
    return torch.where(tokens > 0, tokens.sum() / (groups * of_group[inverse]).clamp(min=1), torch.ones(()))


def _positive_length(norm_length: float | None) -> float:
    if norm_length is None or norm_length <= 0:
        raise ValueError(
            f"seq-mean-token-sum-norm divides by a constant length > 0, got {norm_length}; "
            "give the maximum response length"
        )
    return norm_length
