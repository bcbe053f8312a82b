"""Causal attention over rows laid end to end, and its split over ranks by heads (DeepSpeed-Ulysses, arXiv:2309.14509).

Both training on Hugging Face modules and on Megatron use it. Rows are separate calls of the kernel, or one call of a
kernel that knows rows (`varlen_kernel`), so no query can see another row. Rows that share their beginnings are a tree
of segments (`prefix_tree`): a query sees its own segment and those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from roll.strategies.attention.prefix_tree import PrefixTree
from roll.strategies.attention.ring_attention import ring_attention
from roll.strategies.attention.varlen_kernel import RowPlan, has_varlen_kernel, varlen_kernel
from roll.strategies.attention.zigzag import RingPlan

_SMALLEST_BLOCK = 128
"""Queries taken together under a sliding window, so that a narrow one doesn't mean many small calls."""


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, rows: RowPlan, *, scale: float, window: int | None = None
) -> Tensor:
    """Return causal attention within each row of a line: [N, H, E].

    `query` is [N, H, D], `key` [N, K, D] and `value` [N, K, E]; K divides H: consecutive query heads share a key head.
    The tokens of the rows sum to N. With a `window` a query sees itself and `window - 1` tokens before.
    """
    query, key, value = as_autocast(query, key, value)
    lengths = list(rows.lengths)
    assert sum(lengths) == len(query), f"rows of {sum(lengths)} tokens, but {len(query)} queries"
    if has_varlen_kernel(query.device, query.dtype, max(query.shape[-1], value.shape[-1])):
        return varlen_kernel(query, key, value, rows, scale=scale, window=window)
    if len(set(lengths)) == 1:  # one call, and nothing to put together afterwards
        q, k, v = (tensor.unflatten(0, (len(lengths), lengths[0])) for tensor in (query, key, value))
        return _rows_attention(q, k, v, scale, window).flatten(0, 1)
    split = zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
    return torch.cat([_row_attention(q, k, v, scale, window) for q, k, v in split])


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return float32 tensors in the type that autocast would give the kernel: which kernel there is, depends on it."""
    kind = tensors[0].device.type
    if tensors[0].dtype != torch.float32 or kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


def _row_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    q, k, v = (tensor.unsqueeze(0) for tensor in (query, key, value))
    return _rows_attention(q, k, v, scale, window).squeeze(0)


def _rows_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """Return causal attention within rows of one length, [B, T, H, D]."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if window is None or q.shape[2] <= window:
        out = _attend(q, k, v, None, scale)
    else:
        out = _sliding(q, k, v, window, scale)
    return out.transpose(1, 2)


def _sliding(query: Tensor, key: Tensor, value: Tensor, window: int, scale: float) -> Tensor:
    """Compute a block of queries at a time against the keys it sees, so that no mask is as large as the row squared."""
    block = max(window, _SMALLEST_BLOCK)
    parts = []
    for start in range(0, query.shape[2], block):
        stop, first = min(start + block, query.shape[2]), max(0, start - window + 1)
        at = torch.arange(first, stop, device=query.device)
        distance = at[start - first :, None] - at
        visible = (distance >= 0) & (distance < window)
        parts.append(_attend(query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop], visible, scale))
    return torch.cat(parts, dim=2)


_JOINED_WASTE = 1 << 13
"""Masked scores that a segment may add to the call of those before it: what a call of its own costs in time."""


_KEPT_MASK = 1 << 20
"""Scores of a mask that is kept for the other layers; larger ones are made again."""


class TreePlan:
    """How attention over a tree of rows is computed: calls of the kernel, whose masks all layers share.

    Short segments that follow each other share a call, over the keys of the segments before them and their own.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self.calls = _joined(tree)
        """(first segment, segment after the last) of each, in order."""
        self._masks: dict[tuple[int, int | None, torch.device], Tensor] = {}

    def seen(self, call: tuple[int, int]) -> tuple[int, ...]:
        """Return the segments whose keys a call needs."""
        return (*self.tree.ancestors(call[0]), *range(*call))

    def mask(self, call: tuple[int, int], window: int | None, device: torch.device) -> Tensor:
        """Return which of these keys each query sees, bool [Q, T]."""
        name = (call[0], window, device)
        if name in self._masks:
            return self._masks[name]
        mask = self._made(call, window).to(device)
        if mask.numel() <= _KEPT_MASK:
            self._masks[name] = mask
        return mask

    def _made(self, call: tuple[int, int], window: int | None) -> Tensor:
        tree, visible = self.tree, self.seen(call)
        lengths = torch.tensor([tree.lengths[i] for i in visible])

        def of_keys(numbers: Sequence[int]) -> Tensor:
            return torch.repeat_interleave(torch.tensor(numbers), lengths)

        # Places in the line. Behind a segment comes all that continues it, up to its end.
        starts = lengths.cumsum(0) - lengths
        keys = torch.arange(int(lengths.sum())) + of_keys([tree.starts[i] for i in visible]) - of_keys(starts.tolist())
        queries = keys[-sum(tree.lengths[call[0] : call[1]]) :, None]
        mask = (keys <= queries) & (queries < of_keys([tree.ends[i] for i in visible]))
        if window is not None:
            position = keys + of_keys(
                [sum(tree.lengths[j] for j in tree.ancestors(i)) - tree.starts[i] for i in visible]
            )
            mask &= position[-len(queries) :, None] - position < window
        return mask


def _joined(tree: PrefixTree) -> list[tuple[int, int]]:
    """Return the ranges of segments that are computed in one call, in order. One that begins a row is alone."""
    calls: list[tuple[int, int]] = []
    queries = keys = 0
    for segment, (length, parent) in enumerate(zip(tree.lengths, tree.parents, strict=True)):
        before = sum(tree.lengths[i] for i in tree.ancestors(segment))
        own = length * (before + length)
        joins = bool(calls) and parent >= 0 and tree.parents[calls[-1][0]] >= 0
        if joins and (queries + length) * (keys + length) - queries * keys - own <= _JOINED_WASTE:
            calls[-1] = (calls[-1][0], segment + 1)
            queries, keys = queries + length, keys + length
        else:
            calls.append((segment, segment + 1))
            queries, keys = length, before + length
    return calls


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, *, scale: float, window: int | None = None
) -> Tensor:
    """Return causal attention within each row of a tree: [N, H, E]; arguments as of `varlen_attention`."""
    lengths = plan.tree.lengths
    assert sum(lengths) == len(query), f"a tree of {sum(lengths)} tokens, but {len(query)} queries"
    keys, values = key.split(list(lengths)), value.split(list(lengths))
    queries = query.split([sum(lengths[first:last]) for first, last in plan.calls])
    parts = []
    for q, call in zip(queries, plan.calls, strict=True):
        visible = plan.seen(call)
        if len(visible) == 1:
            parts.append(_row_attention(q, keys[call[0]], values[call[0]], scale, window))
            continue
        k, v = (torch.cat([part[i] for i in visible]) for part in (keys, values))
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        parts.append(_attend(q, k, v, plan.mask(call, window, query.device), scale)[0].transpose(0, 1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return attention of [B, H, Q, D] over [B, K, T, D]; causal without a mask."""
    shared = query.shape[1] != key.shape[1]
    if shared and query.device.type != "cpu" and (mask is not None or query.dtype == torch.float32):
        # The accelerator's kernels for masks and for float32 have no shared heads: they would build all the scores.
        repeats = query.shape[1] // key.shape[1]
        key, value, shared = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1), False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=shared
    )


class _AllToAll(torch.autograd.Function):
    """Chunk r along `scatter` goes to rank r; what arrives is joined along `gather`. Its own inverse, swapped."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup | None, scatter: int, gather: int) -> Tensor:
        ctx.group, ctx.scatter, ctx.gather = group, scatter, gather
        return _exchange(tensor, group, scatter, gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _exchange(grad, ctx.group, ctx.gather, ctx.scatter), None, None, None


def _exchange(tensor: Tensor, group: ProcessGroup | None, scatter: int, gather: int) -> Tensor:
    size = dist.get_world_size(group)
    sent = torch.stack([part.contiguous() for part in tensor.chunk(size, dim=scatter)])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(list(received), dim=gather)


def sequence_to_heads(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Turn [N / ranks, ..., H, D], a shard of the sequence a rank, into [N, ..., H / ranks, D], some heads a rank."""
    return _AllToAll.apply(tensor, group, -2, 0)


def heads_to_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Undo `sequence_to_heads`: [N, ..., H / ranks, D] -> [N / ranks, ..., H, D]."""
    return _AllToAll.apply(tensor, group, 0, -2)


def split_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: RowPlan | TreePlan | RingPlan,
    group: ProcessGroup | None,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Return `varlen_attention` over B lines of T tokens; every rank of `group` holds an equal, contiguous shard.

    `query` is [T / ranks, B, H, D], `key` and `value` alike; `rows` are those of the whole lines, one line after the
    other, or their tree. Without a group, this rank has it all. With a ring, "the whole" is what one rank of it holds
    of the only line: groups exchange heads first, then keys and values travel. Raises `ValueError` if the heads can't
    be spread evenly.
    """
    if group is not None:
        heads, shared, ranks = query.shape[2], key.shape[2], dist.get_world_size(group)
        if heads % ranks:
            raise ValueError(f"{heads} attention heads can't be spread over {ranks} ranks")
        if shared % ranks:
            # Few key heads: as many copies as give every rank the ones that its queries share.
            copies = ranks // shared if ranks % shared == 0 else heads // shared
            key, value = (tensor.repeat_interleave(copies, dim=2) for tensor in (key, value))
        query, key, value = (sequence_to_heads(tensor, group) for tensor in (query, key, value))
    q, k, v = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
    if isinstance(rows, TreePlan):
        out = tree_attention(q, k, v, rows, scale=scale, window=window)
    elif isinstance(rows, RingPlan):
        q, k, v = as_autocast(q, k, v)
        out = ring_attention(q, k, v, rows, scale=scale, window=window)
    else:
        out = varlen_attention(q, k, v, rows, scale=scale, window=window)
    out = out.unflatten(0, (query.shape[1], query.shape[0])).transpose(0, 1)
    return out if group is None else heads_to_sequence(out, group)


def all_gathered(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    """Return every rank's tensor of this shape, without gradients; of one rank its own, not copied."""
    if dist.get_world_size(group) == 1:
        return [tensor]
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return parts


class _Join(torch.autograd.Function):
    """The sum of what ranks hold at places of their own, 0 elsewhere; every rank computes the same loss from it, so
    each keeps the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup | None) -> Tensor:  # noqa: ARG004 - torch's signature
        if dist.get_world_size(group) == 1:
            return tensor.view_as(tensor)
        joined = tensor.clone()
        dist.all_reduce(joined, group=group)
        return joined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # noqa: ARG004
        return grad, None


def join_shards(scored: Tensor, positions: Tensor, total: int, group: ProcessGroup | None) -> Tensor:
    """Join the values of every rank's shard in one order, [total, ...] everywhere; gradients summed over ranks are
    whole.

    `scored` [S, ...] are this rank's (S may differ, and be 0), `place` int64 [S] says where they belong; none is on
    two.
    """
    return _Join.apply(scored.new_zeros(total, *scored.shape[1:]).index_put((positions,), scored), group)
