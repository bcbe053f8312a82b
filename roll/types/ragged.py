"""Ragged carriers: flat token columns plus row offsets, with row ids that make a wrong join impossible.

Nothing is padded until a strategy lays out a micro-batch; `pad` gives the `[B, T]` view that the maths wants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

R = TypeVar("R", bound="Ragged")


def token_column() -> Any:
    """Return an optional column with one entry per token."""
    return field(default=None, metadata={"level": "token"})


def row_column() -> Any:
    """Return an optional column with one entry per row."""
    return field(default=None, metadata={"level": "row"})


class RowMismatch(ValueError):
    """Two carriers that should describe the same rows don't."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Ragged:
    """Rows of different length. Subclasses declare columns with `token_column()` and `row_column()`."""

    row_ids: tuple[str, ...]
    offsets: Tensor
    """int64 [B + 1]; row i is `column[offsets[i]:offsets[i + 1]]`."""

    def __post_init__(self) -> None:
        if self.offsets.shape != (len(self.row_ids) + 1,):
            got = tuple(self.offsets.shape)
            raise ValueError(f"{len(self.row_ids)} rows need {len(self.row_ids) + 1} offsets, got shape {got}")
        if int(self.offsets[0]) != 0 or bool((self.offsets.diff() < 0).any()):
            raise ValueError(f"offsets must start at 0 and never fall, got {self.offsets.tolist()[:8]}")
        if len(set(self.row_ids)) != len(self.row_ids):
            twice = next(row_id for row_id, count in Counter(self.row_ids).items() if count > 1)
            raise ValueError(f"row id {twice!r} appears twice; every row needs its own id")
        for name, level in self._levels().items():
            column = getattr(self, name)
            expected = self.num_tokens if level == "token" else len(self)
            if column is not None and len(column) != expected:
                raise ValueError(f"column {name!r} has {len(column)} entries, expected {expected} (one per {level})")

    @classmethod
    def _levels(cls) -> dict[str, str]:
        return {f.name: f.metadata["level"] for f in fields(cls) if "level" in f.metadata}

    def columns(self) -> dict[str, Tensor]:
        """Return the columns that are present, by name."""
        return {name: getattr(self, name) for name in self._levels() if getattr(self, name) is not None}

    def __len__(self) -> int:
        return len(self.row_ids)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens over all rows."""
        return int(self.offsets[-1])

    @property
    def lengths(self) -> Tensor:
        """Return int64 [B], the tokens per row."""
        return self.offsets.diff()

    def require(self, name: str) -> Tensor:
        """Return the column called `name`; raises when nobody has filled it."""
        column = getattr(self, name)
        if column is None:
            raise ValueError(f"column {name!r} is not filled; present: {sorted(self.columns())}")
        return column

    def units(self) -> list[list[int]]:
        """Return the rows of each unit, ascending. What cuts a batch deals out units; here every row is one."""
        return [[row] for row in range(len(self))]

    def row(self, name: str, index: int) -> Tensor:
        """Return one row of a token column, [T_i]."""
        return self.require(name)[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def _token_index(self, rows: Sequence[int]) -> Tensor:
        starts = self.offsets[:-1].tolist()
        ends = self.offsets[1:].tolist()
        parts = [torch.arange(starts[i], ends[i]) for i in rows]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def _row_values(self, rows: Sequence[int]) -> dict[str, tuple[Any, ...]]:
        """Fields other than columns that follow the rows."""
        return {"row_ids": tuple(self.row_ids[i] for i in rows)}

    def select(self: R, rows: Sequence[int]) -> R:
        """Return the rows at these positions, in this order (each at most once)."""
        token_index = self._token_index(rows)
        row_index = torch.as_tensor(list(rows), dtype=torch.int64)
        picked = {
            name: column[token_index if self._levels()[name] == "token" else row_index]
            for name, column in self.columns().items()
        }
        lengths = self.lengths[row_index]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        changes: dict[str, Any] = {**self._row_values(rows), **picked}
        return replace(self, offsets=offsets, **changes)

    def reorder(self: R, row_ids: Sequence[str]) -> R:
        """Return the same rows in the order of `row_ids`; raises `RowMismatch` unless they are the same set."""
        if len(row_ids) != len(self) or set(row_ids) != set(self.row_ids):
            absent = sorted(set(row_ids) - set(self.row_ids))[:3]
            extra = sorted(set(self.row_ids) - set(row_ids))[:3]
            raise RowMismatch(
                f"rows differ: wanted but absent {absent}, present but unwanted {extra} "
                f"({len(row_ids)} wanted, {len(self)} present)"
            )
        position = {row_id: i for i, row_id in enumerate(self.row_ids)}
        return self.select([position[row_id] for row_id in row_ids])

    @classmethod
    def concat(cls: type[R], parts: Sequence[R]) -> R:
        """Join all rows of all parts; the parts must have the same columns filled."""
        if not parts:
            raise ValueError("concat needs at least one part")
        names = [set(part.columns()) for part in parts]
        if any(n != names[0] for n in names):
            raise ValueError(f"parts have different columns: {[sorted(n) for n in names]}")
        columns = {name: torch.cat([part.columns()[name] for part in parts]) for name in names[0]}
        lengths = torch.cat([part.lengths for part in parts])
        joined = {
            key: tuple(item for part in parts for item in part._row_values(range(len(part)))[key])
            for key in parts[0]._row_values([])
        }
        changes: dict[str, Any] = {**joined, **columns}
        return replace(parts[0], offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), **changes)

    def with_columns(self: R, **columns: Tensor | None) -> R:
        """Return the same rows with these columns set (aligned with this carrier)."""
        unknown = set(columns) - set(self._levels())
        if unknown:
            raise ValueError(f"unknown columns {sorted(unknown)}; known: {sorted(self._levels())}")
        changes: dict[str, Any] = dict(columns)
        return replace(self, **changes)

    def join(self: R, other: Ragged, **names: str) -> R:
        """Take columns from `other`, matched by row id: `batch.join(scored, ref_logprobs="logprobs")`.

        Raises `RowMismatch` when the row ids or the row lengths differ, so a value never lands on the wrong row.
        """
        aligned = other.reorder(self.row_ids)
        if not torch.equal(aligned.lengths, self.lengths):
            bad = int((aligned.lengths != self.lengths).nonzero()[0])
            here, there = int(self.lengths[bad]), int(aligned.lengths[bad])
            raise RowMismatch(f"row {self.row_ids[bad]!r} has {here} tokens here and {there} there")
        return self.with_columns(**{mine: aligned.require(theirs) for mine, theirs in names.items()})

    def pad(self, name: str, value: float = 0.0) -> Tensor:
        """Return a token column as [B, T], right-padded with `value`; gradients flow."""
        return pad_flat(self.require(name), self.offsets, value)

    def valid(self) -> Tensor:
        """Return bool [B, T], True where `pad` holds a token."""
        lengths = self.lengths
        width = int(lengths.max()) if len(self) else 0
        return torch.arange(width)[None, :] < lengths[:, None]

    def to(self: R, device: torch.device | str) -> R:
        """Columns on `device`; offsets stay on the CPU."""
        moved: dict[str, Any] = {name: column.to(device) for name, column in self.columns().items()}
        return replace(self, **moved)


def pad_flat(flat: Tensor, offsets: Tensor, value: float = 0.0) -> Tensor:
    """Return [N, ...] with offsets -> right-padded [B, T, ...]; differentiable."""
    lengths = offsets.diff()
    width = int(lengths.max()) if len(lengths) else 0
    mask = (torch.arange(width)[None, :] < lengths[:, None]).to(flat.device)
    padded = flat.new_full((len(lengths), width, *flat.shape[1:]), value)
    return padded.masked_scatter(mask.reshape(*mask.shape, *[1] * (flat.dim() - 1)).expand_as(padded), flat)


def unpad(padded: Tensor, offsets: Tensor) -> Tensor:
    """Inverse of `pad_flat`: [B, T, ...] -> [N, ...]."""
    lengths = offsets.diff()
    mask = (torch.arange(padded.shape[1])[None, :] < lengths[:, None]).to(padded.device)
    return padded[mask]
