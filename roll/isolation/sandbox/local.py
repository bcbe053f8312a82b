"""A sandbox on this machine: some warm parents, each with at most one program at a time."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence

from roll.isolation.sandbox import confine, usage
from roll.isolation.sandbox.base import Limits, Outcome, Program, Sandbox, SandboxError, SandboxUnavailable
from roll.isolation.sandbox.local_program import LocalProgram
from roll.isolation.sandbox.mechanisms import MECHANISMS
from roll.isolation.sandbox.parent_process import WarmParent
from roll.isolation.sandbox.readable import interpreter

_MAX_PARENTS = 16
_PREFIX = "roll-sandbox-"
_YOUNG_S = 300.0


class LocalSandbox(Sandbox):
    """Contains programs with one of `MECHANISMS`."""

    def __init__(
        self, name: str, *, import_paths: Sequence[str] = (), preload: Sequence[str] = (), parallel: int | None = None
    ) -> None:
        """Start nothing yet. `parallel` programs run at once (None: twice the processors); others wait their turn."""
        self.name = name
        self._import_paths, self._preload = tuple(import_paths), tuple(preload)
        self._interpreter = interpreter(import_paths)
        self.skipped = self._interpreter.skipped
        """Paths that were asked for and that this user can't read: programs can't either."""
        self._turns = threading.BoundedSemaphore(parallel or min(_MAX_PARENTS, 2 * (os.cpu_count() or 1)))
        self._lock = threading.Lock()
        self._idle: list[WarmParent] = []
        self.folder = ""
        """Everything of its programs is in here; empty before the first one."""
        self._numbers = itertools.count()
        self._closed = False
        # Namespaces alone let a program write beside its own folder, where the next one would find it.
        self._leaves_traces = name == "bwrap" and confine.landlock_abi() == 0
        self._owner = os.getpid()
        self._all: set[WarmParent] = set()
        self._finalizer = weakref.finalize(self, _close_all, self._all, self._owner)

    def run(self, program: Program, limits: Limits) -> Outcome:
        with self.start(program, limits, interactive=False) as running:
            running.close_input()
            return running.wait()

    def start(self, program: Program, limits: Limits, *, interactive: bool = True) -> LocalProgram:
        self._turns.acquire()
        parent = None
        try:
            parent = self._take(limits.processes)
            return LocalProgram(
                parent, program, limits, interactive=interactive, contained=self.name, done=self._give_back
            )
        except BaseException as error:
            if parent is None:
                self._turns.release()
            elif not parent.done:
                self._give_back(parent)
            if isinstance(error, SandboxUnavailable):  # it worked when it was opened
                raise SandboxError(f"{self.name}: {error}") from error
            raise

    def extended(self, import_paths: Sequence[str], preload: Sequence[str] = ()) -> LocalSandbox:
        paths = (*self._import_paths, *import_paths)
        return LocalSandbox(self.name, import_paths=paths, preload=(*self._preload, *preload))

    def pids(self) -> list[int]:
        """Return the warm parents, as this process sees them."""
        with self._lock:
            return sorted(parent.pid for parent in self._all)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._idle.clear()
        self._finalizer()
        if self.folder and os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                usage.remove_tree(self.folder)

    def _take(self, processes: int) -> WarmParent:
        with self._lock:
            if self._closed or os.getpid() != self._owner:
                raise SandboxError(f"{self.name}: this sandbox was closed, or belongs to another process")
            for parent in self._idle:
                if parent.processes == processes:
                    self._idle.remove(parent)
                    parent.done = False
                    return parent
            spare = self._idle.pop(0) if len(self._idle) >= _MAX_PARENTS else None
            if not self.folder:
                _remove_empty_folders()
                self.folder = tempfile.mkdtemp(prefix=_PREFIX)
            folder = os.path.join(os.path.realpath(self.folder), str(next(self._numbers)))
        if spare is not None:
            self._drop(spare)
        parent = WarmParent(
            MECHANISMS[self.name],
            folder,
            self._interpreter,
            confined=self.name != "unconfined",
            processes=processes,
            preload=self._preload,
        )
        with self._lock:
            self._all.add(parent)
        return parent

    def _give_back(self, parent: WarmParent) -> None:
        parent.done = True
        with self._lock:
            keep = parent.usable and not self._closed and not parent.worn_out() and not self._leaves_traces
            if keep:
                self._idle.append(parent)
        if not keep:
            self._drop(parent)
        self._turns.release()

    def _drop(self, parent: WarmParent) -> None:
        parent.close()
        with self._lock:
            self._all.discard(parent)


def _remove_empty_folders() -> None:
    """Remove what processes that were killed left: their warm parents empty the folders, but can't remove them."""
    for folder in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), f"{_PREFIX}*")):
        with contextlib.suppress(OSError):
            if time.time() - os.stat(folder).st_mtime < _YOUNG_S:
                continue  # another process may be about to fill it
            for name in os.listdir(folder):
                os.rmdir(os.path.join(folder, name))
            os.rmdir(folder)


def _close_all(parents: set[WarmParent], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child's copy
    folders = {os.path.dirname(parent.folder) for parent in parents}
    while parents:
        parents.pop().close()
    for folder in folders:
        with contextlib.suppress(OSError):
            os.rmdir(folder)
