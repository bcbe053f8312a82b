"""Attention and norm modules for Megatron's layer specifications, equal to those of transformers.

They exist because Megatron's own need Transformer Engine for context parallelism and packed rows, and its plain norm
refuses sequence parallelism. `GPTModel` is built without position embeddings; the `packed_seq_params` that Megatron
hands through all layers untouched, recomputation included, carry the rows and their rotations instead: made once for a
micro-batch, so that no layer waits for the device.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roll.strategies.attention.attention import TreePlan, split_attention
from roll.strategies.attention.varlen_kernel import RowPlan

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex).*")
    from megatron.core.packed_seq_params import PackedSeqParams


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv:1910.07467): float32 inside, the weight in its own type, as transformers does."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=parameter_device(config)))
        # With split activations each rank sees part of the tokens: Megatron sums the gradients of weights marked so.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [..., hidden_size] normed, of the same shape and type."""
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(hidden.dtype)


def parameter_device(config: Any) -> torch.device:
    """Return where Megatron creates the parameters of a model with this configuration."""
    return torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (arXiv:2104.09864) with the frequencies of a transformers configuration."""

    config: Any
    head_dim: int
    longest: int | None = None
    """Tokens of the longest row of the run, which the types `dynamic` and `longrope` depend on; None: of each call."""

    def frequencies(self, positions: Tensor) -> tuple[Tensor, float]:
        """Return (inverse frequencies float32 [D / 2], factor of the rotation) for a batch with these positions."""
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        kind = self.config.rope_parameters["rope_type"]
        if kind == "default":
            exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=positions.device) / self.head_dim
            return 1.0 / (self.config.rope_parameters["rope_theta"] ** exponents), 1.0
        longest = (self.longest or int(positions.max()) + 1) if kind in ("dynamic", "longrope") else None
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](self.config, positions.device, seq_len=longest)
        return frequencies.float(), factor

    def tables(self, positions: Tensor, dtype: torch.dtype, part: slice) -> tuple[Tensor, Tensor]:
        """Return (cosines, sines) [T, B, 1, D] of the columns `part` of positions [B, S]."""
        frequencies, factor = self.frequencies(positions)
        angles = positions[:, part].T[..., None].float() * frequencies
        angles = torch.cat([angles, angles], dim=-1)[:, :, None]
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


@dataclass
class MegatronPackedRows(PackedSeqParams):
    """The rows of a micro-batch, for all its layers. Of Megatron's own fields none is set: they are for its kernels."""

    positions: Tensor | None = None
    """int64 [B, S] of the whole rows; 0 begins a row, also inside a line of packed rows. Padding goes on counting to
    the right of a row, where no query looks."""
    rows: RowPlan | TreePlan | None = None
    """From each 0 of `positions` to the next, row-major; or the segments of a line of rows that share beginnings."""
    experts: Tensor | None = None
    """int16 [T, B, L, K], of this rank's tokens, see `MicroLayout.experts`."""
    _tables: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def tables(self, rotary: Rotary, dtype: torch.dtype, part: slice) -> tuple[Tensor, Tensor]:
        """Return `Rotary.tables`; the first layer makes them."""
        assert self.positions is not None
        key = (dtype, part.start, part.stop)
        if key not in self._tables:
            self._tables[key] = rotary.tables(self.positions, dtype, part)
        return self._tables[key]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return [T, B, H, D] with the first half of every head paired with its second half."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


class RotaryAttention(nn.Module):
    """Rotation and causal attention between Megatron's projections.

    With context parallelism each rank of the group holds an equal, contiguous shard of every row; heads are exchanged
    for tokens around the attention (Ulysses, arXiv:2309.14509).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        pg_collection: Any,
        softmax_scale: float | None = None,
        *,
        rotary: Rotary,
        windows: tuple[int | None, ...],
        **unused: Any,
    ) -> None:
        super().__init__()
        del unused  # mask type and the like, which are always the same here
        self.rotary = rotary
        self.window = windows[layer_number - 1]
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.group = pg_collection.cp if config.context_parallel_size > 1 else None
        self.replay: Any = None
        """That of the layer's router, which isn't told itself which rows it runs."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        packed_seq_params: MegatronPackedRows,
        **unused: Any,
    ) -> Tensor:
        """Return attention of each token to those before it in its row: [T, B, H * D].

        `query` is [T, B, H, D], this rank's shard of the rows and its heads; `key` and `value` [T, B, K, D], K divides
        H.
        """
        del attention_mask, unused
        if self.replay is not None:
            self.replay.rows = packed_seq_params
        shard, rank = len(query), 0 if self.group is None else dist.get_rank(self.group)
        part = slice(rank * shard, (rank + 1) * shard)
        cos, sin = packed_seq_params.tables(self.rotary, query.dtype, part)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        rows, scale = packed_seq_params.rows, self.scale
        assert rows is not None
        return split_attention(query, key, value, rows, self.group, scale=scale, window=self.window).flatten(2)
