"""Runs an agent's program under sandlock: it reaches the endpoint and nothing else, and writes in one folder alone.

    confined.py POLICY WORD...

It runs as a plain script between `supervisor.py` and the program. POLICY is JSON: arguments of sandlock's `Sandbox`,
`folder`, the one to write in, and `disk`, the bytes that it may write. It ends as the program does.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import stat
import sys
import threading
from collections.abc import Iterator

_POLL_S = 0.5
_MAX_ENTRIES = 200_000  # files and folders


def main() -> int:
    """Run one program to its end; return its exit code."""
    import sandlock

    policy = json.loads(sys.argv[1])
    folder, most = policy.pop("folder"), policy.pop("disk")
    environment = {**os.environ, "HOME": folder, "TMPDIR": folder, "ROLL_WORKSPACE": folder}
    policy["fs_writable"] = [folder, "/dev/null"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    box = sandlock.Sandbox(**policy, clean_env=True, env=environment)
    same = sandlock.StdioMode.INHERIT
    program = box.popen(sys.argv[2:], stdin=same, stdout=same, stderr=same)
    over, ended = threading.Event(), threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_S):
            if written(folder, most) > most:
                over.set()
                program.kill()
                return

    threading.Thread(target=watch, daemon=True).start()
    result = program.wait()
    ended.set()
    killed = signal.SIGKILL if result.reason == sandlock.ExitReason.KILLED else result.signal
    if over.is_set():
        sys.stderr.write(f"sandbox: the program wrote more than {most >> 20} MiB (sandbox_disk_mb)\n")
    elif result.reason == sandlock.ExitReason.KILLED:
        memory = int(policy["max_memory"]) >> 20
        sys.stderr.write(f"sandbox: the program was killed; it may map {memory} MiB of memory (sandbox_memory_mb)\n")
    if result.error:
        sys.stderr.write(f"sandbox: {result.error}\n")
    sys.stderr.flush()
    if killed > 0:
        with contextlib.suppress(OSError, ValueError):
            if killed != signal.SIGKILL:
                signal.signal(killed, signal.SIG_DFL)
            os.kill(os.getpid(), killed)
    return result.exit_code if 0 <= result.exit_code <= 255 else 1


def written(folder: str, most: int) -> int:
    """Return the bytes on the disk below a folder, and of files without a name that the program holds open.

    More than `most` for what can't be counted: too many files, or folders too deep within each other.
    """
    total, entries, folders, root = 0, 0, [folder], os.path.realpath(folder)
    while folders:
        try:
            with _listed(folders.pop(), root) as listing:
                for entry in listing:
                    entries += 1
                    if entries > _MAX_ENTRIES or total > most:
                        return most + 1
                    with contextlib.suppress(FileNotFoundError):  # gone by now; others of the folder aren't
                        about = entry.stat(follow_symlinks=False)
                        total += about.st_blocks * 512
                        if stat.S_ISDIR(about.st_mode):
                            folders.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):  # gone since it was listed
            continue
        except OSError:
            return most + 1
    return total + _nameless()


def _listed(folder: str, root: str) -> contextlib.AbstractContextManager[Iterator[os.DirEntry[str]]]:
    try:
        return os.scandir(folder)
    except PermissionError:  # the program closed it
        held = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            # By now a link to a folder that isn't the program's may be in its place, or on the way to it.
            opened = f"/proc/self/fd/{held}"
            if os.path.commonpath([os.readlink(opened), root]) != root:
                raise FileNotFoundError(folder) from None
            os.chmod(opened, 0o700)
        finally:
            os.close(held)
        return os.scandir(folder)


def _nameless() -> int:
    """Return files that were removed and are still open, or never had a name, such as those of `memfd_create`."""
    import psutil

    supervisor = psutil.Process(os.getppid())  # to which processes fall that outlive what started them

    held: dict[tuple[int, int], int] = {}
    for process in supervisor.children(recursive=True):
        with contextlib.suppress(OSError), os.scandir(f"/proc/{process.pid}/fd") as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    about = entry.stat()
                    if stat.S_ISREG(about.st_mode) and not about.st_nlink:
                        held[about.st_dev, about.st_ino] = about.st_blocks * 512
    return sum(held.values())


if __name__ == "__main__":
    sys.exit(main())
