"""Confinement of the calling process, for good: Landlock, seccomp, capabilities, resource limits.

It runs in the warm parent and in the programs that it forks, so it imports the standard library alone. Everything goes
by system calls through ctypes. A failure raises `OSError`: nobody goes on without what was asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
from collections.abc import Mapping, Sequence

from roll.isolation.sandbox import syscalls

_LIBC = ctypes.CDLL(None, use_errno=True)

_LANDLOCK = (444, 445, 446)  # create_ruleset, add_rule, restrict_self, on every architecture
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_IN_FOLDER = 0x10 | 0x20 | 0x80 | 0x100 | 0x1000 | 0x2000 | 0x4000
"""Remove folders and files, make folders, files and symbolic links, rename, truncate."""
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | 0x4000 | 0x8000
READ, READ_DIR, RUN = _READ_FILE | _READ_DIR, _READ_DIR, _READ_FILE | _READ_DIR | _EXECUTE
WRITE = READ | _WRITE_FILE | _IN_FOLDER
DEVICE = _READ_FILE | _WRITE_FILE
REMOVE = 0x10 | 0x20
"""Remove what is in a folder, and neither see nor read it."""

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME, _PR_GET_NAME, _PR_CAPBSET_DROP = 1, 4, 15, 16, 24
_PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 22, 36, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_NAMESPACES = 0x7E020080
_FAMILY_FLAGS = 0x00008000 | 0x00002000 | 0x00800000  # CLONE_PARENT, CLONE_PTRACE, CLONE_UNTRACED
_IOCTLS = (0x5401, 0x541B, 0x5451, 0x5450, 0x5421, 0x5413)  # TCGETS, FIONREAD, FIOCLEX, FIONCLEX, FIONBIO, TIOCGWINSZ


def _call(number: int, *arguments: object) -> int:
    result = int(_LIBC.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"system call {number}: {os.strerror(code)}")
    return result


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl {option}: {os.strerror(code)}")


def landlock_abi() -> int:
    """Return the version of Landlock that the kernel has; 0 without."""
    try:
        return _call(_LANDLOCK[0], None, ctypes.c_size_t(0), ctypes.c_uint(1))
    except OSError:
        return 0


def landlock_rules(paths: Mapping[str, int]) -> int:
    """Return the descriptor of a rule set: these paths with these rights and nothing else, no TCP, no signals out."""
    rules, rights_known = _landlock_ruleset(reads=True)
    for path, rights in paths.items():
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # a link out of what bwrap shows; nobody can read it then
        try:
            if not os.path.isdir(path):
                rights &= _ON_FILES  # the others are refused for what isn't a folder
            _landlock_add(rules, descriptor, rights & rights_known)
        finally:
            os.close(descriptor)
    return rules


def landlock_own_rules(folder: int, null: int) -> int:
    """Return the descriptor of a rule set for one program, from those of its folder and of /dev/null (-1: none).

    It may write there and nowhere else; nothing is said about reading.
    """
    rules, rights_known = _landlock_ruleset(reads=False)
    _landlock_add(rules, folder, WRITE & rights_known)
    if null >= 0:
        _landlock_add(rules, null, DEVICE & rights_known)
    return rules


def _landlock_ruleset(*, reads: bool) -> tuple[int, int]:
    """Return a new, empty rule set and the rights that it refuses."""
    abi = landlock_abi()
    files = 0x1FFF | (0x2000 if abi >= 2 else 0) | (0x4000 if abi >= 3 else 0) | (0x8000 if abi >= 5 else 0)
    if not reads:
        files &= ~(_READ_FILE | _READ_DIR | _EXECUTE)
    fields = [files] + ([3] if abi >= 4 else []) + ([3] if abi >= 6 else [])
    data = struct.pack(f"{len(fields)}Q", *fields)
    return _call(_LANDLOCK[0], data, ctypes.c_size_t(len(data)), ctypes.c_uint(0)), files


def _landlock_add(rules: int, descriptor: int, rights: int) -> None:
    rule = struct.pack("=Qi", rights, descriptor)
    _call(_LANDLOCK[1], ctypes.c_int(rules), ctypes.c_int(1), rule, ctypes.c_uint(0))


def landlock_enter(rules: int) -> None:
    """Restrict this process and all that it starts to a rule set."""
    _call(_LANDLOCK[2], ctypes.c_int(rules), ctypes.c_uint(0))


def _statement(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


def _load(offset: int) -> bytes:
    return _statement(0x20, offset)


def _equals(value: int, yes: int, no: int) -> bytes:
    return _statement(0x15, value, yes, no)


def _argument(index: int) -> bytes:
    return _load(16 + 8 * index)  # the lower half; both architectures are little-endian


def _one_of(values: Sequence[int]) -> list[bytes]:
    """Allow if the loaded word is one of `values`, else "not permitted"."""
    tests = [_equals(value, len(values) - i, 0) for i, value in enumerate(values)]
    return [*tests, _statement(6, _ERRNO | _EPERM), _statement(6, _ALLOW)]


def seccomp_program() -> bytes:
    """Return the warm parent's filter: the calls of `syscalls.py`, some with certain arguments only; all others fail.

    The calls with which a forked process confines itself pass, too: `seccomp_rest` refuses those. So the long filter is
    checked and compiled by the kernel once, and not for every program.
    """
    column, architecture = _machine()
    numbers = syscalls.checked(column)
    options = (_PR_SET_NAME, _PR_GET_NAME, _PR_SET_PDEATHSIG, _PR_SET_SECCOMP)
    special = {
        "clone3": [_statement(6, _ERRNO | _ENOSYS)],  # its flags can't be seen; libraries fall back to clone
        "clone": [
            _argument(0),
            _statement(0x45, _NAMESPACES | _FAMILY_FLAGS, 0, 1),
            _statement(6, _ERRNO | _EPERM),
            _statement(6, _ALLOW),
        ],
        "prlimit64": [_argument(0), *_one_of((0,))],
        "ioctl": [_argument(1), *_one_of(_IOCTLS)],
        "prctl": [_argument(0), *_one_of(options)],
        # AF_UNIX and SOCK_STREAM: a pair has no name, and a stream can't be sent elsewhere.
        "socketpair": [_argument(0), _equals(1, 1, 0), _statement(6, _ERRNO | _EPERM), _argument(1),
                       _statement(0x54, 0xF), *_one_of((1,))],
    }  # fmt: skip
    code = [_load(4), _equals(architecture, 1, 0), _statement(6, _KILL), _load(0)]
    for name, number in numbers.items():
        body = special[name]
        code += [_equals(number, 0, len(body)), *body]
    for number in (*syscalls.allowed(column).values(), *syscalls.confining(column).values()):
        code += [_equals(number, 0, 1), _statement(6, _ALLOW)]
    for number in syscalls.pretended(column).values():
        code += [_equals(number, 0, 1), _statement(6, _ERRNO)]
    return b"".join([*code, _statement(6, _ERRNO | _EPERM)])


def seccomp_rest() -> bytes:
    """Return the filter that a program gets beside `seccomp_program`: it refuses the calls that confine."""
    column, architecture = _machine()
    names = _one_of((_PR_SET_NAME, _PR_GET_NAME))
    code = [_load(4), _equals(architecture, 1, 0), _statement(6, _KILL), _load(0)]
    code += [_equals(syscalls.checked(column)["prctl"], 0, 1 + len(names)), _argument(0), *names]
    for number in syscalls.confining(column).values():
        code += [_equals(number, 0, 1), _statement(6, _ERRNO | _EPERM)]
    return b"".join([*code, _statement(6, _ALLOW)])


def _machine() -> tuple[int, int]:
    machine = os.uname().machine
    if machine not in syscalls.MACHINES:
        raise OSError(_ENOSYS, f"no list of system calls for a machine of kind {machine}")
    return syscalls.MACHINES[machine]


def seccomp_enter(program: bytes) -> None:
    """Filter the system calls of this process and of all that it starts."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    if _LIBC.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(2), header, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"seccomp: {os.strerror(code)}")


def drop_privileges() -> None:
    """Give up every capability, root's too, and the way back to them."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    with contextlib.suppress(OSError):  # sandlock forbids it; there Landlock keeps programs from tracing their parent
        _prctl(_PR_SET_DUMPABLE, 0)
    for capability in range(64):
        if _LIBC.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) != 0:
            break  # beyond the last one, or there are none to drop
    number = {"x86_64": 126, "aarch64": 91}[os.uname().machine]
    _call(number, struct.pack("=Ii", 0x20080522, 0), bytes(24))


def adopt_orphans() -> None:
    """Make this process the parent of what its children leave behind."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends; at once if it has."""
    _prctl(_PR_SET_PDEATHSIG, 9)
    if os.getppid() != parent:
        os._exit(1)


def limit_resources(*, cpu_s: float, memory: int, open_files: int, file_mb: int, processes: int | None) -> None:
    """Set the limits that the kernel counts per process, and per user where `processes` is given."""
    seconds = max(1, int(cpu_s + 0.999))
    limits = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_NOFILE: (open_files, open_files),
        resource.RLIMIT_FSIZE: (file_mb << 20, file_mb << 20),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
    }
    if processes is not None:
        limits[resource.RLIMIT_NPROC] = (processes, processes)
    for what, (soft, hard) in limits.items():
        most = resource.getrlimit(what)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)  # never more than this process has
        resource.setrlimit(what, (soft, hard))
