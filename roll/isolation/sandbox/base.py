"""What a sandbox takes and returns.

A program is Python source with its input and files. It runs in a private, empty folder, without network, without the
caller's environment, and under `Limits`; everything it started is dead when `run` returns. What it printed, and how it
ended, is all that comes back: nothing that it prints is trusted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from typing import Self

Ending = Literal["exited", "timeout", "memory", "output", "processes", "killed"]
"""`exited`: by itself, see `exit_code`. `timeout`: CPU or wall time. `memory`, `output`, `processes`: over that limit
and killed for it. `killed`: by a signal for another reason."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one program may use."""

    wall_s: float = 8.0
    """Seconds on the clock."""
    cpu_s: float = 4.0
    """Seconds of processor time, of all its processes together."""
    memory_mb: int = 512
    """MiB of memory."""
    processes: int = 16
    """Processes and threads at once."""
    open_files: int = 64
    """Descriptors per process."""
    file_mb: int = 16
    """MiB of a file that it writes."""
    output_bytes: int = 65_536
    """Bytes kept of its standard output, and of its errors."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Python source to run, with what it may read."""

    source: str
    """Run as `__main__`."""
    stdin: bytes = b""
    """Its standard input."""
    arguments: tuple[str, ...] = ()
    """`sys.argv[1:]`."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files in its folder before it starts, by relative path."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a program ended."""

    ending: Ending
    exit_code: int | None
    """None where it was killed."""
    stdout: bytes
    stderr: bytes
    seconds: float
    """Wall time."""
    note: str = ""
    """For people: the limit that was reached, or the signal."""


class SandboxError(RuntimeError):
    """The sandbox itself failed: says nothing about the program."""


class SandboxUnavailable(ValueError):
    """No mechanism works here that would contain a program; the message says what was tried and what to do."""


class Running(ABC):
    """A program that is alive, which the caller talks to over its standard input and output.

    One thread at a time. End it with `wait` or `kill`, or use it in a `with` block, which kills it.
    """

    @abstractmethod
    def write(self, data: bytes, timeout_s: float | None = None) -> bool:
        """Write to its input; return False if it ended or didn't read all of it in time (None: its wall time)."""

    @abstractmethod
    def close_input(self) -> None:
        """Let it read the end of its input."""

    @abstractmethod
    def read_line(self, timeout_s: float | None = None) -> bytes | None:
        """Return the next line that it printed, with its newline; None if none came in time, or it ended.

        A line is never longer than `Limits.output_bytes`; nor is all that it may print in its life.
        """

    @abstractmethod
    def wait(self) -> Outcome:
        """Wait for its end, for its wall time at most; `stdout` is what `read_line` hasn't returned.

        Raises:
            SandboxError: the sandbox failed.
        """

    @abstractmethod
    def kill(self) -> None:
        """End it with all that it started. Harmless when repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Sandbox(ABC):
    """Runs programs. Thread-safe; close it, or use it in a `with` block."""

    name: str
    """`sandlock`, `bwrap`, `unconfined`, or the address of a remote one."""

    @abstractmethod
    def start(self, program: Program, limits: Limits) -> Running:
        """Start a program to talk to; `program.stdin` is what it reads first. `limits.wall_s` counts from here.

        Raises:
            SandboxError: it couldn't be started, or this sandbox can't do that (a remote one).
        """

    @abstractmethod
    def extended(self, import_paths: Sequence[str], preload: Sequence[str] = ()) -> Sandbox:
        """Return a sandbox of the same kind whose programs may also import from folders, e.g. site-packages.

        `preload` names modules that the warm parent imports once, so that no program pays for that. Close it too.

        Raises:
            SandboxError: this sandbox can't do that (a remote one).
        """

    @abstractmethod
    def run(self, program: Program, limits: Limits) -> Outcome:
        """Run one program to its end.

        Raises:
            SandboxError: it couldn't be run; the caller may try again.
        """

    @abstractmethod
    def close(self) -> None:
        """End what the sandbox keeps running. Harmless when repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
