"""The set-ups that attacks run in: this user, an unprivileged one, and a container's restrictions, emulated.

Docker's default filter denies `unshare`, `mount`, `setns`, `clone` with a new user namespace, and `clone3`; a
container's root has fourteen capabilities.
"""

from __future__ import annotations

import ctypes
import os
import struct

from roll.isolation.sandbox import confine

UNPRIVILEGED = 61_234
_CONTAINER_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)
_DENIED = {"x86_64": (272, 165, 166, 308), "aarch64": (97, 40, 39, 268)}  # unshare, mount, umount2, setns
_CLONE = {"x86_64": 56, "aarch64": 220}


def enter(name: str) -> None:
    """Put this process into `plain`, `user`, `container` or `container-user`. Only root can."""
    if name.startswith("container"):
        _deny_namespaces()
        _drop_capabilities()
    if name.endswith("user"):
        os.setgroups([])
        os.setresgid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
        os.setresuid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as a program of that user is: its own /proc is its own
        os.environ["HOME"] = "/tmp"


def _deny_namespaces() -> None:
    machine = os.uname().machine
    refuse, allow = struct.pack("=HBBI", 6, 0, 0, 0x00050001), struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000)
    code = [struct.pack("=HBBI", 0x20, 0, 0, 0)]
    for number in _DENIED[machine]:
        code += [struct.pack("=HBBI", 0x15, 0, 1, number), refuse]
    code += [struct.pack("=HBBI", 0x15, 0, 1, 435), struct.pack("=HBBI", 6, 0, 0, 0x00050000 | 38)]
    code += [struct.pack("=HBBI", 0x15, 0, 3, _CLONE[machine]), struct.pack("=HBBI", 0x20, 0, 0, 16)]
    code += [struct.pack("=HBBI", 0x45, 0, 1, 0x7E020000), refuse, allow]
    confine.seccomp_enter(b"".join(code))


def _drop_capabilities() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    mask = sum(1 << capability for capability in _CONTAINER_CAPABILITIES)
    for capability in range(64):
        if not mask >> capability & 1:
            libc.prctl(24, ctypes.c_ulong(capability), 0, 0, 0)
    number = {"x86_64": 126, "aarch64": 91}[os.uname().machine]
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = struct.pack("=6I", low, low, 0, high, high, 0)
    if libc.syscall(number, struct.pack("=Ii", 0x20080522, 0), data) != 0:
        raise OSError(ctypes.get_errno(), "capset")
