"""How a call on a cluster becomes calls on its ranks: `@dispatch(Dispatch.<mode>)` on the worker's method declares it.

| mode | arguments | result |
|---|---|---|
| `ONE_TO_ALL` | the same for every rank | list, in rank order |
| `RANK_ZERO` | for rank 0 alone | its result |
| `SPLIT_BY_DP` | the first is a `Ragged`, whose units are dealt out; the rest is the same for all | merged |
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from roll.distributed.layout import RankLayout
from roll.utils.partition import partition_balanced

if TYPE_CHECKING:
    from roll.types.batch import TokenBatch
    from roll.types.ragged import Ragged

F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "__roll_dispatch__"


class Dispatch(Enum):
    """See the table above."""

    ONE_TO_ALL = "one_to_all"
    RANK_ZERO = "rank_zero"
    SPLIT_BY_DP = "split_by_dp"


def dispatch(mode: Dispatch) -> Callable[[F], F]:
    """Declare how calls of this worker method spread over the ranks."""

    def mark(method: F) -> F:
        setattr(method, _ATTRIBUTE, mode)
        return method

    return mark


def mode_of(method: Callable[..., Any]) -> Dispatch:
    """Return the declared mode; a method without one is no remote method."""
    mode = getattr(method, _ATTRIBUTE, None)
    if mode is None:
        name = getattr(method, "__qualname__", repr(method))
        raise ValueError(f"{name} can't be called on a cluster: declare it with @dispatch(Dispatch.<mode>)")
    return mode


def split_units(
    lengths: Sequence[int], units: Sequence[Sequence[int]], dp_size: int, *, balance: bool, attention_share: float = 0.0
) -> list[list[int]]:
    """Return row positions for each data-parallel rank, ascending; the rows of a unit are on one rank.

    With `balance` costs are evened out, l + `attention_share` l^2 of a row of l tokens, by default token counts. Unit
    counts stay equal where they can, because ranks that count micro-batches in rows must make the same number of them.
    Without it, units are cut in order. The last ranks get nothing where there are fewer units than ranks.
    """
    count = len(units)
    if balance or count < dp_size:
        costs = [sum(lengths[row] + attention_share * lengths[row] ** 2 for row in unit) for unit in units]
        parts = partition_balanced(costs, dp_size, equal_size=count % dp_size == 0)
    else:
        bounds = [rank * count // dp_size for rank in range(dp_size + 1)]
        parts = [list(range(start, end)) for start, end in itertools.pairwise(bounds)]
    return [sorted(row for unit in part for row in units[unit]) for part in parts]


def split_batch(
    batch: Ragged,
    layouts: Sequence[RankLayout],
    *,
    balance: bool,
    attention_share: float = 0.0,
    keep_groups: bool = False,
) -> list[Ragged]:
    """Return one piece per rank; ranks of the same data-parallel rank get the same object.

    With `keep_groups` and `balance` the rows of a group are on one rank where that leaves the busiest one less to
    compute, because ranks compute beginnings that rows share once, but for rows with pictures.
    """
    dp_size = layouts[0].dp_size
    if dp_size == 1:
        return [batch] * len(layouts)
    lengths, units = batch.lengths.tolist(), batch.units()
    parts = split_units(lengths, units, dp_size, balance=balance, attention_share=attention_share)
    if keep_groups and balance:
        from roll.types.batch import TokenBatch

        if isinstance(batch, TokenBatch) and not batch.has_pictures:
            parts = deal_groups(batch, parts, attention_share=attention_share) or parts
    pieces = [batch.select(rows) for rows in parts]
    return [pieces[layout.dp_rank] for layout in layouts]


def check_layouts(role: str, layouts: Sequence[RankLayout]) -> None:
    """Raise `ValueError` unless every data-parallel rank has exactly one rank that collects."""
    collecting = sorted(layout.dp_rank for layout in layouts if layout.collects)
    sizes = {layout.dp_size for layout in layouts}
    if len(sizes) != 1 or collecting != list(range(layouts[0].dp_size)):
        raise ValueError(f"{role}: each data-parallel rank needs one rank that collects, got {list(layouts)}")


def merge_results(results: Sequence[Any], layouts: Sequence[RankLayout], batch: Ragged) -> Any:
    """Return results of a split call as one: rows in the order of `batch`, metrics merged in rank order, or None."""
    from roll.types.metrics import Metrics
    from roll.types.ragged import Ragged

    collecting = sorted((layout.dp_rank, i) for i, layout in enumerate(layouts) if layout.collects)
    parts = [results[i] for _, i in collecting]
    if all(part is None for part in parts):
        return None
    if all(isinstance(part, Metrics) for part in parts):
        return Metrics.merged(parts)
    if all(isinstance(part, Ragged) for part in parts):
        joined = type(parts[0]).concat(parts)
        return joined if joined.row_ids == batch.row_ids else joined.reorder(batch.row_ids)
    kinds = sorted({type(part).__name__ for part in parts})
    raise TypeError(f"a SPLIT_BY_DP method returns a Ragged, Metrics or None on every rank, got {kinds}")


_MORE_TOKENS = 1.1
"""Tokens that the fullest rank may have, of what it has where rows are dealt out one by one."""


def deal_groups(batch: TokenBatch, parts: Sequence[Sequence[int]], *, attention_share: float) -> list[list[int]] | None:
    """Return row positions for each rank in which the rows of a group are together, or None.

    None: `parts`, the rows of each rank dealt out unit by unit, leaves the busiest rank no more to compute, or far
    fewer tokens. What rows share is counted within a group, from the beginning.
    """
    groups: dict[str, list[int]] = {}
    for row, group in enumerate(batch.group_ids):
        groups.setdefault(group, []).append(row)
    group_of_unit = dict(zip(batch.unit_ids, batch.group_ids, strict=True))
    if any(group_of_unit[unit] != group for unit, group in zip(batch.unit_ids, batch.group_ids, strict=True)):
        return None  # units of several groups stay together before all else
    lengths = batch.lengths.tolist()
    common = {group: _common(batch, rows) if len(rows) > 1 else 0 for group, rows in groups.items()}

    def cost(rows: Sequence[int]) -> float:
        """Tokens, and what attention costs, of rows on one rank."""
        own = sum(lengths[row] - common[batch.group_ids[row]] for row in rows)
        own += sum(common[group] for group in {batch.group_ids[row] for row in rows})
        return own + attention_share * sum(lengths[row] ** 2 for row in rows)

    each = list(groups.values())
    dealt = partition_balanced([cost(rows) for rows in each], len(parts), equal_size=len(each) % len(parts) == 0)
    together = [sorted(row for group in part for row in each[group]) for part in dealt]
    fullest, before = (max(sum(lengths[row] for row in part) for part in parts_of) for parts_of in (together, parts))
    if fullest > _MORE_TOKENS * before or max(map(cost, together)) >= max(map(cost, parts)):
        return None
    return together


def _common(batch: TokenBatch, rows: Sequence[int]) -> int:
    """Return the number of tokens at the beginning that all these rows share."""
    first = batch.row("token_ids", rows[0])
    length = len(first)
    for row in rows[1:]:
        other = batch.row("token_ids", row)
        length = min(length, len(other))
        different = (first[:length] != other[:length]).nonzero()
        length = int(different[0]) if len(different) else length
    return length
