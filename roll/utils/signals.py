"""What Ctrl-C and SIGTERM do to a command: the first thing that it installs, so nothing heavy is imported here.

While a command starts or ends, a signal ends the process at once with a plain sentence: nothing has begun that would
have to be cleaned up, and an exception in the middle of an import is lost or turned into another one. In between, it
raises `KeyboardInterrupt`, so that a run closes what it opened.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


class _State:
    """There is one process, hence one state."""

    at_once = True
    received: int | None = None
    code: int | None = None


def install() -> None:
    """Take over the signals, unless whoever started the command has them ignored; open standard streams that are
    closed, so that no file of ours gets their numbers."""
    for number in WORDS:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, _handle)
    atexit.register(_exit)  # before anybody else's, so it runs last
    os.register_at_fork(after_in_child=_give_back)
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                os.fstat(fd)
                continue
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(fd, "w" if fd else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def _exit() -> None:
    """End with the command's code, after all that others have registered, and without taking the interpreter down.

    One that saw an interruption pass through `exec`, with which dataclasses are made, would kill itself with SIGINT,
    and compiled modules tell at that moment of objects that are still there (triton's, in some forty lines).
    """
    if _State.code is not None:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(_State.code)


def exit_with(code: int) -> None:
    """Have the process end with this code once the interpreter is done, if the signals are in hand."""
    _State.code = code


def _give_back() -> None:
    """Have a forked child end by signals as any process does: its parent ends it with one."""
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) is _handle:
            signal.signal(number, default)


def _handle(number: int, _: FrameType | None) -> None:
    if _State.at_once:
        if _State.received is None:
            with contextlib.suppress(OSError):
                os.write(2, f"{WORDS[signal.Signals(number)]}\n".encode())
        os._exit(128 + (_State.received or number))
    _State.received = number
    raise KeyboardInterrupt


def received() -> int | None:
    """Return the signal that has come since the work began."""
    return _State.received


def begin_work() -> None:
    """Have signals raise `KeyboardInterrupt` from now on."""
    _State.at_once, _State.received, _State.code = False, None, None


def end_work() -> None:
    """Have signals end the process at once from now on: the command is over, but for the interpreter's end."""
    _State.at_once = True


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Have signals end the process at once during a long import."""
    before, _State.at_once = _State.at_once, True
    try:
        yield
    finally:
        _State.at_once = before
