"""What the options of every backend have in common."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """Options of one backend."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same rows together."""
        return 1
