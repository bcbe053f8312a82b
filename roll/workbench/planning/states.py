"""What a rank holds between steps and while it trains: weights, gradients, optimizer states, buffers for sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes of one rank, on its device, and on the host where they are offloaded."""

    weights: int = 0
    """What computes: of its own kind of float where the optimizer has float32 weights of its own."""
    gradients: int = 0
    """Between the last backward pass and the optimizer step."""
    retained_gradients: int = 0
    """Of these, what stays allocated after the step."""
    optimizer: int = 0
    """Float32 weights beside those that compute, moments, counters of steps."""
    buffers: int = 0
    """Buckets for sums over ranks, as long as the role is awake."""
    passing: int = 0
    """Buckets for sums that are there during the backward pass only."""
    gathered: int = 0
    """Weights of other ranks that are there during a pass, in the worst moment."""
    host_weights: int = 0
    host_gradients: int = 0
    host_optimizer: int = 0

    @property
    def device(self) -> int:
        """Return bytes on the device between steps."""
        return self.weights + self.retained_gradients + self.optimizer + self.buffers

    @property
    def host(self) -> int:
        """Return bytes on the host, always."""
        return self.host_weights + self.host_gradients + self.host_optimizer

    @property
    def total(self) -> int:
        """Return the size by which ranks are compared."""
        return self.weights + self.gradients + self.optimizer + self.buffers + self.passing + self.gathered


def largest(of_rank: Callable[[int], States], ranks: range | list[int]) -> States:
    """Return the states of the rank that holds most."""
    return max((of_rank(rank) for rank in ranks), key=lambda states: (states.total, states.host))


def offloaded(states: States, *, weights: bool = False) -> States:
    """Return the same states with gradients and optimizer, and perhaps weights, on the host."""
    moved = replace(
        states,
        optimizer=0,
        gradients=0,
        retained_gradients=0,
        host_optimizer=states.optimizer,
        host_gradients=states.gradients,
    )
    return replace(moved, weights=0, host_weights=states.weights) if weights else moved
