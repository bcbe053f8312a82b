"""The process that environments live in: reads requests from a pipe, answers in order. `env_process.py` starts it.

Single-threaded, so environments needn't be thread-safe. It takes all requests that have come, and sends the answers to
them together, unless some call among them took long. It writes what it is doing into memory that it shares with its
parent: number and start of the call under way. So the parent can tell a call that hangs from one that waits behind it,
and whose call it was that ended the process.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import pickle
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.envs import messages
from roll.envs.base import Env
from roll.envs.env_registry import EnvSpec, build_env, check_spec, load_env
from roll.envs.messages import Frames, Packed, frame
from roll.utils.child import short_traceback

_READ_BYTES = 1 << 20
_FLUSH_NS = 2_000_000


def main(fd: int, progress_fd: int, alarm_s: float) -> None:
    """Serve until the pipe closes. `alarm_s` ends a call whose parent is gone: the parent's own limit is shorter."""
    for inherited in (fd, progress_fd):
        os.set_inheritable(inherited, False)
    pipe = socket.socket(fileno=fd)
    progress = memoryview(mmap.mmap(progress_fd, 0)).cast("Q")
    os.close(progress_fd)
    frames = Frames()
    requests: list[Any] = []
    while not requests:
        requests = frames.feed(_read(pipe))
    specs: Mapping[str, EnvSpec] = pickle.loads(requests.pop(0))
    try:
        for spec in specs.values():
            check_spec(spec)
    except BaseException:  # noqa: BLE001 - the boundary: reported to the parent, which raises it
        pipe.sendall(frame(("failed", short_traceback(skip=1))))
        return
    gc.collect()
    gc.freeze()  # what is loaded stays: later collections needn't look at it
    pipe.sendall(frame(("ready", resident_mb())))
    server = _Server(pipe, specs, progress, alarm_s)
    while True:
        for batch in requests:
            server.serve(batch)
        server.flush()
        requests = frames.feed(_read(pipe))


def _read(pipe: socket.socket) -> bytes:
    """What has come; ends the process, and all that it started, when the parent has gone."""
    piece = b""
    with contextlib.suppress(ConnectionResetError):
        piece = pipe.recv(_READ_BYTES)
    if not piece:
        os.killpg(os.getpgid(0), signal.SIGKILL)
    return piece


class _Server:
    """The instances, and the answers that haven't been sent yet."""

    def __init__(
        self, pipe: socket.socket, specs: Mapping[str, EnvSpec], progress: memoryview, alarm_s: float
    ) -> None:
        self._pipe = pipe
        self._specs = specs
        self._progress = progress
        self._alarm_s = alarm_s
        self._armed_at = 0
        self._envs: dict[int, Env] = {}
        self._tags: dict[int, str] = {}
        self._answers: list[tuple[Any, ...]] = []
        self._flushed_at = time.monotonic_ns()

    def serve(self, batch: list[tuple[Any, ...]]) -> None:
        """Answer requests."""
        for request in batch:
            number, kind, instance = request[:3]
            self._begin(number)
            if kind == "close":
                self._answers.append((number, "closed", resident_mb(), self._close(instance)))
            else:
                self._answers.append((number, *self._play(kind, instance, request)))
            self._progress[0] = 0
            if time.monotonic_ns() - self._flushed_at > _FLUSH_NS:
                self._send()

    def flush(self) -> None:
        """Send what there is, before waiting for more."""
        if self._armed_at:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._armed_at = 0
        self._send()

    def _send(self) -> None:
        if self._answers:
            self._pipe.sendall(frame(self._answers))
            self._answers.clear()
        self._flushed_at = time.monotonic_ns()

    def _begin(self, number: int) -> None:
        """Note that a call starts now. First when: whoever reads between the two sees a call that is younger."""
        now = time.monotonic_ns()
        self._progress[1] = now
        self._progress[0] = number
        if not self._armed_at or now - self._armed_at > 1_000_000_000:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # an environment may have left its own handler
            signal.setitimer(signal.ITIMER_REAL, self._alarm_s)
            self._armed_at = now

    def _play(self, kind: str, instance: int, request: tuple[Any, ...]) -> tuple[str, Packed | str]:
        """A reset or a step, or what went wrong; then the instance is closed."""
        number = request[0]
        if kind == "open":
            self._tags[instance] = request[3]
        doing = "__init__"
        try:
            if kind == "step":
                doing = "step"
                return "ok", messages.pack_step(self._envs[instance].step(request[3]))
            _, _, _, tag, seed, options, responses = request
            env = self._envs[instance] = build_env(self._specs[tag])
            doing = "reset"
            result: Packed = messages.pack_observation(env.reset(seed, pickle.loads(options)))
            for step, response in enumerate(responses, 1):
                doing = f"step {step}"
                self._begin(number)
                result = messages.pack_step(env.step(response))
            return "ok", result
        except BaseException as error:  # noqa: BLE001 - the boundary: it becomes a status with this text
            text = f"{_described(error, self._specs[self._tags[instance]], doing)}\n{short_traceback(skip=1)}"
            closing = self._close(instance)
            return "error", f"{text}\nand closing it: {closing}" if closing else text

    def _close(self, instance: int) -> str:
        """Release an instance; what went wrong, or nothing."""
        env = self._envs.pop(instance, None)
        spec = self._specs[self._tags.pop(instance)] if instance in self._tags else None
        if env is None or spec is None:
            return ""
        try:
            env.close()
        except BaseException as error:  # noqa: BLE001 - the boundary: it is reported
            return _described(error, spec, "close")
        return ""


def _described(error: BaseException, spec: EnvSpec, doing: str) -> str:
    """`IndexError: list index out of range (file.py:31, in reset)`: the last frame in the file of the class."""
    frames = traceback.extract_tb(error.__traceback__)
    try:
        file = sys.modules[load_env(spec.env_type).__module__].__file__
    except (ValueError, KeyError):
        file = None
    where = next((entry for entry in reversed(frames) if entry.filename == file), None)
    at = f"{where.filename}:{where.lineno}, in {doing}" if where else f"in {doing}"
    return f"{''.join(traceback.format_exception_only(type(error), error)).strip()} ({at})"


def resident_mb() -> float:
    """Memory of this process."""
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except OSError:  # no /proc here: its peak, in bytes on macOS
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    return pages * resource.getpagesize() / 2**20
