"""What the options of every backend have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """Options of one backend."""

    @property
    def parallel_sizes(self) -> Mapping[str, int]:
        """Ways in which ranks share one copy of the model or a sequence, each with its number of ranks."""
        return {}

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same rows together."""
        return math.prod(self.parallel_sizes.values())
