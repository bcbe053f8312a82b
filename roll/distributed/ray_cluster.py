"""Calls on the processes of one role, and what their silence or death means."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.distributed.cluster import Cluster
from roll.distributed.placement import RolePlacement
from roll.distributed.ray_auth import explain_cancelled
from roll.distributed.ray_nodes import lost, name_of
from roll.distributed.worker import Worker, machine_id
from roll.distributed.worker_errors import TAIL_LINES, Failure, WorkerDied, WorkerError, WorkerFailed, WorkerTimeout
from roll.tracking.profiling.profile_plan import outgoing

if TYPE_CHECKING:
    from roll.distributed.ray_worker import Home

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TIMED_OUT = re.compile(r"timed out|time-?out|did not finish|within \d+ ?ms", re.IGNORECASE)
_TAIL_BYTES = 16384
_logger = logging.getLogger(__name__)
_GRACE = 1.0
"""Seconds to look for a death behind an exception: a peer's broken connection is reported before the death itself."""
_CLOSE_SECONDS = 5.0
_STACKS_SECONDS = 0.5


@dataclass
class Peer:
    """One rank as the controller knows it."""

    shell: Any
    """Ray's actor handle of a `WorkerShell`."""
    log_file: Path
    home: Home | None = None


class RayCluster(Cluster):
    """Ranks as Ray actors; they end with the controller, however it ends."""

    def __init__(self, placement: RolePlacement, worker_cls: type[Worker], peers: Sequence[Peer], **calls: Any) -> None:
        super().__init__(placement, worker_cls, **calls)
        self._peers = list(peers)
        self._order = threading.Lock()
        self._healthy = True
        self._running = True
        self._answered = dict.fromkeys(range(len(self._peers)), time.monotonic())

    @property
    def processes(self) -> list[tuple[str, int]]:
        return [(peer.home.host, peer.home.pid) for peer in self._peers if peer.home is not None]

    def find_homes(self) -> list[Home]:
        """Wait for every process to stand."""
        refs = {peer.shell.home.remote(): rank for rank, peer in enumerate(self._peers)}
        homes = self._collect(refs, "start", self.start_timeout)
        for peer, home in zip(self._peers, homes, strict=True):
            peer.home = home
        return homes

    def reserve_port(self, host: str) -> int:
        """Have rank 0 hold a port for its process group."""
        port: int = self._collect(
            {self._peers[0].shell.reserve_port.remote(host): 0}, "reserve_port", self.start_timeout
        )[0]
        return port

    def build(self, specs: Sequence[tuple[Any, ...]]) -> None:
        """Make the worker of every rank."""
        refs = {peer.shell.build.remote(*specs[rank]): rank for rank, peer in enumerate(self._peers)}
        self._collect(refs, "__init__", self.start_timeout)

    def shutdown(self) -> None:
        """Ask the workers to close, unless one of them is stuck or dead, then end their processes."""
        if not self._running:
            return
        if self._healthy:
            import ray

            refs = {peer.shell.close.remote(): rank for rank, peer in enumerate(self._peers)}
            done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=_CLOSE_SECONDS)
            for ref in done:
                try:
                    self._fetch(ref, refs[ref], "close")
                except WorkerError as error:
                    _logger.warning("%s", error)
        self.kill()

    def kill(self) -> None:
        """End the processes now."""
        import ray

        self._running = False
        for peer in self._peers:
            ray.kill(peer.shell, no_restart=True)

    def _run(self, name: str, args: Mapping[int, tuple[Any, ...]], timeout: float | None) -> list[Any]:
        import ray

        tuples = list(args.values())
        shipped: dict[int, Any] = {}
        refs = {}
        for each in tuples:
            shared = each and sum(other is each for other in tuples) > 1
            if id(each) not in shipped:
                shipped[id(each)] = ray.put(each) if shared else each
        # Ranks meet in collectives: calls from two threads must reach all of them in one order.
        with self._order:
            for rank, each in args.items():
                refs[self._submit(rank, name, shipped[id(each)])] = rank
        return self._collect(refs, name, timeout)

    async def _run_async(self, name: str, rank: int, args: tuple[Any, ...], timeout: float | None) -> Any:
        import ray

        limit = self._limit(timeout)
        ref = self._submit(rank, name, args)
        try:
            value = await asyncio.wait_for(asyncio.wrap_future(ref.future()), limit)
        except TimeoutError:
            raise await asyncio.to_thread(self._late, [rank], name, limit) from None
        except ray.exceptions.RayError as error:
            raise self._attributed(error, rank, name) from None
        return self._checked_value(value, rank, name)

    def _submit(self, rank: int, name: str, args: Any) -> Any:
        if not self._running:
            raise RuntimeError(f"{self.role} was shut down")
        context = outgoing(self.role, rank)
        extra = () if context is None else (context,)
        return self._peers[rank].shell.invoke.remote(name, args, *extra)

    def _collect(self, refs: Mapping[Any, int], call: str, timeout: float | None) -> list[Any]:
        """Return results by the order of `refs` (reference -> rank)."""
        import ray

        limit = self._limit(timeout)
        deadline = time.monotonic() + limit
        pending, values = list(refs), {}
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._late([refs[ref] for ref in pending], call, limit)
            try:
                values[ready[0]] = self._fetch(ready[0], refs[ready[0]], call)
            except WorkerDied:
                raise
            except WorkerError as error:
                raise self._root_cause(error, {ref: refs[ref] for ref in pending}, call) from None
        return [values[ref] for ref in refs]

    def _fetch(self, ref: Any, rank: int, call: str) -> Any:
        import ray

        try:
            value = ray.get(ref)
        except ray.exceptions.RayError as error:
            raise self._attributed(error, rank, call) from None
        return self._checked_value(value, rank, call)

    def _checked_value(self, value: Any, rank: int, call: str) -> Any:
        self._answered[rank] = time.monotonic()
        if isinstance(value, Failure):
            raise value.error(self.role, rank, call)
        return value

    def _root_cause(self, error: WorkerError, pending: Mapping[Any, int], call: str) -> WorkerError:
        """Return the death of a peer, when that is what made a rank fail; a timeout says who was waited for."""
        import ray

        if not pending:
            return error
        ready, late = ray.wait(list(pending), num_returns=len(pending), timeout=_GRACE)
        for ref in ready:
            try:
                self._fetch(ref, pending[ref], call)
            except WorkerDied as death:
                return death
            except WorkerError:
                continue
        if late and isinstance(error, WorkerFailed) and _TIMED_OUT.search(error.failure.text):
            ranks = [pending[ref] for ref in late]
            return error.waiting_for(ranks, self._lost_machine(ranks)[1])
        return error

    def _attributed(self, error: Exception, rank: int, call: str) -> WorkerError:
        """Return the worker error that an error of Ray stands for."""
        from ray import exceptions

        if isinstance(error, exceptions.RayTaskError):
            # Raised around the worker's code: arguments or results that can't be pickled or imported.
            cause = error.cause
            text = str(cause).strip().splitlines()[-1:] or [""]
            text_of_error = _COLOURS.sub("", str(error))
            failure = Failure(type(cause).__name__, text[0], text_of_error, isinstance(cause, ValueError))
            return failure.error(self.role, rank, call)
        dead = (exceptions.RayActorError, exceptions.OutOfMemoryError, exceptions.NodeDiedError)
        if isinstance(error, dead):
            self._healthy = False
            return self._death(error, rank, call)
        return Failure(type(error).__name__, str(error), "", False).error(self.role, rank, call)

    def _death(self, error: Exception, rank: int, call: str) -> WorkerDied:
        peer = self._peers[rank]
        node, pid = (self._machine_of(peer.home), peer.home.pid) if peer.home else ("", 0)
        reason, tail = _reason(str(error)), _tail(peer.log_file)
        reason = explain_cancelled(reason) or reason
        return WorkerDied(role=self.role, rank=rank, node=node, pid=pid, call=call, reason=reason, stderr_tail=tail)

    def _late(self, ranks: Sequence[int], call: str, seconds: float) -> WorkerTimeout:
        """Return the error for ranks that don't answer: the first, or the first whose machine can't be reached."""
        self._healthy = False
        rank, lost = self._lost_machine(ranks)
        peer = self._peers[rank]
        doing = "" if lost else self._stacks(peer)
        node = "" if peer.home is None or peer.home.machine == machine_id() else name_of(peer.home)
        return WorkerTimeout(role=self.role, rank=rank, call=call, seconds=seconds, doing=doing, node=node, lost=lost)

    def _lost_machine(self, ranks: Sequence[int]) -> tuple[int, str]:
        """Return the first rank whose machine can't be reached, with a sentence about it; else the first, and none."""
        asked: dict[str, str] = {}
        for rank in ranks:
            home = self._peers[rank].home
            if home is None or home.machine == machine_id() or home.machine in asked:
                continue
            there = [i for i, peer in enumerate(self._peers) if peer.home and peer.home.machine == home.machine]
            asked[home.machine] = lost(home, time.monotonic() - max(self._answered[i] for i in there))
            if asked[home.machine]:
                return rank, asked[home.machine]
        return ranks[0], ""

    def _machine_of(self, home: Home) -> str:
        return home.host if home.machine == machine_id() else name_of(home)

    def _stacks(self, peer: Peer) -> str:
        """Return stacks of a worker's threads; empty where its process or log can't be reached from here."""
        from roll.distributed.ray_worker import STACKS_SIGNAL

        if peer.home is None or peer.home.machine != machine_id():
            return ""
        before = peer.log_file.stat().st_size if peer.log_file.exists() else 0
        try:
            os.kill(peer.home.pid, STACKS_SIGNAL)
        except OSError:
            return ""
        time.sleep(_STACKS_SECONDS)
        return _running_calls(_tail(peer.log_file, start=before))


def _tail(path: Path, start: int = 0) -> str:
    """Return the last lines of a file, none of them from before byte `start`; empty where there is no such file."""
    try:
        with open(path, "rb") as file:
            file.seek(max(start, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-TAIL_LINES:])


def _running_calls(stacks: str) -> str:
    """Return, of all threads' stacks (innermost frame first), those inside a worker's method, without Ray's own
    frames."""
    calls = []
    for stack in stacks.split("\n\n"):
        frames, shell, _ = stack.partition("ray_worker.py")
        if shell:
            calls.append("\n".join(frames.splitlines()[:-1]))
    return "\n".join(calls) or stacks


def _reason(text: str) -> str:
    """Return the part of Ray's message that says why, without its table of ids."""
    lines = [
        line for line in _COLOURS.sub("", text).splitlines() if line.strip() and not line.startswith(("\t", "    "))
    ]
    return "\n".join(lines[1:] or lines)
