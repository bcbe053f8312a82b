"""What simulated engines are made of: how fast they are, and how long responses are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

from roll.strategies.base import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """How fast one engine is. The defaults resemble a 7B model on one current accelerator."""

    max_running_requests: int = 128  # Requests in one decode step; the others wait
    step_seconds: float = 0.012  # A decode step with hardly anything in it: reading the weights
    step_seconds_per_request: float = 0.0001  # What each running request adds to a step
    prefill_tokens_per_second: float = 20_000.0

    def __post_init__(self) -> None:
        if self.max_running_requests < 1:
            raise ValueError(f"max_running_requests must be >= 1, got {self.max_running_requests}")
        if self.step_seconds <= 0 or self.step_seconds_per_request < 0 or self.prefill_tokens_per_second <= 0:
            raise ValueError(f"an engine's times must be positive, got {self}")

    def steps_per_second(self, running: int) -> float:
        """Return tokens per second of each of `running` requests."""
        return 1.0 / (self.step_seconds + self.step_seconds_per_request * running)

    @property
    def peak_tokens_per_second(self) -> float:
        """Return that of a full engine."""
        return self.max_running_requests * self.steps_per_second(self.max_running_requests)


Lengths = Callable[[Request], int]
"""Response tokens that a request would have without a limit; a function of the request alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LognormalLengths:
    """Half of the responses are shorter than `median`; `sigma` is the spread (0: all equal; 1: a long tail)."""

    median: float
    sigma: float

    def __call__(self, request: Request) -> int:
        """Return the same length for the same request, whoever runs it."""
        return max(1, round(self.median * math.exp(self.sigma * _NORMAL.inv_cdf(_uniform(request)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoLengths:
    """No response is shorter than `shortest`; the tail falls off with power `alpha` (mean finite above 1)."""

    shortest: float
    alpha: float

    def __call__(self, request: Request) -> int:
        """Return the same length for the same request, whoever runs it."""
        return max(1, round(min(1e9, self.shortest * _uniform(request) ** (-1.0 / self.alpha))))


_NORMAL = NormalDist()


def _uniform(request: Request) -> float:
    """Return a number in (0, 1): a request's seed is a hash already, so its upper bits serve as a draw."""
    return ((request.seed >> 75 & (1 << 53) - 1) + 0.5) / (1 << 53)


@dataclass
class EngineUse:
    """What one engine did, or all together."""

    busy_request_seconds: float = 0.0  # Running requests, summed over time
    tokens: int = 0  # Given out in completions
    thrown_away: int = 0  # Sampled, but lost: to a death, or to `partial_rollout: restart`
    prefill_tokens: int = 0
    cached_tokens: int = 0  # Prompt tokens that needn't be read
    most_running: int = 0
    most_submitted: int = 0  # Most requests at once that were running or waiting inside the engine

    def add(self, other: EngineUse) -> None:
        """Add another engine's sums, and keep the larger of what is `most`."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.most_running = max(self.most_running, other.most_running)
        self.most_submitted = max(self.most_submitted, other.most_submitted)

    def since(self, earlier: EngineUse) -> EngineUse:
        """Return what came after an `earlier` look; `most` are over the whole time."""
        return replace(self, **{name: getattr(self, name) - getattr(earlier, name) for name in _SUMS})


_SUMS = ("busy_request_seconds", "tokens", "thrown_away", "prefill_tokens", "cached_tokens")
