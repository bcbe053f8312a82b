"""Ends a Ray that its controller left behind: Ray's own processes notice a killed driver only after a minute.

`start_reaper` starts a process that waits for the controller's death at the end of a pipe. Then it kills what belonged
to that Ray: processes with the session's mark in their environment, and all that these started (Ray writes its workers'
titles over their environment). It is run as a plain script, which needs little time and memory.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "ROLL_RAY_SESSION"
"""Environment variable of every process of a session: its temporary folder."""
_LIMIT_S = 8.0
_QUIET_S = 0.6
"""Without anything left to kill for so long, nothing comes any more."""


def start_reaper(folder: Path) -> int:
    """Start the reaper of the session in `folder`; return the descriptor that must stay open while the session lives.

    Close it after Ray has ended: the reaper then finds nothing and ends, too.
    """
    read_end, write_end = os.pipe()
    try:
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(read_end), str(folder)],
            pass_fds=(read_end,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", "")},
            start_new_session=True,  # Ctrl-C isn't for it, nor what kills the controller's group
        )
    finally:
        os.close(read_end)
    return write_end


def _parents_and_marked(folder: str) -> tuple[dict[int, int], set[int]]:
    """Return the parent of every process, and those with this session's mark or files."""
    mark = f"{MARK}={folder}".encode()
    parents: dict[int, int] = {}
    marked: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(name)] = int(parent)
                if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0") or _has_open(name, folder):
                    marked.add(int(name))
    return parents, marked


def _has_open(pid: str, folder: str) -> bool:
    """Return whether a process of Ray has a file of the session open: its agents have, which outlive their parent."""
    if b"ray" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        return False
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith(f"{folder}/"):
                return True
    return False


def of_session(folder: str) -> set[int]:
    """Return the processes with the session's mark, and all below them; never this one."""
    parents, marked = _parents_and_marked(folder)
    growing = True
    while growing:
        below = {pid for pid, parent in parents.items() if parent in marked} - marked
        marked |= below
        growing = bool(below)
    return marked - {os.getpid()}


def reap(folder: str) -> None:
    """Kill a session's processes until none is left, then delete its folder and models that they had copied."""
    end = time.monotonic() + _LIMIT_S
    quiet_since = time.monotonic()
    while time.monotonic() < end and time.monotonic() - quiet_since < _QUIET_S:
        for pid in of_session(folder):
            quiet_since = time.monotonic()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)
    # Not by its name: without site-packages this package can't be imported.
    runpy.run_path(str(Path(__file__).parents[1] / "utils" / "staging.py"))["sweep"]()


def main() -> None:
    """Wait for the pipe's end, which is the controller's, then `reap`."""
    descriptor, folder = int(sys.argv[1]), sys.argv[2]
    while os.read(descriptor, 4096):
        pass
    if Path(folder).is_dir():  # a session that ended by itself has deleted it
        reap(folder)


if __name__ == "__main__":
    main()
