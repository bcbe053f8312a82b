"""Memory, disks, limits and the clock."""

from __future__ import annotations

import locale
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from roll.workbench.doctor.findings import Finding

GIB = 1 << 30
SHARED_MEMORY = Path("/dev/shm")
_LEAST_MEMORY, _LEAST_SHARED, _LEAST_DISK = 4 * GIB, 1 * GIB, 10 * GIB
_LEAST_FILES, _LEAST_PROCESSES = 4096, 2048
_SLOWEST_CLOCK_S = 5.0


def memory() -> Iterator[Finding]:
    """Check cores, memory, and what a container allows of it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota()
    if quota is not None and quota < cores:
        message = (
            f"{cores} are seen, but this container may use {quota:.1f}: threads for the others only get in the way"
        )
        yield Finding("warning", "cores", message, f"export OMP_NUM_THREADS={max(1, int(quota))}")
    else:
        yield Finding("ok", "cores", str(cores))
    total = psutil.virtual_memory()
    limit = _memory_limit()
    most = min(total.total, limit or total.total)
    free = min(total.available, most)
    message = f"{free / GIB:.1f} of {most / GIB:.1f} GiB free" + (", the limit of this container" if limit else "")
    if free < _LEAST_MEMORY:
        fix = "end other programs, or raise the container's limit; the quickstart alone needs 5 GB"
        yield Finding("warning", "memory", message, fix)
    else:
        yield Finding("ok", "memory", message)


def _control_group(name: str, old: str) -> str:
    for file in (Path("/sys/fs/cgroup") / name, Path("/sys/fs/cgroup") / old):
        try:
            return file.read_text().strip()
        except OSError:
            continue
    return ""


def _memory_limit() -> int | None:
    text = _control_group("memory.max", "memory/memory.limit_in_bytes")
    limit = int(text) if text.isdigit() else None
    return limit if limit is not None and limit < psutil.virtual_memory().total else None


def _cpu_quota() -> float | None:
    quota, _, period = _control_group("cpu.max", "none").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def disks(output: Path) -> Iterator[Finding]:
    """Check space, and the right to write, where runs write: output, temporary folder, models, shared memory."""
    yield from _folder("output", output, _LEAST_DISK, "write elsewhere: output_dir")
    yield from _folder("temporary folder", Path(tempfile.gettempdir()), GIB, "export TMPDIR=a folder with room")
    cache = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub"
    yield from _folder("models", Path(cache).expanduser(), _LEAST_DISK, "export HF_HOME=a folder with room")
    if not SHARED_MEMORY.is_dir():
        message = "there is no /dev/shm: weights go to engines through files, and Ray through its temporary folder"
        yield Finding("warning", "shared memory", message, "mount it: mount -t tmpfs tmpfs /dev/shm")
    else:
        fix = "docker run --shm-size=16g, or mount -o remount,size=16G /dev/shm"
        yield from _folder("shared memory", SHARED_MEMORY, _LEAST_SHARED, fix)
        yield from _left_behind()


def _folder(subject: str, folder: Path, least: int, fix: str) -> Iterator[Finding]:
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not existing.is_dir():
        yield Finding("problem", subject, f"{existing} is a file where a folder is needed", f"remove it, or {fix}")
        return
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x" * 65536)
            file.flush()
    except OSError as error:
        yield Finding("problem", subject, f"{existing} can't be written: {error.strerror or error}", fix)
        return
    status = os.statvfs(existing)
    free = status.f_bavail * status.f_frsize
    message = f"{free / GIB:.1f} GiB free in {existing}"
    if status.f_files and status.f_favail < 1000:
        yield Finding("problem", subject, f"{status.f_favail} files can still be made in {existing}", fix)
    elif free < least:
        yield Finding("problem" if free < least / 10 else "warning", subject, message, fix)
    else:
        yield Finding("ok", subject, message)


def _left_behind() -> Iterator[Finding]:
    """Check for segments that nobody has open: what killed programs left."""
    old = [each for each in SHARED_MEMORY.glob("*") if _is_mine(each) and time.time() - each.stat().st_mtime > 3600]
    size = sum(each.stat().st_size for each in old)
    if size > GIB:
        message = f"{len(old)} files of yours, untouched for an hour, hold {size / GIB:.1f} GiB"
        yield Finding("warning", "shared memory", message, "if no run of yours is active: rm them in /dev/shm")


def _is_mine(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_uid == os.getuid()
    except OSError:
        return False


def limits() -> Iterator[Finding]:
    """Open files, processes, compiler, text encoding."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_FILES:
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        message = f"{soft} may be open at once; Ray and data files need {_LEAST_FILES}"
        more = (
            f"ulimit -n {most}"
            if hard == resource.RLIM_INFINITY or hard >= _LEAST_FILES
            else (f"raise the hard limit ({hard}) in /etc/security/limits.conf, or docker run --ulimit nofile=65536")
        )
        yield Finding("problem" if soft < 1024 else "warning", "open files", message, more)
    else:
        yield Finding("ok", "open files", "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft}")
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_PROCESSES:
        message = f"{soft} processes and threads may run; Ray alone starts hundreds of threads"
        yield Finding("warning", "processes", message, "ulimit -u 65536")
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        message = f"there is no {os.environ.get('CXX', 'g++')}: torch_compile and DeepSpeed's kernels can't be built"
        yield Finding("warning", "compiler", message, "apt-get install g++ python3-dev; unset CXX if it names another")
    encoding = locale.getpreferredencoding(False)
    if "utf" not in encoding.lower() or "utf" not in (sys.getfilesystemencoding() or "").lower():
        message = f"text is read and written as {encoding}; data and responses are UTF-8"
        yield Finding("warning", "encoding", message, "export LANG=C.UTF-8, or PYTHONUTF8=1")


def clock(output: Path) -> Iterator[Finding]:
    """Check this machine's clock against files that can't be of the future, and against the disk's."""
    import roll

    now = time.time()
    installed = max(Path(roll.__file__ or sys.executable).stat().st_mtime, Path(sys.prefix).stat().st_mtime)
    if installed > now + 60:
        message = f"{time.strftime('%Y-%m-%d %H:%M')} is before the installation of Python's packages"
        yield Finding("problem", "clock", f"{message}: it is wrong", "timedatectl set-ntp true")
        return
    existing = next(each for each in (output.absolute(), *output.absolute().parents) if each.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=existing) as file:
            difference = os.stat(file.name).st_mtime - time.time()
    except OSError:
        return  # `disks` has said so
    if abs(difference) > _SLOWEST_CLOCK_S:
        message = f"the disk of {existing} has another time, by {difference:+.0f} s: which file is newer can't be told"
        yield Finding("warning", "clock", message, "synchronise both machines: timedatectl set-ntp true")
    else:
        yield Finding("ok", "clock", time.strftime("%Y-%m-%d %H:%M:%S %Z"))
