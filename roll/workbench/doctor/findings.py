"""What a probe says, and how probes are run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One fact about the machine."""

    status: Status
    """`problem`: runs fail or are wrong; `warning`: some do, or slowly; `note`: worth knowing."""
    subject: str
    said: str
    fix: str = ""
    """What to do about it, a command where there is one."""


Probe = Callable[[], Iterable[Finding]]


class ProbeFailed(RuntimeError):
    """What was asked of another process didn't come: its last line, or that it took too long."""


def examine(probes: dict[str, Probe]) -> Iterator[tuple[str, list[Finding]]]:
    """Call probes in order, by their headings. One that raises is a problem of its own, never the end of the others."""
    for heading, probe in probes.items():
        findings: list[Finding] = []
        try:
            findings += probe()
        except Exception as error:  # noqa: BLE001 - whatever a broken machine does, the other probes are wanted
            message = f"couldn't be looked at: {type(error).__name__}: {error}"
            findings.append(Finding("problem", heading, message, "please report this as a fault of roll doctor"))
        yield heading, findings


def ask_python(source: str, *, timeout_s: float, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Run Python code in a process of its own, and return the JSON object that it prints last.

    What is imported there can crash, hang or print as it likes. Raises `ProbeFailed` with the last line of its errors.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        # Files, not pipes: a grandchild that keeps a pipe open would hold us beyond the time.
        process = subprocess.Popen(
            [sys.executable, "-c", source],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ProbeFailed(f"no answer within {timeout_s:g} s") from None
        finally:
            _end_group(process)
        out.seek(0)
        err.seek(0)
        lines = out.read().decode(errors="replace").strip().splitlines()
        errors = err.read().decode(errors="replace").strip().splitlines()
    if code < 0:
        raise ProbeFailed(f"ended by signal {-code}" + (f": {errors[-1][:300]}" if errors else ""))
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise ProbeFailed(errors[-1][:300] if errors else f"exit code {code} without an answer") from None
    if not isinstance(answer, dict):
        raise ProbeFailed(f"an answer that isn't one: {lines[-1][:100]}")
    return answer


def _end_group(process: subprocess.Popen[bytes]) -> None:

    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
