"""What a process and all that it started use, seen from outside in /proc."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass

_TICKS = os.sysconf("SC_CLK_TCK")
_MAX_ENTRIES = 10_000


@dataclass(frozen=True)
class Usage:
    """A sum over processes."""

    processes: int = 0
    """Processes and threads."""
    memory: int = 0
    """Bytes of anonymous and shared memory; pages that a fork shares count for each."""
    cpu_s: float = 0.0


def descendants(pid: int) -> list[int]:
    """Return the processes that `pid` started, and those that they started."""
    below: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        try:
            threads = os.listdir(f"/proc/{parent}/task")
        except OSError:
            continue
        for thread in threads:
            try:
                with open(f"/proc/{parent}/task/{thread}/children", "rb") as file:
                    children = [int(child) for child in file.read().split()]
            except (OSError, ValueError):
                continue
            below += children
            waiting += children
    return below


def usage_of(pids: list[int]) -> Usage:
    """Return what these processes use; those that are gone count nothing."""
    processes, memory, ticks = 0, 0, 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            with open(f"/proc/{pid}/status", "rb") as file:
                status = file.read()
        except OSError:
            continue
        ticks += sum(int(field) for field in fields[11:15])
        processes += int(fields[17])
        for line in status.splitlines():
            if line.startswith((b"RssAnon:", b"RssShmem:")):
                memory += int(line.split()[1]) << 10
    return Usage(processes, memory, ticks / _TICKS)


def mapped_bytes(pid: int) -> int:
    """Return the address space of a process."""
    with open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def folder_usage(folder: str) -> tuple[int, int]:
    """Return the entries in a folder and the bytes that they take on disk; it stops counting at some thousands."""
    entries, size, waiting = 0, 0, [folder]
    while waiting and entries < _MAX_ENTRIES:
        try:
            with os.scandir(waiting.pop()) as iterator:
                for entry in iterator:
                    entries += 1
                    try:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
                    except OSError:
                        continue
                    if entries >= _MAX_ENTRIES:
                        break
        except OSError:
            continue
    return entries, size


def remove_tree(folder: str) -> None:
    """Remove a folder that someone hostile filled: any depth, any permissions, links are never followed."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)  # mostly there is nothing in it
        return
    try:
        os.chmod(folder, 0o700)
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        count = 0
        while names := os.listdir(top):
            progress = False
            for name in names:
                try:
                    os.unlink(name, dir_fd=top)
                    progress = True
                    continue
                except (IsADirectoryError, PermissionError):
                    pass
                except FileNotFoundError:
                    progress = True
                    continue
                count, moved = _flatten(top, name, count)
                progress = progress or moved
            if not progress:
                break
    finally:
        os.close(top)
    os.rmdir(folder)


def _flatten(top: int, name: str, count: int) -> tuple[int, bool]:
    """Remove a folder's files, move its folders up into `top`, and remove it: depth never matters."""
    try:
        os.chmod(name, 0o700, dir_fd=top)
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    except OSError:
        return count, False
    try:
        for entry in os.listdir(inner):
            try:
                os.unlink(entry, dir_fd=inner)
            except (IsADirectoryError, PermissionError):
                count += 1
                os.chmod(entry, 0o700, dir_fd=inner)
                os.rename(entry, f".{count}.{secrets.token_hex(8)}", src_dir_fd=inner, dst_dir_fd=top)
        os.rmdir(name, dir_fd=top)
    except OSError:
        return count, False
    finally:
        os.close(inner)
    return count, True
