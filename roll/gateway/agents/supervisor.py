"""Starts an agent, and ends it with everything that it started, wherever in the process tree that went.

    supervisor.py CONTROL_FD WORD...

It runs as a plain script on the standard library alone. It adopts the agent's orphans, so nothing that the agent forks
gets away. CONTROL_FD is a socket to the run: a line of JSON says that the agent was started (`pid`) or can't be
(`failed`), and another how it ended (`code`, or `signal`). When the run closes its end, or is gone, the agent is
killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GIVE_UP_S = 10.0
_PAUSE_S = 0.01
_POLL_MS = 1000
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _tell(control: int, **fields: object) -> None:
    with contextlib.suppress(OSError):  # nobody is left to listen
        os.write(control, json.dumps(fields).encode() + b"\n")


def _start(words: list[str]) -> tuple[int, str]:
    """Fork the agent into a group of its own; returns its id, and why its program couldn't be run, if so."""
    parent = os.getpid()
    failed, fail = os.pipe()  # the agent's end is closed by what it becomes
    child = os.fork()
    if child:
        os.close(fail)
        with contextlib.suppress(OSError):
            os.setpgid(child, child)  # the child does so too: whoever is first
        with os.fdopen(failed, "rb") as pipe:
            return child, pipe.read().decode(errors="replace")
    try:
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(127)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_DFL)
        os.execvp(words[0], words)
    except OSError as error:
        os.write(fail, f"{words[0]}: {error.strerror}".encode())
    finally:
        os._exit(127)


def _wait(child: int, control: int, run: int) -> None:
    """Wait until the agent has ended, or the run has closed its end, or is gone."""
    poll = select.poll()
    poll.register(control, select.POLLIN | select.POLLHUP)
    watched = os.pidfd_open(child)
    poll.register(watched, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll(_POLL_MS)]
        # A process that the run has forked may hold its end open.
        if watched in ready or os.getppid() != run:
            return
        if control in ready and not os.read(control, 4096):
            return


def _descendants() -> list[int]:
    result, waiting = [], [os.getpid()]
    while waiting:
        parent = waiting.pop()
        with contextlib.suppress(OSError, ValueError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children", encoding="ascii") as file:
                    children = [int(child) for child in file.read().split()]
                result += children
                waiting += children
    return result


def _end(child: int) -> int:
    """Kill the agent's group, then whatever left it; returns the agent's status as `os.wait` has it."""
    # The group lasts as long as its first process isn't reaped, so that this can't hit another one.
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    status, give_up = 0, time.monotonic() + _GIVE_UP_S
    while time.monotonic() < give_up:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == child:
            status = code
        elif pid == 0:
            for stray in _descendants():
                with contextlib.suppress(OSError):
                    os.kill(stray, signal.SIGKILL)
            time.sleep(_PAUSE_S)
    return status


def main() -> None:
    """Run one agent to its end."""
    control, words = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(control, False)
    run = os.getppid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    child, failed = _start(words)
    if failed:
        _tell(control, failed=failed)
        return
    _tell(control, pid=child)
    _wait(child, control, run)
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    status = _end(child)
    if ended and os.WIFEXITED(status):
        _tell(control, code=os.WEXITSTATUS(status))
    else:
        _tell(control, signal=os.WTERMSIG(status) if ended else int(signal.SIGKILL))


if __name__ == "__main__":
    main()
