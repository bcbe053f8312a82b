"""The interface of a tracker: a place where metrics go.

Order that keeps "each step exactly once" true across a kill: log a step first, then save its checkpoint.
A run resumed from the checkpoint of step k opens its trackers with `resume_step=k`; steps after it are about to run
again. Files of this machine discard what they hold of them. Services that take nothing back (wandb, mlflow, trackio)
keep the first record of a step, and the second one isn't written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar


class TrackingError(RuntimeError):
    """A tracker could not write; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A response worth showing to people."""

    domain: str
    prompt: str
    response: str
    reward: float


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a tracker writes, and what it already holds there."""

    folder: Path
    resume_step: int | None
    """Last step whose record stays; None for a run that starts from nothing."""
    run_name: str = ""
    """What the run is called (`exp_name`)."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The run's configuration, without secrets."""

    def __post_init__(self) -> None:
        if self.resume_step is not None and self.resume_step < 0:
            raise ValueError(f"resume_step must be a finished step (>= 0) or None, got {self.resume_step}")


class Tracker(ABC):
    """One place where metrics go. Built as `cls(destination, **options)`, options being keyword-only."""

    essential: ClassVar[bool] = False
    """Whether its failure ends the run. Others are left out from then on."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step's metrics. Called once a step, with rising steps; on return they outlive a kill."""

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Show some responses of a step. Default: this tracker has no place for text."""

    @abstractmethod
    def finish(self, summary: Mapping[str, float]) -> None:
        """Close; `summary` holds the final numbers, and is empty after a failure. Called once."""
