"""Rows laid end to end through a Hugging Face model, and shards of them on several ranks (Ulysses, ring attention).

A packed line is one row of ids whose positions start over in every row of the batch. The attention function keeps rows
apart: it is told where they end through keyword arguments that transformers hands down to every layer. With `fa2` it is
transformers' own, otherwise `packed_attention`. Recurrent layers and convolutions compute rows apart (`row_states`).
Models that mix tokens by other means are found out before they are used.

With DeepSpeed-Ulysses sequence parallelism (arXiv:2309.14509), consecutive ranks form a group that works on the same
rows. Each rank runs the model on its shard of a line that is padded to a multiple of the group's size, attention
exchanges heads for tokens (`split_attention`), and the head runs where the shard predicts a scored token. Its outputs
are gathered, so that every rank computes the same loss, and each keeps the gradient of its own: summed over all ranks,
parameters get it once.

With ring attention the line is cut in zigzag pieces first (`roll.strategies.attention.zigzag`), and keys and values
travel between their holders. Both together: the ranks of each Ulysses group share the pieces of one rank of the ring.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from roll.distributed.layout import RankLayout
from roll.distributed.worker import WorkerInfo
from roll.strategies.attention.attention import TreePlan, all_gathered, split_attention
from roll.strategies.attention.varlen_kernel import RowPlan
from roll.strategies.attention.zigzag import RingPlan, zigzag_order
from roll.strategies.hf.row_states import cut_rows
from roll.strategies.training.micro import MicroLayout, lay_out, take_shard, zigzag
from roll.strategies.training.pretrained import UNUSABLE
from roll.types.batch import TokenBatch

_ATTENTION = "roll_packed"  # name of our function among those of transformers

_HARMLESS = {
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "is_causal", "max_length_k", "max_length_q",
    "num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits", "position_ids",
    "return_dict", "use_cache",
}  # fmt: skip
"""Options of attention functions that don't change what our function computes, or that it knows in another form."""

_CHECKED_LENGTHS = (9, 3, 5, 3)
"""Short rows behind longer ones: whatever leaks across a boundary reaches most of their tokens."""


@dataclass(frozen=True, eq=False)
class SequenceGroup:
    """This rank's place among those that share its rows."""

    rank: int
    """Index of its shard."""
    size: int
    group: ProcessGroup | None
    """Process group of the ranks that share its rows."""
    peers: ProcessGroup | None
    """Process group of the ranks with the same shard of other rows: all rows, each once."""
    layout: RankLayout
    heads: ProcessGroup | None
    """Of these ranks, those that exchange heads for tokens (Ulysses); None: this rank alone."""
    ring: ProcessGroup | None = None
    """Of these ranks, those between which keys and values travel; None: this rank alone."""
    ring_size: int = 1

    @classmethod
    def join(cls, info: WorkerInfo, ulysses: int, ring: int, device: torch.device) -> SequenceGroup:
        """Form the groups of `ring * ulysses` ranks; the ranks of the role must be connected. Every rank calls this."""
        from torch.distributed.device_mesh import init_device_mesh

        size = ring * ulysses
        groups = info.world_size // size
        rank_layout = RankLayout(dp_rank=info.rank // size, dp_size=groups, collects=info.rank % size == 0)
        mesh = init_device_mesh(device.type, (groups, size), mesh_dim_names=("data", "sequence"))
        sequence_group, peers = mesh.get_group("sequence"), mesh.get_group("data")
        if ring == 1:
            return cls(info.rank % size, size, sequence_group, peers, rank_layout, heads=sequence_group)
        parts = init_device_mesh(device.type, (groups, ring, ulysses), mesh_dim_names=("rows", "ring", "heads"))
        heads = parts.get_group("heads") if ulysses > 1 else None
        return cls(info.rank % size, size, sequence_group, peers, rank_layout, heads, parts.get_group("ring"), ring)

    @property
    def multiple(self) -> int:
        """Return what divides the tokens of a line."""
        return self.size if self.ring_size == 1 else math.lcm(2 * self.ring_size, self.size)

    def shard(self, layout: MicroLayout) -> tuple[MicroLayout, Tensor]:
        """Return (this rank's part of a packed line, int64 [S] of the scored tokens it predicts)."""
        if self.ring_size > 1:
            layout = zigzag(layout, self.ring_size)
        part, positions = take_shard(layout, self.rank, self.size, self.heads)
        return replace(part, ring=self.ring), positions

    def gathered(self, shard: Tensor) -> Tensor:
        """Return the tokens of all shards in the order of the line: [S, ...] -> [S * size, ...], without gradients."""
        full = torch.cat(all_gathered(shard, self.group))
        return full if self.ring_size == 1 else full[zigzag_order(len(full), self.ring_size).argsort()]


@dataclass(frozen=True, eq=False)
class PackedRows:
    """What the attention function must know of a line. Opaque to whatever passes it on."""

    rows: RowPlan | TreePlan | RingPlan
    """The rows of the whole line, padding included, its tree of rows, or the rows and what a ring holds of them."""
    group: ProcessGroup | None
    """Ranks that exchange heads for tokens, or None."""


def row_arguments(layout: MicroLayout) -> dict[str, Any]:
    """Return keyword arguments for the model's forward: where rows end, in our words and, unless they are a tree, in
    those of transformers for flash attention. Nothing for a padded layout."""
    if not layout.packed:
        return {}
    if layout.tree is not None:
        return {"packed_rows": PackedRows(TreePlan(layout.tree), layout.group)}
    rows = RowPlan(layout.segments)
    bounds, ring = rows.bounds(layout.ids.device), layout.ring
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": rows.longest,
        "max_length_k": rows.longest,
        "packed_rows": PackedRows(rows if ring is None else _around(ring, layout), layout.group),
    }


def _around(ring: ProcessGroup, layout: MicroLayout) -> RingPlan:
    return RingPlan(layout.segments, dist.get_rank(ring), dist.get_world_size(ring), ring)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed_rows: PackedRows | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' `AttentionInterface` wants it: ([1, N, H, E], no attention weights).

    `query` is [1, H, N, D]; `key` and `value` alike, with a divisor of H heads. Raises `ValueError` if the layer wants
    something that this function doesn't do.
    """
    if packed_rows is None:
        raise ValueError(f"{type(module).__name__} isn't told where rows end")
    unknown = {name: option for name, option in options.items() if option is not None and name not in _HARMLESS}
    unknown |= {"attention_mask": attention_mask} if attention_mask is not None else {}
    unknown |= {"dropout": dropout} if dropout else {}
    kind = _kind_of_layer(module)
    if kind in ("sliding_attention", "chunked_attention") and sliding_window is None:
        unknown["layer_types"] = kind
    if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
        unknown["is_causal"] = False
    if unknown:
        options_shown = ", ".join(f"{name}={_shown(option)}" for name, option in unknown.items())
        raise ValueError(f"{type(module).__name__} uses {options_shown}")
    q, k, v = (tensor.permute(2, 0, 1, 3) for tensor in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = split_attention(q, k, v, packed_rows.rows, packed_rows.group, scale=scale, window=sliding_window)
    return out.transpose(0, 1), None


def _kind_of_layer(module: nn.Module) -> str | None:
    kinds, index = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    return kinds[index] if kinds is not None and index is not None else None


def _shown(option: object) -> str:
    return f"a {type(option).__name__}" if isinstance(option, Tensor) else repr(option)


@torch.no_grad()
def pack(decoder: Any, *, flash: bool, sequence: SequenceGroup | None, half: bool) -> None:
    """Make a transformers model keep packed rows apart, and prove it on a few of them.

    `decoder` has no head, is on its device and not yet sharded; every rank of `sequence` calls this. `flash`: it runs
    transformers' flash attention. `half`: it computes in half precision. Raises `ValueError` if it can't, and says why.
    """
    name = type(decoder).__name__
    keys = ["model_args.ulysses_size: 1"] if sequence is not None and sequence.heads is not None else []
    keys += ["model_args.ring_attention_size: 1"] if sequence is not None and sequence.ring is not None else []
    fix = f"Write {' and '.join(keys) or 'use_sequence_packing: false'}"
    vocabulary = decoder.get_input_embeddings().num_embeddings
    batch = _sample(vocabulary)
    expected = hidden_apart(decoder, batch)
    try:
        if not flash or sequence is not None:
            _use_packed_attention(decoder)
        cut_rows(decoder)
        packed_hidden = _together(decoder, batch, sequence)
        beside_others = _together(decoder, _every_other_row_changed(batch, vocabulary), sequence)
    except (ValueError, *UNUSABLE) as error:
        raise ValueError(f"{name} can't run rows laid end to end: {reason_of(error)}. {fix}") from error
    unchanged = torch.repeat_interleave(torch.arange(len(batch)) % 2 == 1, batch.lengths)
    try:
        prove(name, packed_hidden, expected, beside_others, unchanged, half=half)
    except ValueError as error:
        raise ValueError(f"{error}. {fix}") from None


def reason_of(error: Exception) -> str:
    """Return why a model can't be run in a way, of an error of ours or of its own; raise it if memory ran out."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    message = str(error).rstrip(".")
    return message if isinstance(error, ValueError) else f"its code fails there ({type(error).__name__}: {message})"


def prove(name: str, hidden: Tensor, expected: Tensor, beside_others: Tensor, unchanged: Tensor, *, half: bool) -> None:
    """Raise `ValueError` unless a model computes for rows laid end to end what it computes for each by itself.

    Hidden states [N, D]: `hidden`, `expected`, and `beside_others` beside changed rows, whose tokens aren't in
    `unchanged` [N].
    """
    unchanged = unchanged.to(hidden.device)
    wrong, leaked = _difference(hidden, expected, half), _difference(beside_others[unchanged], hidden[unchanged], half)
    # Packed and apart differ by rounding; a row beside others only where experts take their tokens in other groups.
    if not (wrong <= (0.05 if half else 1e-3) and leaked <= (0.01 if half else 1e-5)):
        raise ValueError(
            f"{name} computes something else for rows laid end to end than for each by itself (relative difference "
            f"{wrong:.2g}), or a row depends on those beside it ({leaked:.2g}): it mixes tokens by other means than "
            "attention, states and convolutions that can be cut at the ends of rows, or numbers positions by itself"
        )


def _difference(mine: Tensor, theirs: Tensor, half: bool) -> float:
    """Return the relative difference of hidden states [N, D]: of the token that differs most; in half precision of the
    middle one, because there a token near a tie may go to another expert."""
    errors = (mine - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    return float(errors.median() if half else errors.max())


def _use_packed_attention(decoder: Any) -> None:
    from transformers import AttentionInterface

    # A compiler would make a version of the loop over rows for every set of lengths.
    AttentionInterface.register(_ATTENTION, torch.compiler.disable(packed_attention))
    if not decoder._can_set_attn_implementation():
        raise ValueError("its attention isn't taken from transformers' AttentionInterface")
    decoder.set_attn_implementation(_ATTENTION)


def _sample(vocabulary: int) -> TokenBatch:
    total = sum(_CHECKED_LENGTHS)
    offsets = torch.tensor((0, *_CHECKED_LENGTHS)).cumsum(0)
    acting = torch.ones(total, dtype=torch.bool)
    acting[offsets[:-1]] = False
    names = tuple(map(str, _CHECKED_LENGTHS))
    return TokenBatch(
        row_ids=tuple(f"{i}:{name}" for i, name in enumerate(names)),
        group_ids=names,
        offsets=offsets,
        token_ids=(torch.arange(total) * 7 + 3) % vocabulary,
        action_mask=acting,
    )


def _every_other_row_changed(batch: TokenBatch, vocabulary: int) -> TokenBatch:
    changed = torch.repeat_interleave(torch.arange(len(batch)) % 2 == 0, batch.lengths)
    return batch.with_columns(token_ids=(batch.token_ids + changed) % vocabulary)


def hidden_apart(decoder: Any, batch: TokenBatch) -> Tensor:
    """Return the hidden states of each row by itself, [N, D] in float32."""
    device = next(decoder.parameters()).device
    rows = [batch.row("token_ids", i)[None].to(device) for i in range(len(batch))]
    return torch.cat([decoder(input_ids=ids, use_cache=False).last_hidden_state[0].float() for ids in rows])


def _together(decoder: Any, batch: TokenBatch, sequence: SequenceGroup | None) -> Tensor:
    device = next(decoder.parameters()).device
    layout = lay_out(batch, device, packed=True, multiple=1 if sequence is None else sequence.multiple)
    return hidden_together(decoder, layout, sequence)[: batch.num_tokens]


def hidden_together(decoder: Any, layout: MicroLayout, sequence: SequenceGroup | None) -> Tensor:
    """Return the hidden states of a layout, [its places, D] in float32; the ranks of `sequence` share a packed line."""
    if sequence is not None:
        layout, _ = sequence.shard(layout)
    hidden = decoder(
        input_ids=layout.ids,
        attention_mask=layout.mask,
        position_ids=layout.positions,
        use_cache=False,
        **row_arguments(layout),
    ).last_hidden_state.flatten(0, 1)
    if sequence is not None:
        hidden = sequence.gathered(hidden)
    return hidden.float()
