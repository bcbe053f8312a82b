"""The interface of a tracker: a place where metrics go.

Order that keeps "each step exactly once" true across a kill: log a step first, then save its checkpoint.
A run resumed from the checkpoint of step k opens its trackers with `resume_step=k`; steps after it are about to run
again. Files of this machine discard what they hold of them. Services that take nothing back (wandb, mlflow, trackio)
keep the first record of a step, and the second one isn't written.
"""

from __future__ import annotations

import secrets
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


def persistent_run_id(destination: Destination, service: str) -> str:
    """Return the id of the run that is resumed, or a new one."""
    file = destination.folder / f"{service}_run_id"
    if destination.resume_step is None or not file.is_file():
        file.write_text(secrets.token_hex(8) + "\n")
    return file.read_text().strip()


def keep_run_id(destination: Destination, service: str, run_id: str) -> None:
    """Keep the id that the service has given."""
    (destination.folder / f"{service}_run_id").write_text(run_id + "\n")


def earlier_run_id(destination: Destination, service: str) -> str | None:
    """Return the id that the run had before it was resumed."""
    file = destination.folder / f"{service}_run_id"
    return file.read_text().strip() if destination.resume_step is not None and file.is_file() else None
