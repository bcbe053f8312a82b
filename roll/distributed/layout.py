"""Where one rank stands among the ranks of its role."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Which data shard a rank works on, and whether its result is the one to keep."""

    dp_rank: int = 0
    dp_size: int = 1
    collects: bool = True
    """One rank per data-parallel rank returns results; its tensor- and pipeline-parallel peers don't."""
