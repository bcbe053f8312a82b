"""Functions that play episodes, kept loaded in processes of their own: one episode per process at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.gateway.agents.logs import AgentLog
from roll.gateway.agents.process import AgentNotStarted, AgentProcess
from roll.isolation.sandbox.usage import descendants

WORKER = str(Path(__file__).with_name("function_worker.py"))
_LONGEST_LINE = 8 << 20


class AgentFailed(RuntimeError):
    """What the function raised, or how its process ended."""


class _Worker:
    """One process with the function loaded."""

    def __init__(self, process: AgentProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self._reader, self._writer = reader, writer

    async def ask(self, request: Mapping[str, Any] | None) -> dict[str, Any]:
        """Send a request, unless it is None, and return the next line; raises `AgentFailed` when there is none."""
        try:
            if request is not None:
                self._writer.write(json.dumps(request).encode() + b"\n")
                await self._writer.drain()
            line = await self._reader.readline()
        except (OSError, ValueError) as error:  # a line without end, for one
            raise AgentFailed(f"its process can't be understood: {error}") from None
        if not line:
            ended = await self.process.wait()
            raise AgentFailed(f"its process ended with {ended.text}")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise AgentFailed(f"its process wrote what isn't an answer: {line[:80]!r}")
        return reply

    async def kill(self) -> None:
        self._writer.close()
        await self.process.kill()


class AgentFunctions:
    """Processes of one function. All methods belong to one event loop.

    Args:
        function: `file.py:name` or `package.module:name`.
        python: their interpreter.
    """

    def __init__(self, function: str, *, python: str, environment: Mapping[str, str], cwd: str | None) -> None:
        self._words = (python, "-u", WORKER)
        self._function, self._environment, self._cwd = function, dict(environment), cwd
        self._idle: list[_Worker] = []
        self._alive: set[_Worker] = set()
        self._closed = False

    async def play(self, request: Mapping[str, Any], log: AgentLog) -> Any:
        """Play one episode, in a process that nothing else uses meanwhile; returns the function's value.

        A process whose episode fails, is cancelled, or leaves processes of its own is killed with all of them.

        Raises:
            AgentNotStarted: the function can't be loaded.
            AgentFailed: it raised, or its process ended.
        """
        worker = await self._idle_worker() or await self._start(log)
        worker.process.log = log
        try:
            reply = await worker.ask(request)
            worker.process.drain()
            worker.process.log = None
        except BaseException:
            await self._drop(worker)
            raise
        if self._closed or descendants(worker.process.pid):
            await self._drop(worker)
        else:
            self._idle.append(worker)
        if "value" not in reply:
            raise AgentFailed(str(reply.get("error", "its process gave no value")))
        return reply["value"]

    async def _idle_worker(self) -> _Worker | None:
        while self._idle:
            worker = self._idle.pop()
            if not worker.process.has_ended:
                return worker
            await self._drop(worker)  # it ended between two episodes
        return None

    async def close(self) -> None:
        """Kill every process."""
        self._closed = True
        await asyncio.gather(*(self._drop(worker) for worker in list(self._alive)))

    async def _start(self, log: AgentLog) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            words: Sequence[str] = (*self._words, str(theirs.fileno()), self._function)
            process = await AgentProcess.start(
                words, environment=self._environment, cwd=self._cwd, log=log, fds=[theirs.fileno()]
            )
            undo.pop_all()
        reader, writer = await asyncio.open_connection(sock=ours, limit=_LONGEST_LINE)
        worker = _Worker(process, reader, writer)
        self._alive.add(worker)
        try:
            reply = await worker.ask(None)
            if "failed" in reply:
                raise AgentNotStarted(f"{self._function} can't be loaded:\n{reply['failed']}")
        except AgentFailed as error:
            await self._drop(worker)
            raise AgentNotStarted(f"{self._function} can't be loaded: {error}; it wrote: {log.end()}") from None
        except BaseException:
            await self._drop(worker)
            raise
        return worker

    async def _drop(self, worker: _Worker) -> None:
        self._alive.discard(worker)
        with contextlib.suppress(ValueError):
            self._idle.remove(worker)
        await worker.kill()
