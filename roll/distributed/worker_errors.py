"""What goes wrong with a worker. Each error names the role, the rank and the call."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace

TAIL_LINES = 40


class WorkerError(RuntimeError):
    """A remote call didn't give a result."""

    def __init__(self, message: str, *, role: str, rank: int, call: str) -> None:
        super().__init__(message)
        self.role, self.rank, self.call = role, rank, call


class WorkerTimeout(WorkerError):
    """A call took longer than its time limit; the worker may still be running it."""

    def __init__(
        self, *, role: str, rank: int, call: str, seconds: float, doing: str = "", node: str = "", lost: str = ""
    ) -> None:
        """Say what is wrong with its machine (`lost`), if anything is; `node` names one that isn't the controller's."""
        where = f" on {node}" if node else ""
        message = f"{role} rank {rank}{where} didn't finish {call!r} within {seconds:g} s. "
        slow = "If it is only slow, raise rpc_timeout (or the limit that this call was given)"
        message += f"{lost}." if lost else f"{slow}; otherwise the worker hangs."
        super().__init__(message + _indented("It was doing", doing), role=role, rank=rank, call=call)
        self.seconds = seconds
        self.doing = doing  # stacks of the worker's threads, where they could be had


class WorkerDied(WorkerError):
    """The worker's process is gone."""

    def __init__(
        self, *, role: str, rank: int, node: str, pid: int, call: str, reason: str = "", stderr_tail: str = ""
    ) -> None:
        where = f"process {pid} on node {node}" if pid else f"no process yet, node {node or 'unknown'}"
        message = f"{role} rank {rank} died during {call!r} ({where})."
        message += _indented("Reason", reason) + _indented("End of its output", stderr_tail)
        super().__init__(message, role=role, rank=rank, call=call)
        self.node, self.pid, self.stderr_tail = node, pid, stderr_tail


class WorkerFailed(WorkerError):
    """The worker's code raised; the worker itself lives on."""

    def __init__(self, failure: Failure, *, role: str, rank: int, call: str, show: bool = True) -> None:
        message = f"{role} rank {rank} failed in {call!r}: {failure.type_name}: {failure.text}"
        message += _indented("Traceback of the worker", failure.traceback) if show else ""
        super().__init__(message, role=role, rank=rank, call=call)
        self.failure, self.type_name, self.remote_traceback = failure, failure.type_name, failure.traceback

    def waiting_for(self, ranks: Sequence[int], lost: str = "") -> WorkerFailed:
        """Return the same error, which says what ranks hadn't answered when this one's patience ended, and what is
        wrong with the machine of one of them."""
        late = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        text = f"{self.failure.text} (it waited for {late} of {self.role}, still in the call; rpc_timeout bounds it)"
        text += f". {lost}" if lost else ""
        return replace(self.failure, text=text).error(self.role, self.rank, self.call)


class WorkerRefused(WorkerFailed, ValueError):
    """The worker's code raised `ValueError`: something the user gave is wrong, so it stays a `ValueError` here."""


@dataclass(frozen=True)
class Failure:
    """An exception on its way from the worker to the controller, as text: no type has to survive pickling."""

    type_name: str
    text: str
    traceback: str
    user_error: bool

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return what there is to say about an exception."""
        text = "".join(traceback.format_exception(error))
        return cls(type(error).__name__, str(error), text, isinstance(error, ValueError))

    def error(self, role: str, rank: int, call: str, *, show: bool = True) -> WorkerFailed:
        """Return the exception to raise in the controller; `show` puts the worker's traceback into its message."""
        kind = WorkerRefused if self.user_error else WorkerFailed
        return kind(self, role=role, rank=rank, call=call, show=show)


def _indented(title: str, text: str) -> str:
    if not text.strip():
        return ""
    lines = text.strip().splitlines()[-TAIL_LINES:]
    return f"\n{title}:\n" + "\n".join("  " + line for line in lines)
