"""An agent's process, seen from the run: started under a supervisor, listened to, killed with all that it started.

    run --control socket--> supervisor.py --fork--> the agent, and what it starts
        <--stdout, stderr pipes---------------------

All methods belong to one event loop, and none of them blocks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.gateway.agents.logs import AgentLog
from roll.isolation.processes.guard import GUARD

_SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
_READ = 1 << 16
_KILL_S = 15.0
_START_S = 30.0


class AgentNotStarted(RuntimeError):
    """Its program can't be run; the message says why."""


@dataclass(frozen=True, slots=True)
class AgentExit:
    """How an agent's process ended."""

    code: int | None
    """Exit code; None: by a signal."""
    signal: int = 0

    @property
    def text(self) -> str:
        """Return the end as text, for messages."""
        return f"exit code {self.code}" if self.code is not None else f"signal {self.signal}"


class AgentProcess:
    """One process with all that it starts. Made by `start`; end it with `kill`, harmless when it has ended."""

    def __init__(self) -> None:
        self.log: AgentLog | None = None
        """Takes what is printed from now on; None: nobody is interested."""
        self.pid = 0
        """Of the agent, not of its supervisor."""
        loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[AgentExit] = loop.create_future()
        self._process: subprocess.Popen[bytes]
        self._control: socket.socket
        self._watching: asyncio.Task[None]
        self._pipes: dict[int, bool] = {}

    @classmethod
    async def start(
        cls,
        words: Sequence[str],
        *,
        environment: Mapping[str, str],
        cwd: str | None,
        log: AgentLog | None = None,
        fds: Sequence[int] = (),
    ) -> AgentProcess:
        """Start a program that inherits `fds`. Raises `AgentNotStarted`."""
        agent = cls()
        agent.log = log
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-I", "-S", _SUPERVISOR, str(theirs.fileno()), *words]
            try:
                agent._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=[theirs.fileno(), *fds],
                    env=dict(environment),
                    cwd=cwd,
                    start_new_session=True,  # Ctrl-C isn't for it
                )
            except (OSError, ValueError) as error:
                ours.close()
                raise AgentNotStarted(f"{words[0]} can't be started in {cwd or Path.cwd()}: {error}") from None
        agent._control = ours
        agent._listen()
        agent._watching = asyncio.get_running_loop().create_task(agent._watch())
        try:
            await asyncio.wait_for(asyncio.shield(agent._started), _START_S)
        except TimeoutError:
            await agent.kill()
            raise AgentNotStarted(f"{words[0]}: its supervisor didn't start it within {_START_S:g} s") from None
        except BaseException:
            await agent.kill()
            raise
        return agent

    @property
    def has_ended(self) -> bool:
        """Return whether it is gone, with all that it started."""
        return self._ended.done()

    async def wait(self) -> AgentExit:
        """Wait for its end, and for that of all that it started."""
        return await asyncio.shield(self._ended)

    async def kill(self) -> None:
        """End it with all that it started, and wait until that is done."""
        if self._watching.done():
            return
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)  # its supervisor does the rest
        await asyncio.wait([self._watching], timeout=_KILL_S)
        if not self._watching.done():
            for group in filter(None, (self.pid, self._process.pid)):  # 0 would be this process's own
                with contextlib.suppress(OSError):
                    os.killpg(group, signal.SIGKILL)
            await asyncio.wait([self._watching], timeout=_KILL_S)

    def drain(self) -> None:
        """Take what has been printed so far."""
        for pipe in list(self._pipes):
            for _ in range(1 + _waiting(pipe) // _READ):
                self._read(pipe)

    async def _watch(self) -> None:
        reader, writer = await asyncio.open_connection(sock=self._control.dup())
        message = await _next_message(reader)
        if "pid" in message:
            self.pid = int(message["pid"])
            GUARD.add(self.pid)
            self._started.set_result(None)
            message = await _next_message(reader)
        else:
            self._started.set_exception(AgentNotStarted(f"can't run {message.get('failed', 'it: it was killed')}"))
            self._started.exception()  # looked at, or asyncio would complain where nobody waits any more
        writer.close()
        self._close()
        code = message.get("code")
        # A supervisor that was killed says nothing.
        self._ended.set_result(
            AgentExit(None if code is None else int(code), int(message.get("signal", signal.SIGKILL)))
        )

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for stream, is_stdout in ((self._process.stdout, True), (self._process.stderr, False)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._pipes[stream.fileno()] = is_stdout
            loop.add_reader(stream.fileno(), self._read, stream.fileno())

    def _read(self, pipe: int) -> None:
        if pipe not in self._pipes:
            return
        try:
            data = os.read(pipe, _READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            if self.log is not None:
                self.log.write(data, stdout=self._pipes[pipe])
        else:
            asyncio.get_running_loop().remove_reader(pipe)
            del self._pipes[pipe]

    def _close(self) -> None:
        """Release what belongs to it; its last words first."""
        self.drain()
        loop = asyncio.get_running_loop()
        for pipe in self._pipes:
            loop.remove_reader(pipe)
        self._pipes.clear()
        self._control.close()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # it has said its last
        if self.pid:
            GUARD.remove(self.pid)


def _waiting(pipe: int) -> int:
    """Return bytes that can be read from a pipe at once."""
    with contextlib.suppress(OSError):
        return int(struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0\0\0\0"))[0])
    return 0


async def _next_message(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next line of a supervisor; empty when it is gone."""
    with contextlib.suppress(ValueError, OSError):
        line = await reader.readline()
        message = json.loads(line) if line else {}
        return message if isinstance(message, dict) else {}
    return {}
