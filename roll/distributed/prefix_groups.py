"""Deal the rows of a prompt to one rank, where beginnings that rows share are computed once per rank."""

from __future__ import annotations

from collections.abc import Sequence

from roll.types.batch import TokenBatch
from roll.utils.partition import partition_balanced

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
    fullest, before = (max(sum(lengths[row] for row in part) for part in found) for found in (together, parts))
    if fullest > _MORE_TOKENS * before or max(map(cost, together)) >= max(map(cost, parts)):
        return None
    return together


def _common(batch: TokenBatch, rows: Sequence[int]) -> int:
    """Tokens at the beginning that all these rows have."""
    first = batch.row("token_ids", rows[0])
    found = len(first)
    for row in rows[1:]:
        other = batch.row("token_ids", row)
        found = min(found, len(other))
        different = (first[:found] != other[:found]).nonzero()
        found = int(different[0]) if len(different) else found
    return found
