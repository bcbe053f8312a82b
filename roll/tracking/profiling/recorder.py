"""What one rank keeps of the calls to it in a step: spans always, operators and memory where the plan says so."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.tracking.profiling.profile_plan import CallContext, RankPlan
from roll.tracking.spans import Span, SpanLog, Value, call_of

if TYPE_CHECKING:
    from roll.tracking.profiling.operators import OperatorTrace

PROFILER = "torch.profiler"
"""Name of the spans in which a rank starts the profiler, or takes over what it has recorded."""
_MAX_ALLOCATIONS = 200_000
_SWITCHES = threading.Lock()
_users: dict[str, int] = {"memory": 0, "nsight": 0}
"""Ranks of this process that have switched on what a process has once: inline roles share it."""


def trace_name(step: int, track: str) -> str:
    """Return the name of the file with a rank's operators, or the controller's phases."""
    return f"step-{step:06d}.{track}.json.gz"


@dataclass(frozen=True, slots=True)
class RankRecord:
    """A rank's part of a step."""

    track: str
    host: str
    pid: int
    spans: list[Span]
    dropped_spans: int = 0
    operators: dict[str, Any] = field(default_factory=dict)
    """Totals by operator, and the name of the trace; empty: none was written."""
    files: tuple[str, ...] = ()


class CallRecorder:
    """Watches the calls of one rank; made at the first one that is to be recorded."""

    def __init__(self, role: str, rank: int) -> None:
        self._track = f"{role}-{rank}"
        self._whose: dict[str, Value] = {"role": role, "rank": rank}
        self._log = SpanLog(self._track)
        self._lock = threading.Lock()
        self._plan: RankPlan | None = None
        self._operators: OperatorTrace | None = None
        self._taken = -1  # The last step whose record was taken

    def call(self, name: str, run: Callable[[], Any], context: CallContext) -> Any:
        """Return what `run` returns, and record it."""
        if context.plan is None:
            with call_of(self._log, name, context.caller, **self._whose):
                return run()
        operators = self._operators_of(context.plan)
        with contextlib.ExitStack() as stack:
            profiler = None
            if operators is not None:
                with call_of(self._log, PROFILER, context.caller, **self._whose):
                    profiler = operators.start()
                if profiler is not None:
                    stack.callback(self._finish, operators, profiler, context)
            if context.plan.nsight:
                import torch

                stack.enter_context(torch.cuda.nvtx.range(f"{self._track}.{name}"))
            called = stack.enter_context(call_of(self._log, name, context.caller, **self._whose))
            called.attributes["rss_before_mib"] = _resident_mib()
            try:
                return run()
            finally:
                called.attributes["rss_after_mib"] = _resident_mib()

    def _finish(self, operators: OperatorTrace, profiler: Any, context: CallContext) -> None:
        """Record the time the profiler itself takes, beside the call and not in it."""
        with call_of(self._log, PROFILER, context.caller, **self._whose):
            operators.finish(profiler)

    def _operators_of(self, plan: RankPlan) -> OperatorTrace | None:
        with self._lock:
            if plan.step <= self._taken:
                return None  # an engine's call that was sent before the step ended
            if self._plan is None:
                self._begin(plan)
            return self._operators

    def _begin(self, plan: RankPlan) -> None:
        self._plan = plan
        if plan.torch:
            from roll.tracking.profiling.operators import OperatorTrace

            self._operators = OperatorTrace(plan, self._track)
        if plan.memory and _is_first("memory"):
            import torch

            torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS)
        if plan.nsight and _is_first("nsight"):
            import torch

            torch.cuda.profiler.start()

    def take(self, start_ns: int) -> RankRecord:
        """Return what was recorded since the last call; files are written now. `start_ns`: when the step began."""
        with self._lock:
            plan, self._plan = self._plan, None
            operators, self._operators = self._operators, None
            self._taken = plan.step if plan is not None else self._taken
        spans, dropped = self._log.take()
        files, totals = [], {}
        if plan is not None:
            folder = Path(plan.folder)
            if operators is not None:
                totals = operators.write(folder / trace_name(plan.step, self._track), start_ns)
                files.append(totals["file"])
            files += self._end(plan, folder)
        return RankRecord(self._track, socket.gethostname(), os.getpid(), spans, dropped, totals, tuple(files))

    def _end(self, plan: RankPlan, folder: Path) -> list[str]:
        if not (plan.memory or plan.nsight):
            return []
        import torch

        if plan.nsight and _is_last("nsight"):
            torch.cuda.profiler.stop()
        if not plan.memory:
            return []
        folder.mkdir(parents=True, exist_ok=True)
        snapshot = folder / f"step-{plan.step:06d}.{self._track}.memory.pickle"
        torch.cuda.memory._dump_snapshot(str(snapshot))
        if _is_last("memory"):
            torch.cuda.memory._record_memory_history(enabled=None)
        return [snapshot.name]


def _is_first(tool: str) -> bool:
    with _SWITCHES:
        _users[tool] += 1
        return _users[tool] == 1


def _is_last(tool: str) -> bool:
    with _SWITCHES:
        _users[tool] -= 1
        return _users[tool] == 0


def _resident_mib() -> float:
    import psutil

    return round(psutil.Process().memory_info().rss / 2**20, 1)
