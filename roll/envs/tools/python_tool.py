"""The tool `python`: code that the policy writes, run in the sandbox, call by call or an episode as a session."""

from __future__ import annotations

import importlib.util
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from roll.envs.tools.base import Tool, ToolFailure, ToolReply
from roll.isolation.sandbox.base import Limits, Outcome, Program, Running, Sandbox, SandboxError
from roll.types.trajectory import Task

_OUTPUT_BYTES = 1 << 16
_SESSION_BYTES = 1 << 22
_SESSION_S = 24 * 3600.0
_ENDINGS = {
    "timeout": "it ran longer than {seconds:g} s and was stopped",
    "memory": "it used more than {memory_mb} MiB of memory and was stopped",
    "output": "it printed too much and was stopped",
    "processes": "it started too many processes and was stopped",
    "killed": "it was killed",
}


@dataclass
class PythonSession:
    """Of one episode."""

    running: Running | None = None


class PythonTool(Tool):
    """Runs Python and returns what it prints, with the value of the last expression as in a notebook.

    Args:
        sandbox: that it runs in.
        session: keep variables from call to call of an episode; false: every call starts afresh.
        seconds: of one call, on the clock and of processor time.
        memory_mb: MiB of memory.
        packages: that code may import besides the standard library, e.g. `[numpy, sympy]`; loaded once, not per call.
    """

    description = "Run Python code. Returns what it prints, and the value of the last expression."
    parameters = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The code."}},
        "required": ["code"],
        "additionalProperties": False,
    }

    def __init__(
        self,
        sandbox: Sandbox,
        session: bool = False,
        seconds: float = 5.0,
        memory_mb: int = 512,
        packages: Sequence[str] = (),
    ) -> None:
        self._sandbox = sandbox.extended(_folders(packages), list(packages)) if packages else sandbox
        self._session, self._seconds, self._memory_mb = session, seconds, memory_mb
        if session:
            self.description += " Variables and imports stay for the calls that follow."

    @property
    def keeps_state(self) -> bool:
        return self._session

    def create(self, task: Task, kwargs: Mapping[str, Any]) -> PythonSession:  # noqa: ARG002
        return PythonSession()

    def call(self, arguments: Mapping[str, Any], state: PythonSession) -> ToolReply:
        code = arguments["code"]
        try:
            return self._in_session(code, state) if self._session else self._alone(code)
        except SandboxError as error:
            raise ToolFailure(f"the sandbox failed: {error}") from error

    def close(self, state: PythonSession) -> None:
        if state.running is not None:
            state.running.kill()

    def _limits(self) -> Limits:
        return Limits(wall_s=self._seconds, cpu_s=self._seconds, memory_mb=self._memory_mb, output_bytes=_OUTPUT_BYTES)

    def _alone(self, code: str) -> ToolReply:
        mark = secrets.token_hex(16)
        outcome = self._sandbox.run(Program(source=_source(), stdin=_request(code, mark)), self._limits())
        printed, _, _ = outcome.stdout.decode("utf-8", "replace").partition(f"\n{mark}\n")
        return self._reply(printed, outcome if mark.encode() not in outcome.stdout else None)

    def _in_session(self, code: str, state: PythonSession) -> ToolReply:
        if state.running is None:
            limits = Limits(wall_s=_SESSION_S, cpu_s=_SESSION_S, memory_mb=self._memory_mb, output_bytes=_SESSION_BYTES)
            state.running = self._sandbox.start(Program(source=_source()), limits)
        running, mark = state.running, secrets.token_hex(16)
        ends_at, lines = time.monotonic() + self._seconds, list[bytes]()
        size, ended = 0, not running.write(_request(code, mark), timeout_s=self._seconds)
        while not ended:
            line = running.read_line(max(0.0, ends_at - time.monotonic()))
            if line is None:
                ended = True
            elif line.strip() == mark.encode():
                break
            elif size < _OUTPUT_BYTES:
                lines.append(line)
                size += len(line)
        printed = b"".join(lines).decode("utf-8", "replace")
        if not ended:
            return self._reply(printed.removesuffix("\n"), None)
        overdue = time.monotonic() >= ends_at
        if overdue:
            running.kill()
        outcome = Outcome(ending="timeout", exit_code=None, stdout=b"", stderr=b"", seconds=0) if overdue else None
        state.running, outcome = None, outcome or running.wait()
        reply = self._reply(printed, outcome)
        return ToolReply(f"{reply.text}\nThe session begins afresh: its variables are gone.", is_error=True)

    def _reply(self, printed: str, outcome: Outcome | None) -> ToolReply:
        """Return what is shown of a piece; `outcome` of a process that ended before the piece did."""
        text = printed.strip("\n")
        if outcome is None:
            return ToolReply(text or "(nothing was printed)")
        why = _ENDINGS.get(outcome.ending, "the process ended")
        why = why.format(seconds=self._seconds, memory_mb=self._memory_mb)
        error = outcome.stderr.decode("utf-8", "replace").strip()[-500:]
        return ToolReply("\n".join(part for part in (text, error, f"Error: {why}") if part), is_error=True)


def _request(code: str, mark: str) -> bytes:
    return (json.dumps({"code": code, "mark": mark}) + "\n").encode()


@lru_cache(maxsize=1)
def _source() -> str:
    return Path(__file__).with_name("python_program.py").read_text("utf-8")


def _folders(packages: Sequence[str]) -> list[str]:
    """Return where packages are installed. Raises `ValueError` for one that isn't."""
    folders = []
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.origin:
            raise ValueError(f"the tool python: there is no package {name!r} here; pip install it, or leave it out")
        folders.append(str(Path(spec.origin).parents[1]))
    return list(dict.fromkeys(folders))
