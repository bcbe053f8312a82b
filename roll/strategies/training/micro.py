"""Cutting a rank's rows into micro-batches, as many on every rank, and laying one out for a model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from roll.configs.rules.layout_rules import sharing_obstacle
from roll.strategies.attention.prefix_tree import PrefixTree, plan_shared_batches, tree_of
from roll.strategies.attention.zigzag import zigzag_order
from roll.strategies.base import LossFn, Output, TrainSpec
from roll.types.batch import Denominators, TokenBatch, TokenOutputs
from roll.utils.partition import pack_first_fit_decreasing

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Peers:
    """The data-parallel ranks, over which results of a rank's rows are summed."""

    ranks: int
    group: ProcessGroup | None
    """None: all ranks."""
    device: torch.device
    """Of what they exchange."""

    def most(self, mine: int) -> int:
        """Return the largest of the ranks' numbers."""
        if self.ranks == 1:
            return mine
        most = torch.tensor(mine, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return int(most)

    def sums(self, *mine: float) -> list[float]:
        """Return numbers added up over the ranks."""
        if self.ranks == 1:
            return list(mine)
        sums = torch.tensor(mine, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums, group=self.group)
        return list(sums.tolist())


class ReadsBeside(Protocol):
    """What knows what a model reads beside the tokens of its rows."""

    def costs(self, batch: TokenBatch) -> list[int]:
        """Return what each row costs to compute, in tokens: its own and those that the rest is worth."""

    def lay_out(self, layout: MicroLayout, micro: TokenBatch) -> MicroLayout:
        """Add it to the layout of a micro-batch; raises `ValueError` for rows that don't fit together with it."""


class MicroBatches:
    """How a role's rows are cut and laid out, as its section of the configuration says."""

    def __init__(self, spec: TrainSpec, peers: Peers) -> None:
        self._spec = spec
        self._peers = peers
        self.shares_prefixes = False
        """Whether the model computes tokens that rows have in common at their beginnings once."""
        self.shared_tokens = 0
        """Tokens that this has saved since the last optimizer step began."""
        self.beside: ReadsBeside | None = None
        """None: the model reads nothing but tokens."""

    def parts(self, batch: TokenBatch, *, training: bool) -> tuple[list[list[int]], bool]:
        """Return (rows of each micro-batch, whether tokens that rows share are computed once).

        There are as many on every rank: an empty one stands for a padding row. Training keeps the rows of a unit in one
        micro-batch, where the loss sees them together. Sharing is decided for this rank's rows alone: it changes no
        collective. Rows with pictures are computed whole: what they show is part of their beginnings.
        """
        max_rows, max_tokens = self._limits(training=training)
        units = (batch if training else batch.with_row_units()).units()
        parts = None
        # The engine may have sent the same token of two rows to different experts.
        if self.shares_prefixes and batch.routed_experts is None and not batch.has_pictures:
            parts = plan_shared_batches(batch, units, max_rows=max_rows, max_tokens=max_tokens)
        shared = parts is not None
        if parts is None:
            packed = self._spec.worker.use_sequence_packing
            costs = batch.lengths.tolist() if self.beside is None else self.beside.costs(batch)
            parts = plan_micro_batches(costs, units, max_rows=max_rows, max_tokens=max_tokens, packed=packed)
        return parts + [[] for _ in range(self._peers.most(len(parts)) - len(parts))], shared

    def laid_out(
        self, micro: TokenBatch, outputs: Sequence[Output], *, packed: bool, multiple: int, shared: bool
    ) -> MicroLayout:
        """Return the layout of a micro-batch for these outputs, `shared` as a tree; see `lay_out`."""
        teacher_ids, ahead = "student_logprobs" in outputs, self._spec.kind != "reward"
        device = self._peers.device
        if self.beside is None and micro.has_pictures:
            role = self._spec.role
            raise ValueError(f"{role}: the rows have pictures, and its model isn't given any; it would learn blind")
        if shared:
            layout = lay_out_tree(micro, device, multiple=multiple, teacher_ids=teacher_ids, ahead=ahead)
            self.shared_tokens += micro.num_tokens - (layout.ids.shape[1] - layout.padding)
        else:
            layout = lay_out(micro, device, packed=packed, multiple=multiple, teacher_ids=teacher_ids, ahead=ahead)
        return layout if self.beside is None else self.beside.lay_out(layout, micro)

    def _limits(self, *, training: bool) -> tuple[int | None, int | None]:
        """Return the most rows, or the most tokens, of a micro-batch."""
        worker = self._spec.worker
        if training:
            section = self._spec.training
            dynamic = section.use_dynamic_batching_in_train
            rows = section.training_args.per_device_train_batch_size
            tokens = section.max_tokens_per_microbatch_in_train
        else:
            dynamic, rows = worker.use_dynamic_batching_in_infer, worker.infer_batch_size
            tokens = worker.max_tokens_per_microbatch_in_infer
        return (None, tokens) if dynamic else (rows, None)


def plan_micro_batches(
    lengths: Sequence[int],
    units: Sequence[Sequence[int]],
    *,
    max_rows: int | None,
    max_tokens: int | None,
    packed: bool = False,
) -> list[list[int]]:
    """Sort units by length and cut them so that a micro-batch stays within the limits.

    Args:
        lengths: tokens per row, or what it costs in tokens.
        units: rows that stay together; a unit beyond the limits is alone in its micro-batch.
        max_rows: rows in a micro-batch, or None.
        max_tokens: tokens in a micro-batch, padding included, or None.
        packed: rows are laid end to end, so that only their own tokens count.

    Returns:
        Row positions per micro-batch, longest rows first: a run that would not fit in memory fails at its start.
    """
    if packed and max_tokens is not None:
        bins = pack_first_fit_decreasing([sum(lengths[i] for i in unit) for unit in units], max_tokens)
        parts = [sorted(i for number in numbers for i in units[number]) for numbers in bins]
        return sorted(parts, key=lambda rows: (-sum(lengths[i] for i in rows), rows[0]))
    widths = [max(lengths[i] for i in unit) for unit in units]
    parts, width = [], 0
    for number in sorted(range(len(units)), key=lambda number: (-widths[number], units[number][0])):
        unit = units[number]
        rows = len(parts[-1]) + len(unit) if parts else 0
        fits = bool(parts) and (max_rows is None or rows <= max_rows)
        if fits and (max_tokens is None or width * rows <= max_tokens):
            parts[-1] += unit
        else:
            parts.append(list(unit))
            width = widths[number]  # the first unit of a part has its longest row
    return parts


@dataclass(frozen=True)
class PictureInputs:
    """The different pictures of a micro-batch, and where its rows show them."""

    pixels: Tensor
    """float32 [patches of all pictures, numbers of a patch]"""
    grid: Tensor
    """int64 [pictures, 3], frames, rows and columns of patches."""
    features: Tensor
    """int64 [places], which feature of all pictures, one after the other, stands at each place of `ids`, row by row.
    Empty: no row has a place, and the one picture is there because other ranks or micro-batches run the tower."""


@dataclass(frozen=True)
class MicroLayout:
    """One micro-batch as a model reads it, and which of its tokens are scored.

    Padded: one row of `ids` per row of the batch, padding at the right. Packed: a single row of `ids` that holds the
    rows of the batch end to end, which `lengths` tells apart, or their `tree`.
    """

    ids: Tensor
    """int64 [B, T]; packed [1, N]"""
    mask: Tensor | None
    """int64 [B, T], 1 at real tokens; None where nothing is padded."""
    positions: Tensor
    """int64, as `ids`; begins at 0 in every row of the batch. Of a model that reads pictures [4, *ids]: these, and
    those in time, height and width."""
    lengths: tuple[int, ...]
    """Tokens of each row of the batch."""
    index: Tensor
    """int64 [S], flattened position in `ids` whose hidden state predicts each scored token."""
    targets: Tensor
    """int64 [S], the scored tokens; [S, 1 + K] with those of `teacher_ids` beside each."""
    flat: Tensor
    """int64 [S], where each scored token stands in the ragged columns."""
    packed: bool = False
    padding: int = 0
    """Tokens that belong to no row, at the end of a packed line."""
    spans: tuple[int, ...] = ()
    """Tokens from each 0 of `positions` to the next, line after line, as the host knows them: reading them off the
    tensor would wait for the device. Empty with a tree, whose segments don't begin at 0."""
    group: ProcessGroup | None = None
    """Process group whose ranks hold one shard of a packed line each and exchange heads for tokens; `lengths`,
    `padding` and `spans` are the whole line's, everything else this rank's. None: nothing is exchanged."""
    ring: ProcessGroup | None = None
    """Process group between whose ranks keys and values travel, as `group` otherwise. None: there is no ring."""
    tree: PrefixTree | None = None
    """Segments of a packed line in which tokens that rows have in common at their beginnings stand once, padding
    included; None: every row stands there whole."""
    copies: Tensor | None = None
    """int64 [tokens with an action mask], with a tree: which of the scored tokens each of `flat` is, because rows may
    share those, too. None: they are the same."""

    pictures: PictureInputs | None = None
    """None: there are none, and the model's tower doesn't run."""
    experts: Tensor | None = None
    """int16 [B, T, L, K], the experts of each of `ids` as in `TokenBatch.routed_experts`, -1 also at padding; None: the
    model routes."""

    @property
    def segments(self) -> tuple[int, ...]:
        """Return lengths of all that a packed line is made of: padding is a row by itself, which no other sees."""
        return (*self.lengths, self.padding) if self.padding else self.lengths


def lay_out(
    batch: TokenBatch,
    device: torch.device,
    *,
    packed: bool = False,
    multiple: int = 1,
    teacher_ids: bool = False,
    ahead: bool = True,
) -> MicroLayout:
    """Return the layout of a micro-batch in which every action token is scored.

    `multiple` rounds up the padded width, or the packed length. With `teacher_ids` those tokens are scored, too.
    A token is scored by the hidden state before it, which predicts it; not `ahead`: by its own.
    """
    assert not batch.action_mask[batch.offsets[:-1]].any(), "the first token of a row has no context to be chosen in"
    flat = batch.action_mask.nonzero()[:, 0]
    targets = batch.token_ids[flat]
    if teacher_ids:
        targets = torch.cat([targets[:, None], batch.require("teacher_ids")[flat]], dim=1)
    starts = torch.repeat_interleave(batch.offsets[:-1], batch.lengths)
    positions = torch.arange(batch.num_tokens) - starts
    padding = -(batch.num_tokens if packed else int(batch.lengths.max())) % multiple
    if packed:
        ids, position_of, mask = batch.token_ids[None], torch.arange(batch.num_tokens), None
        grid = torch.cat([positions, torch.arange(padding).clamp(max=int(positions.max()))])[None]
        spans = (*batch.lengths.tolist(), *((padding,) if padding else ()))
    else:
        ids, mask = batch.pad("token_ids"), F.pad(batch.valid().long(), (0, padding))
        longest = ids.shape[1]
        rows = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)
        position_of = rows * (longest + padding) + positions
        # A model may have no place for positions past its longest row.
        grid = torch.arange(longest + padding).clamp(max=longest - 1).expand(len(batch), -1)
        spans = (longest + padding,) * len(batch)
    ids = F.pad(ids, (0, padding))
    experts = batch.routed_experts
    if experts is not None:
        padded = experts.new_full((ids.numel(), *experts.shape[1:]), -1).index_copy(0, position_of, experts)
        experts = padded.unflatten(0, ids.shape).to(device)
    return MicroLayout(
        ids=ids.to(device),
        mask=None if mask is None else mask.to(device),
        positions=grid.to(device),
        lengths=tuple(batch.lengths.tolist()),
        index=(position_of[flat] - int(ahead)).to(device),
        targets=targets.to(device),
        flat=flat.to(device),
        packed=packed,
        padding=padding if packed else 0,
        spans=spans,
        experts=experts,
    )


def lay_out_tree(
    batch: TokenBatch, device: torch.device, *, multiple: int = 1, teacher_ids: bool = False, ahead: bool = True
) -> MicroLayout:
    """Return the packed layout in which a token that several rows share, with all before it, stands once.

    So does what is scored about it. Arguments as of `lay_out`.
    """
    plain = lay_out(batch, torch.device("cpu"), packed=True, teacher_ids=teacher_ids, ahead=ahead)
    tree, position_of, source = tree_of(batch)
    padding = -tree.num_tokens % multiple
    index, targets = position_of[plain.index], plain.targets
    pairs = torch.cat([index[:, None], targets if targets.dim() > 1 else targets[:, None]], dim=1)
    unique, copies = torch.unique(pairs, dim=0, return_inverse=True)
    positions = torch.cat([plain.positions[0, source], torch.zeros(padding, dtype=torch.int64)])
    return replace(
        plain,
        ids=F.pad(batch.token_ids[source], (0, padding))[None].to(device),
        positions=positions[None].to(device),
        index=unique[:, 0].to(device),
        targets=(unique[:, 1:] if targets.dim() > 1 else unique[:, 1]).to(device),
        flat=plain.flat.to(device),
        padding=padding,
        spans=(),
        tree=tree.with_padding(padding),
        copies=copies.to(device),
    )


def widen(layout: MicroLayout, multiple: int, least: tuple[int, int] = (0, 0)) -> MicroLayout:
    """Return the layout with padding up to a multiple of tokens per row, and `least` (rows, tokens per row).

    Positions begin at 0 where a row does, and go on counting in its padding.
    """
    rows, tokens = layout.ids.shape
    more_rows, more = max(0, least[0] - rows), max(0, least[1] - tokens)
    more += -(tokens + more) % multiple
    # In a packed line the padding is a row of its own; at the end of padded rows nothing looks at it.
    first = 0 if layout.packed else tokens
    device = layout.ids.device
    tail = torch.arange(first, first + more, device=device).expand(rows, -1)
    below = torch.arange(tokens + more, device=device).expand(more_rows, -1)
    spans = (*layout.spans, *((more,) if more else ())) if layout.packed else (tokens + more,) * rows
    tree = layout.tree
    if tree is not None:
        for width in (more, *(tokens + more,) * more_rows):
            tree = tree.with_padding(width)
    return replace(
        layout,
        spans=(*spans, *(tokens + more,) * more_rows) if tree is None else (),
        tree=tree,
        ids=F.pad(layout.ids, (0, more, 0, more_rows)),
        experts=None
        if layout.experts is None
        else F.pad(layout.experts, (0, 0, 0, 0, 0, more, 0, more_rows), value=-1),
        positions=torch.cat([torch.cat([layout.positions, tail], dim=1), below]),
        index=layout.index + layout.index // tokens * more,
    )


def take_shard(
    layout: MicroLayout, rank: int, ranks: int, group: ProcessGroup | None = None
) -> tuple[MicroLayout, Tensor]:
    """Return (part `rank` of `ranks` equal parts of every row, int64 [S] of the scored tokens it predicts).

    `ranks` divides the tokens of a row.
    """
    tokens = layout.ids.shape[1]
    width = tokens // ranks
    row, column = layout.index // tokens, layout.index % tokens
    mine = (column // width == rank).nonzero()[:, 0]
    part = slice(rank * width, (rank + 1) * width)
    shard = replace(
        layout,
        ids=layout.ids[:, part],
        positions=layout.positions[:, part],
        experts=None if layout.experts is None else layout.experts[:, part],
        index=(row * width + column - rank * width)[mine],
        targets=layout.targets[mine],
        group=group,
    )
    return shard, mine


def zigzag(layout: MicroLayout, ranks: int) -> MicroLayout:
    """Return a packed layout in the order in which the ranks of a ring hold its tokens; `2 * ranks` divides them."""
    order = zigzag_order(layout.ids.shape[1], ranks).to(layout.ids.device)
    return replace(
        layout,
        ids=layout.ids[:, order],
        positions=layout.positions[:, order],
        index=order.argsort()[layout.index],
        experts=None if layout.experts is None else layout.experts[:, order],
    )


def padding_row(batch: TokenBatch) -> TokenBatch:
    """Return a row that counts nowhere, for a rank that must take part in a pass but has nothing to compute."""
    return TokenBatch(
        row_ids=("padding",),
        group_ids=("padding",),
        offsets=torch.tensor([0, 2]),
        token_ids=torch.zeros(2, dtype=batch.token_ids.dtype),
        action_mask=torch.tensor([False, True]),
        teacher_ids=None if batch.teacher_ids is None else batch.teacher_ids.new_zeros(2, *batch.teacher_ids.shape[1:]),
    )


def rows_to_compute(batch: TokenBatch, loss_fn: LossFn) -> list[int]:
    """Return the rows that a training step must run: units with a gradient, and at least one to report on."""
    if loss_fn.has_gradient is None:
        return list(range(len(batch)))
    has_gradient, units = loss_fn.has_gradient(batch).tolist(), batch.units()
    units_left = [unit for unit in units if any(has_gradient[row] for row in unit)] or units[:1]
    return sorted(row for unit in units_left for row in unit)


def nonfinite_rows(outputs: TokenOutputs, batch: TokenBatch) -> set[str]:
    """Return the rows of units in which a row of non-zero weight has an output of -inf, inf or NaN at a loss token."""
    counted = batch.loss_mask if batch.loss_mask is not None else batch.action_mask
    finite = [column.detach().isfinite() for column in outputs.columns().values()]
    broken = ~torch.stack([part if part.dim() == 1 else part.all(-1) for part in finite]).all(0).cpu() & counted
    if not bool(broken.any()):
        return set()
    rows = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)[broken].unique().tolist()
    units = {batch.unit_ids[row] for row in rows if batch.loss_weight is None or bool(batch.loss_weight[row] != 0)}
    return {row for row, unit in zip(batch.row_ids, batch.unit_ids, strict=True) if unit in units}


def denominators(batch: TokenBatch) -> Denominators:
    """Return this rank's share of the mini-batch's tokens, sequences and units; rows of weight 0 don't count."""
    counted = batch.loss_mask if batch.loss_mask is not None else batch.action_mask
    rows = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)
    per_row = torch.zeros(len(batch), dtype=torch.float64).index_add_(0, rows, counted.double())
    if batch.loss_weight is not None:
        per_row = torch.where(batch.loss_weight != 0, per_row, torch.zeros_like(per_row))
    units = {unit for unit, tokens in zip(batch.unit_ids, per_row.tolist(), strict=True) if tokens > 0}
    return Denominators(tokens=float(per_row.sum()), sequences=float((per_row > 0).sum()), units=float(len(units)))


def shares_prefixes(
    spec: TrainSpec, *, packed: bool, accelerated: bool, prepare: Callable[[], None] = lambda: None
) -> bool:
    """Return False if the role's `use_prefix_sharing` or something else rules it out, and log what.

    `packed`: the role lays rows end to end anyhow. `accelerated`: it computes on an accelerator. `prepare` makes the
    model ready, called unless the configuration rules it out; its `ValueError` says why the model can't. Raises
    `ValueError` if the key asks for what can't be.
    """
    wanted = spec.worker.use_prefix_sharing
    if wanted is False:
        return False
    why = sharing_obstacle(spec.worker)
    if spec.kind == "reward" and not spec.trains:
        why = "a reward model reads whole texts"
    if why is None and wanted is None and accelerated and not packed:
        why = "on an accelerator that is tried with use_sequence_packing: true only"
    if why is None:
        try:
            prepare()
        except ValueError as error:
            why = str(error)
    if why is not None and wanted:
        raise ValueError(f"{spec.role}.use_prefix_sharing: {why}. Remove it")
    if why is not None:
        logger.info("%s: beginnings that rows share are computed for each of them: %s", spec.role, why)
    return why is None
