"""Let a Hugging Face model compute rows that begin alike as a tree (`attention/prefix_tree.py`), and prove it.

Where rows are packed, our attention runs anyhow. Where they are padded, it stands in for transformers' `sdpa`: a tree
goes to it, everything else to `sdpa` as ever, bit for bit. Recurrent layers carry their states from segment to segment
(`row_states`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from roll.strategies.attention.prefix_tree import tree_of
from roll.strategies.base import TrainSpec
from roll.strategies.hf.hf_packing import (
    SequenceGroup,
    hidden_apart,
    hidden_together,
    packed_attention,
    prove,
    reason_of,
)
from roll.strategies.hf.row_states import cut_rows
from roll.strategies.training.micro import lay_out, lay_out_tree, shares_prefixes
from roll.strategies.training.pretrained import UNUSABLE
from roll.types.batch import TokenBatch

_ATTENTION = "roll_shared"  # name of our function among those of transformers
_STANDS_IN_FOR = "sdpa"

_ROWS = ((1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 6, 9), (1, 2, 3, 4, 10, 11), (12, 13, 14))
"""A row that others continue, branches at two depths, and a row that has nothing in common with them."""
_CHANGED = (1, 3)
"""Rows whose last tokens are changed, to see that the others don't notice."""


def use_prefix_sharing(decoder: Any, spec: TrainSpec, sequence: SequenceGroup | None, *, half: bool) -> bool:
    """Make a model run trees of rows; return False if the role's `use_prefix_sharing` or the model rules it out.

    `decoder` is as `pack` wants it, and as it leaves it where rows are packed. Every rank of `sequence` calls this.
    Raises `ValueError` if the key asks for what can't be.
    """
    packed = spec.worker.use_sequence_packing or sequence is not None
    accelerated = next(decoder.parameters()).device.type != "cpu"
    prepare = partial(_share, decoder, sequence, packed=packed, half=half)
    return shares_prefixes(spec, packed=packed, accelerated=accelerated, prepare=prepare)


@torch.no_grad()
def _share(decoder: Any, sequence: SequenceGroup | None, *, packed: bool, half: bool) -> None:
    before = decoder.config._attn_implementation
    if not packed and before != _STANDS_IN_FOR:
        raise ValueError(f"rows are padded, and {type(decoder).__name__} runs {before} attention instead of sdpa")
    vocabulary = decoder.get_input_embeddings().num_embeddings
    batch, changed = _sample(vocabulary), _sample(vocabulary, shift=20)
    unchanged = torch.repeat_interleave(torch.tensor([i not in _CHANGED for i in range(len(batch))]), batch.lengths)
    device = next(decoder.parameters()).device
    padded = lay_out(batch, device)
    try:
        if packed:
            rows = [batch.select([i]) for i in range(len(batch))]
            expected = torch.cat([_tree_hidden(decoder, row, sequence) for row in rows])
        else:
            expected, ordinary = hidden_apart(decoder, batch), hidden_together(decoder, padded, None)
            _use_shared_attention(decoder)
            cut_rows(decoder)
            if not torch.equal(hidden_together(decoder, padded, None), ordinary):
                raise ValueError(f"{type(decoder).__name__} goes by the name of its attention function")
        hidden, beside = (_tree_hidden(decoder, rows, sequence) for rows in (batch, changed))
        prove(type(decoder).__name__, hidden, expected, beside, unchanged, half=half)
    except (ValueError, *UNUSABLE) as error:
        if not packed:
            decoder.set_attn_implementation(before)
        raise ValueError(reason_of(error)) from error


def _use_shared_attention(decoder: Any) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ordinary, mask_of = ALL_ATTENTION_FUNCTIONS[_STANDS_IN_FOR], ALL_MASK_ATTENTION_FUNCTIONS[_STANDS_IN_FOR]

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        if options.get("packed_rows") is not None:
            return packed_attention(module, query, key, value, attention_mask, **options)
        options.pop("packed_rows", None)
        if attention_mask is None:  # `mask` made none, so nothing else knows of the window
            attention_mask = _window_mask(query, key, options.get("sliding_window"))
        attended: tuple[Tensor, Tensor | None] = ordinary(module, query, key, value, attention_mask, **options)
        return attended

    def mask(*sizes: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
        # A tree comes without a mask; transformers would make one from its positions, which start over.
        if attention_mask is None:
            return None
        made: Tensor | None = mask_of(*sizes, attention_mask=attention_mask, **options)
        return made

    AttentionInterface.register(_ATTENTION, attention)
    AttentionMaskInterface.register(_ATTENTION, mask)
    if not decoder._can_set_attn_implementation():
        raise ValueError("its attention isn't taken from transformers' AttentionInterface")
    decoder.set_attn_implementation(_ATTENTION)


def _window_mask(query: Tensor, key: Tensor, window: int | None) -> Tensor | None:
    """Return which keys [1, 1, Q, K] each query sees, itself included; None where the window is as long as the rows."""
    queries, keys = query.shape[-2], key.shape[-2]
    if window is None or keys <= window:
        return None
    back = torch.arange(keys - queries, keys, device=key.device)[:, None] - torch.arange(keys, device=key.device)
    return ((back >= 0) & (back < window))[None, None]


def _sample(vocabulary: int, shift: int = 0) -> TokenBatch:
    """Return `_ROWS`, the last two tokens of some of them another by `shift`."""
    rows = [list(row) for row in _ROWS]
    for i in _CHANGED:
        rows[i][-2:] = [token + shift for token in rows[i][-2:]]
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    ids = torch.tensor([token for row in rows for token in row])
    acting = torch.ones(len(ids), dtype=torch.bool)
    acting[offsets[:-1]] = False
    names = tuple(str(i) for i in range(len(rows)))
    return TokenBatch(
        row_ids=names, group_ids=names, offsets=offsets, token_ids=ids * 7 % vocabulary, action_mask=acting
    )


def _tree_hidden(decoder: Any, batch: TokenBatch, sequence: SequenceGroup | None) -> Tensor:
    """Return the hidden states of each token of the batch, [N, D]."""
    multiple = 1 if sequence is None else sequence.multiple
    layout = lay_out_tree(batch, next(decoder.parameters()).device, multiple=multiple)
    hidden = hidden_together(decoder, layout, sequence)
    return hidden[tree_of(batch)[1].to(hidden.device)]
