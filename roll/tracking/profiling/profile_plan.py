"""What is recorded in the step under way, and what a call tells the worker about it.

The controller sets the plan of a step; clusters ask `outgoing` with every call. Between such steps that is one look at
two variables, and neither torch nor a profiler is loaded.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from roll.tracking.spans import SpanContext, current_context, is_recording


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank records in one step."""

    step: int
    folder: str
    """Absolute, on the machine of the rank."""
    torch: bool = False
    """Operators, by torch.profiler."""
    memory: bool = False
    """Allocations of the accelerator."""
    nsight: bool = False
    """Tell Nsight Systems, under which the process was started, when to record."""
    activities: tuple[str, ...] = ()
    """`cpu`, `cuda`; empty: what there is."""
    record_shapes: bool = False
    with_stack: bool = False
    max_events: int = 500_000


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What all ranks record in one step. Empty `roles` or `ranks`: every one."""

    rank: RankPlan
    roles: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    def of(self, role: str, rank: int) -> RankPlan | None:
        """Return what this rank records; None: its calls alone, as spans."""
        chosen = (not self.roles or role in self.roles) and (not self.ranks or rank in self.ranks)
        return self.rank if chosen else None


@dataclass(frozen=True, slots=True)
class CallContext:
    """What goes along with a call to a worker."""

    caller: SpanContext | None
    plan: RankPlan | None


_plan: StepPlan | None = None


@contextlib.contextmanager
def profiling_step(plan: StepPlan) -> Iterator[None]:
    """Have ranks record by this plan what they are called for in the body."""
    global _plan
    _plan = plan
    try:
        yield
    finally:
        _plan = None


def outgoing(role: str, rank: int) -> CallContext | None:
    """Return what goes along with a call to this rank; None while nothing is recorded."""
    if _plan is None and not is_recording():
        return None
    return CallContext(current_context(), _plan.of(role, rank) if _plan is not None else None)


OPTIONS = {
    "trace": "cuda,nvtx,osrt,cudnn,cublas",
    "capture-range": "cudaProfilerApi",
    "capture-range-end": "repeat",
    "cuda-graph-trace": "node",
    "force-overwrite": "true",
}


def ray_options(folder: Path, track: str) -> dict[str, str]:
    """Return what Ray's runtime environment is told (`_nsight`), for a report of this rank in the folder."""
    return {**OPTIONS, "o": str(folder.absolute() / f"nsight.{track}.%p")}


def command(folder: Path, arguments: Sequence[str]) -> str:
    """Return the shell command that starts a run in one process under `nsys`."""
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    return shlex.join(["nsys", "profile", *options, "-o", str(folder / "nsight.%p"), *arguments])
