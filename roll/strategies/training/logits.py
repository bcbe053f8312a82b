"""What a model says about the vocabulary at each position, a slice of rows at a time.

A vocabulary of 150,000 makes a float32 copy of the logits the largest tensor of the step. Here the upcast,
the softmax and their gradients exist for one slice only: the forward keeps the logits as they are and one
number per token, the backward makes the one gradient that can't be avoided, in the logits' own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from roll.strategies.attention.attention import join_shards
from roll.strategies.base import Output, TopK
from roll.strategies.training.micro import MicroLayout
from roll.types.batch import TokenBatch, TokenOutputs

SLICE_ELEMENTS = 1 << 24
"""float32 numbers per slice, 64 MiB."""

_CHUNK_ELEMENTS = 1 << 25
"""Logits computed at a time on a host: 128 MiB of float32."""
_CHUNK_ELEMENTS_ON_ACCELERATOR = 1 << 28
"""On an accelerator 1 GiB: a few large matrix products instead of many small ones."""


def chunk_elements(device: torch.device) -> int:
    """Return how many logits are computed at a time on this device."""
    return _CHUNK_ELEMENTS if device.type == "cpu" else _CHUNK_ELEMENTS_ON_ACCELERATOR


@dataclass(frozen=True)
class HeadRequest:
    """What is wanted at each scored position, beside the log-probs of given tokens."""

    entropy: bool = False
    correct: bool = False
    logit_gradients: bool = False
    top_k: int = 0


@dataclass
class HeadOutputs:
    """Outputs at the scored positions, in their order; what wasn't asked for is None."""

    logprobs: Tensor | None = None
    """[S]"""
    student_logprobs: Tensor | None = None
    """[S, K], at the K tokens that were given beside each scored one."""
    entropy: Tensor | None = None
    correct: Tensor | None = None
    logit_gradients: Tensor | None = None
    """[S], squared length of the gradient of log p(token) in the logits / temperature; without a gradient."""
    top_logprobs: Tensor | None = None
    """[S, top_k], falling; without a gradient."""
    top_ids: Tensor | None = None
    values: Tensor | None = None

    @classmethod
    def of_scores(cls, scores: Tensor, ids: Tensor, width: int, **others: Tensor | None) -> HeadOutputs:
        """Name the columns of `scores` [S, given + top_k] at `ids`: the scored token, tokens beside it, the top ones.

        They are copied: FSDP warns about outputs that are views.
        """
        top = scores.shape[1] > width
        return cls(
            logprobs=scores[:, 0].clone(),
            student_logprobs=scores[:, 1:width].clone() if width > 1 else None,
            **others,
            top_logprobs=scores[:, width:].detach().clone() if top else None,
            top_ids=ids[:, width:].clone() if top else None,
        )


class _TokenStatistics(torch.autograd.Function):
    """(logits [N, V], tokens [N, K]) -> (log p(token) [N, K], entropy [N]), both float32."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperature: float, rows: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(tokens.shape, dtype=wide, device=logits.device)
        entropy = torch.zeros(logits.shape[0], dtype=wide, device=logits.device)
        normalizer = torch.empty_like(entropy)
        for part in _slices(logits.shape[0], rows):
            scaled = _scaled(logits[part], wide, temperature)
            lse = scaled.logsumexp(-1)
            normalizer[part] = lse
            logprobs[part] = scaled.gather(-1, tokens[part]) - lse[:, None]
            if with_entropy:
                logp = scaled - lse[:, None]
                entropy[part] = -_p_log_p(logp, logp.exp()).sum(-1)
        ctx.save_for_backward(logits, tokens, normalizer, entropy)
        ctx.temperature, ctx.rows, ctx.with_entropy = temperature, rows, with_entropy
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, tokens, normalizer, entropy = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for part in _slices(logits.shape[0], ctx.rows):
            logp = _scaled(logits[part], normalizer.dtype, ctx.temperature) - normalizer[part, None]
            outer = -grad_logprobs[part].sum(-1, keepdim=True)
            # d log p(token) / d z = onehot - p
            if ctx.with_entropy:
                p = logp.exp()
                piece = p * outer
                # d H / d z_v = -p_v (log p_v + H)
                p_log_p = _p_log_p(logp, p).add_(p.mul_(entropy[part, None]))
            else:
                piece = logp.exp_().mul_(outer)
            add_at(piece, tokens[part], grad_logprobs[part])
            if ctx.with_entropy:
                piece -= p_log_p.mul_(grad_entropy[part, None])
            grad[part] = piece if ctx.temperature == 1 else piece.div_(ctx.temperature)
        return grad, None, None, None, None


def add_at(rows: Tensor, columns: Tensor, values: Tensor) -> None:
    """Add `values` [N, K] to `rows` [N, V] at `columns` [N, K].

    The first column may be among the others, which differ: apart, no two additions go to the same place at once, and
    an accelerator repeats the bits.
    """
    for part in (slice(0, 1), slice(1, None)):
        rows.scatter_add_(-1, columns[:, part], values[:, part])


def top_tokens(logits: Tensor, k: int) -> Tensor:
    """Return int64 [N, k], the columns of the largest of [N, V]; of equal ones the first, NaN last; largest first.

    `topk` alone takes any of those that equal its last one.
    """
    logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    least = logits.topk(k, sorted=True).values[:, -1:]
    larger, equal = logits > least, logits == least
    chosen = larger | (equal & (equal.cumsum(-1, dtype=torch.int32) <= k - larger.sum(-1, keepdim=True)))
    ids = chosen.nonzero()[:, 1].view(-1, k)
    return ids.gather(-1, logits.gather(-1, ids).argsort(dim=-1, descending=True, stable=True))


def _scaled(logits: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    """Return logits / temperature in `dtype`; perhaps the logits themselves, as a pass over them is what takes time."""
    wide = logits.to(dtype)
    return wide if temperature == 1 else wide / temperature


def _p_log_p(logp: Tensor, p: Tensor) -> Tensor:
    """Return p log p with 0 log 0 = 0: a token ruled out by a logit of -inf adds nothing."""
    return torch.where(logp > -torch.inf, p * logp, 0.0)


def _slices(total: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, total)) for start in range(0, total, rows)]


def logprobs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    slice_rows: int | None = None,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature) at `tokens`, and the entropy [...] of each distribution in nats.

    Args:
        logits: [..., V], any float dtype; half precision is upcast slice by slice.
        tokens: int64 [...] or [..., K], each in 0..V-1; the second to the last of K must differ from each other.
        temperature: > 0, the same as at sampling.
        slice_rows: tokens per slice; None fits a slice into 64 MiB.
        with_entropy: False leaves the entropy 0.

    Returns:
        As `tokens`, and [...]; float32 (float64 for float64 logits).
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}; log-probs of greedy sampling are taken at 1")
    shape, vocabulary = logits.shape[:-1], logits.shape[-1]
    if tokens.shape[: len(shape)] != shape or tokens.dim() > len(shape) + 1:
        raise ValueError(
            f"logits {tuple(logits.shape)} need tokens {tuple(shape)} or [{', '.join(map(str, shape))}, K], "
            f"got {tuple(tokens.shape)}"
        )
    rows = slice_rows if slice_rows is not None else max(SLICE_ELEMENTS // vocabulary, 1)
    each = tokens.shape[-1] if tokens.dim() > len(shape) else 1
    logprobs, entropy = _TokenStatistics.apply(
        logits.reshape(-1, vocabulary), tokens.reshape(shape.numel(), each), temperature, rows, with_entropy
    )
    return logprobs.reshape(tokens.shape), entropy.reshape(shape)


def head_outputs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    request: HeadRequest,
    *,
    temperature: float,
    softcap: float | None = None,
) -> HeadOutputs:
    """Return what is asked about softmax(head(hidden) / temperature), in chunks of `hidden` [N, D].

    With gradients on, more than one chunk means that each chunk's logits are recomputed in the backward pass, and that
    the gradient of the head's weight is summed over the chunks in float32.

    Args:
        hidden: [N, D].
        head: [n, D] -> logits [n, V].
        targets: int64 [N], the scored tokens, or [N, 1 + K] with K other tokens beside each.
        request: what else is wanted. `correct`, `logit_gradients` and `top_k` have no gradient.
        temperature: > 0, the same as at sampling.
        softcap: the model's own bound of its logits, which tanh takes them to.
    """
    targets = targets if targets.dim() > 1 else targets[:, None]

    def score(part: Tensor, wanted: Tensor) -> _Scored:
        logits = head(part)
        if softcap is not None:
            logits = torch.tanh(logits.float() / softcap) * softcap
        correct = None
        if request.correct:
            correct = (logits.gather(-1, wanted[:, :1])[:, 0] >= logits.amax(-1)).float()
        if request.top_k:
            require_tokens(request.top_k, logits.shape[-1])
            wanted = torch.cat([wanted, top_tokens(logits.detach(), request.top_k)], dim=1)
        scored = logprobs_and_entropy(logits, wanted, temperature=temperature, with_entropy=request.entropy)
        gradients = None
        if request.logit_gradients:
            gradients = logit_gradients(logits.detach(), scored[0][:, 0].detach(), temperature)
        return *scored, correct, gradients, wanted

    vocabulary = getattr(head, "out_features", None) or 1 << 17
    rows = max(1, chunk_elements(hidden.device) // vocabulary)
    trained = trained_weights(head)
    learns = torch.is_grad_enabled() and (hidden.requires_grad or bool(trained))
    if len(hidden) > rows and learns and trained is not None:
        scores, entropy, correct, squares, ids = _ChunkedHead.apply(hidden, targets, score, rows, *trained)
    else:
        recompute = len(hidden) > rows and learns
        parts: list[_Scored] = []
        for start in range(0, max(1, len(hidden)), rows):
            piece = (hidden[start : start + rows], targets[start : start + rows])
            parts.append(checkpoint(score, *piece, use_reentrant=False) if recompute else score(*piece))
        scores, entropy, correct, squares, ids = _joined(parts)
    return HeadOutputs.of_scores(
        scores,
        ids,
        targets.shape[1],
        entropy=entropy if request.entropy else None,
        correct=correct,
        logit_gradients=squares,
    )


_Scored: TypeAlias = "tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]"
"""Of a chunk: log-probs [n, K], entropies [n], hits [n], squared gradients [n], the tokens of the log-probs [n, K]."""


def _joined(parts: Sequence[_Scored]) -> _Scored:
    scores, entropy, hits, squares, ids = zip(*parts, strict=True)
    optional = (None if tensors[0] is None else torch.cat(tensors) for tensors in (hits, squares))
    return torch.cat(scores), torch.cat(entropy), *optional, torch.cat(ids)  # type: ignore[return-value]


def trained_weights(head: Any) -> list[nn.Parameter] | None:
    """Return the parameters of a head that `_ChunkedHead` may differentiate; None if it may not.

    It calls the head again in the backward pass, as `checkpoint` does, but with no state of random numbers, and it
    needs whole weights: DeepSpeed's ZeRO 3 gathers them only inside the head's own call.
    """
    if not isinstance(head, nn.Module):
        return None
    drops = any(isinstance(module, nn.Dropout) and module.training and module.p > 0 for module in head.modules())
    parameters = list(head.parameters())
    if drops or any(hasattr(parameter, "ds_id") for parameter in parameters):
        return None
    return [parameter for parameter in parameters if parameter.requires_grad]


class _ChunkedHead(torch.autograd.Function):
    """(hidden [N, D], targets [N, K], score, rows, weights...) -> `_Scored`, `rows` positions at a time.

    The backward pass computes each chunk again. What the chunks say about a weight is summed in float32: in half
    precision a sum over many of them would lose most of the small ones.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        score: Callable[[Tensor, Tensor], _Scored],
        rows: int,
        *weights: Tensor,
    ) -> _Scored:
        ctx.save_for_backward(hidden, targets)
        ctx.score, ctx.rows, ctx.weights = score, rows, weights
        kind = hidden.device.type
        ctx.autocast = {"enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}
        joined = _joined([score(hidden[part], targets[part]) for part in _slices(len(hidden), rows)])
        ctx.mark_non_differentiable(*(one for one in joined[2:] if one is not None))
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_scores: Tensor, grad_entropy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets = ctx.saved_tensors
        weights: tuple[Tensor, ...] = ctx.weights
        wide = [torch.zeros_like(one, dtype=torch.promote_types(one.dtype, torch.float32)) for one in weights]
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # One region for all chunks: autocast then casts the weight once.
        with torch.enable_grad(), torch.autocast(hidden.device.type, **ctx.autocast):
            for part in _slices(len(hidden), ctx.rows):
                piece = hidden[part].detach().requires_grad_(grad_hidden is not None)
                scores, entropy = ctx.score(piece, targets[part])[:2]
                wanted = [piece, *weights] if grad_hidden is not None else list(weights)
                outputs = [one for one in (scores, entropy) if one.requires_grad]
                incoming = [one for one, out in ((grad_scores[part], scores), (grad_entropy[part], entropy))
                         if out.requires_grad]  # fmt: skip
                gradients = list(torch.autograd.grad(outputs, wanted, incoming))
                if grad_hidden is not None:
                    grad_hidden[part] = gradients.pop(0)
                for total, one in zip(wide, gradients, strict=True):
                    total += one
        narrow = [total.to(one.dtype) for total, one in zip(wide, weights, strict=True)]
        return grad_hidden, None, None, None, *narrow


def logit_gradients(logits: Tensor, logprobs: Tensor, temperature: float) -> Tensor:
    """Return the squared length of d log p(token) / d (logits / temperature), [N]: 1 - 2 p + the sum of all p^2.

    `logits` [N, V]; `logprobs` [N], those of the tokens.
    """
    squares = torch.empty_like(logprobs)
    for part in _slices(len(logits), max(SLICE_ELEMENTS // logits.shape[-1], 1)):
        scaled = logits[part].to(squares.dtype) / temperature
        squares[part] = ((2 * scaled).logsumexp(-1) - 2 * scaled.logsumexp(-1)).exp()
    return (1 - 2 * logprobs.exp() + squares).clamp(min=0)  # not the rounding of a sum


def require_tokens(top_k: int, vocabulary: int) -> None:
    """Raise `ValueError` if more tokens are wanted than there are."""
    if top_k > vocabulary:
        raise ValueError(f"TopK({top_k}) asks for more tokens than the vocabulary's {vocabulary}")


TOP_K_COLUMNS = ("top_logprobs", "top_ids")


def head_request(outputs: Sequence[Output]) -> HeadRequest:
    """Return what the head must compute for these outputs."""
    top_k = next((output.k for output in outputs if isinstance(output, TopK)), 0)
    names = ("entropy", "correct", "logit_gradients")
    return HeadRequest(**{name: name in outputs for name in names}, top_k=top_k)


def blank_outputs(batch: TokenBatch, outputs: Sequence[Output]) -> TokenOutputs:
    """Return zeros for each output, in its shape and type."""
    columns = {}
    for output in outputs:
        if isinstance(output, TopK):
            columns["top_logprobs"] = torch.zeros(batch.num_tokens, output.k)
            columns["top_ids"] = torch.zeros(batch.num_tokens, output.k, dtype=torch.int64)
        else:
            like = batch.require("teacher_ids") if output == "student_logprobs" else batch.token_ids
            columns[output] = torch.zeros(like.shape)
    return TokenOutputs(row_ids=batch.row_ids, offsets=batch.offsets, **columns)


def token_outputs(
    kind: str,
    micro: TokenBatch,
    layout: MicroLayout,
    scored: HeadOutputs,
    outputs: Sequence[Output],
    positions: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> TokenOutputs:
    """Return `outputs` of a model of this kind as columns of a micro-batch, 0 where no token is scored.

    Where the ranks of `group` share its rows, `positions` says which of the layout's scored tokens `scored` is about.
    """
    columns = {}
    for output in outputs:
        for name in TOP_K_COLUMNS if isinstance(output, TopK) else (output,):
            value = getattr(scored, name)
            assert value is not None, f"a {kind} model gives no {name}"
            if positions is not None:
                value = join_shards(value, positions, len(layout.targets), group)
            if layout.copies is not None:
                value = value[layout.copies]
            blank = value.new_zeros(micro.num_tokens, *value.shape[1:])
            columns[name] = blank.index_put((layout.flat,), value)
    return TokenOutputs(row_ids=micro.row_ids, offsets=micro.offsets, **columns)
