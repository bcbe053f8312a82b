"""Low-rank adapters beside Megatron's linear layers, with the numbers of peft beside those of transformers.

One layer of Megatron is several of transformers (`linear_qkv`), divided over tensor-parallel ranks by rows or columns.
Adapters are those of transformers' layers, each with A and B of its own. Of a layer that is divided by rows, its
output, B is divided likewise and A is whole on every rank; by columns, its input, the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roll.strategies.megatron.mapping import MappedParameter
from roll.strategies.megatron.pieces import Rectangle


@dataclass(frozen=True)
class Share:
    """Rows (or columns) `start` to `stop` of a layer's weight, and the first of them in Megatron's local matrix."""

    start: int
    stop: int
    position: int


def shares_of(entry: MappedParameter, tensor: int, rank: int, ranks: int) -> list[Share]:
    """Return what `rank` of `ranks` holds of a tensor of an entry."""
    shares, position = [], 0
    for segment in entry.share(rank, ranks):
        if segment.tensor == tensor:
            shares.append(Share(segment.start, segment.stop, position))
        position += segment.size
    return shares


class Factors(nn.Module):
    """A and B of one layer of transformers, this rank's part."""

    places: Tensor
    """int64, where this rank's columns of the output (`by_rows`) or of the input lie in Megatron's weight."""

    def __init__(self, name: str, a: Tensor, b: Tensor, scaling: float, shares: list[Share], *, by_rows: bool) -> None:
        """Cut A [r, in] and B [out, r] of the layer `name` to this rank's `shares` of its rows, or of its columns."""
        super().__init__()
        self.name, self.scaling, self.by_rows, self.shares = name, scaling, by_rows, shares
        self.shapes = {"A": tuple(a.shape), "B": tuple(b.shape)}
        cut = [slice(share.start, share.stop) for share in shares]
        self.a = nn.Parameter(a.clone() if by_rows else torch.cat([a[:, part] for part in cut], 1).contiguous())
        self.b = nn.Parameter(torch.cat([b[part] for part in cut]) if by_rows else b.clone())
        rows = torch.cat([torch.arange(share.stop - share.start) + share.position for share in shares])
        self.register_buffer("places", rows, persistent=False)

    def mark(self, *, sequence_parallel: bool) -> None:
        """Say which factor is a shard, so that a norm counts each number once, and whose gradients are partial."""
        from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes as mark

        divided, replicated = (self.b, self.a) if self.by_rows else (self.a, self.b)
        mark(divided, True, 0 if self.by_rows else 1, 1)
        # With split activations each rank has seen some of the tokens only: Megatron sums over ranks then.
        replicated.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor, output: Tensor, *, split: bool) -> Tensor:
        """Add this layer's product to `output`, of which it has some columns. `split`: activations along the tokens."""
        from megatron.core import tensor_parallel as tp

        a, b = self.a.to(inputs.dtype), self.b.to(inputs.dtype)
        inner = inputs @ a.t()
        if self.by_rows:
            gather = tp.gather_from_sequence_parallel_region if split else tp.copy_to_tensor_model_parallel_region
            inner = gather(inner)
            return output.index_add(-1, self.places, (inner @ b.t() * self.scaling).to(output.dtype))
        spread = tp.reduce_scatter_to_sequence_parallel_region if split else tp.reduce_from_tensor_model_parallel_region
        return output + (spread(inner) @ b.t() * self.scaling).to(output.dtype)

    def product(self) -> Tensor:
        """Return this rank's part of scaling * B A, float32."""
        product: Tensor = self.scaling * (self.b.detach().float() @ self.a.detach().float())
        return product

    def divided(self, matrix: str) -> bool:
        """Return whether matrix `A` or `B` is cut over tensor-parallel ranks; otherwise each has all of it."""
        return (matrix == "B") == self.by_rows

    def rectangles(self, matrix: str, key: str) -> list[Rectangle]:
        """Return where this rank's part of a matrix is in the whole one."""
        rows, columns = (self.a if matrix == "A" else self.b).shape
        shape, common = self.shapes[matrix], {"key": key, "full_shape": self.shapes[matrix], "strides": (columns, 1)}
        if not self.divided(matrix):
            return [Rectangle(begins=(0, 0), sizes=shape, offset=0, **common)]  # type: ignore[arg-type]
        result, position = [], 0
        for share in self.shares:
            size = share.stop - share.start
            begins, sizes = ((share.start, 0), (size, columns)) if self.by_rows else ((0, share.start), (rows, size))
            offset = position * columns if self.by_rows else position
            result.append(Rectangle(begins=begins, sizes=sizes, offset=offset, **common))  # type: ignore[arg-type]
            position += size
        return result


class LinearAdapters(nn.Module):
    """The adapters of one of Megatron's linear layers: adds to what comes out of it, and into its weight."""

    def __init__(self, factors: list[Factors], weight: nn.Parameter, *, split: bool) -> None:
        super().__init__()
        self.factors = nn.ModuleList(factors)
        self.enabled, self._split = True, split
        self.base = [weight]  # in a list, so that it isn't a parameter of this module too

    @property
    def parts(self) -> list[Factors]:
        """Return one part for each layer of transformers that this layer is made of."""
        return list(self.factors)  # type: ignore[arg-type]

    def forward(self, module: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> Any:
        """Run after the linear layer's own forward, as its hook."""
        del module
        result, bias = output
        if self.enabled:
            for factors in self.parts:
                result = factors(inputs[0], result, split=self._split)
        return result, bias

    def merged(self, matrix: Tensor) -> Tensor:
        """Return the layer's weight, this rank's part, with the products added, float32."""
        merged_weight = matrix.float()
        for factors in self.parts:
            dim = 0 if factors.by_rows else 1
            merged_weight = merged_weight.index_add(dim, factors.places, factors.product())
        return merged_weight
