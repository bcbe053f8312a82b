"""What a contained program may read: the interpreter, its standard library, the system's shared libraries."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roll.isolation.sandbox import confine
from roll.isolation.sandbox.base import SandboxUnavailable

_LEFT_OUT = {"site-packages", "dist-packages", "test", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
_MULTIARCH = f"{os.uname().machine}-linux-gnu"
_SYSTEM = (
    f"/lib/{_MULTIARCH}", f"/usr/lib/{_MULTIARCH}", "/lib64", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime",
    "/usr/share/zoneinfo",
)  # fmt: skip
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


@dataclass(frozen=True)
class Interpreter:
    """The Python that programs run on."""

    executable: str
    import_path: tuple[str, ...]
    """`sys.path` of programs."""
    rights: dict[str, int]
    """Landlock rights by path, for programs."""
    coarse: tuple[str, ...]
    """The folders and files that hold all these, for the warm parent."""
    skipped: tuple[str, ...]
    """Paths that were asked for and that this user can't read."""


def interpreter(import_paths: Sequence[str] = ()) -> Interpreter:
    """Find this Python's files; `import_paths` are further folders that programs may import from.

    Raises:
        SandboxUnavailable: the interpreter itself can't be read.
    """
    executable = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
    names = {"installed_base": sys.base_prefix, "base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    names["installed_platbase"] = sys.base_exec_prefix
    library = [os.path.realpath(sysconfig.get_path(name, vars=names)) for name in ("stdlib", "platstdlib")]
    library = list(dict.fromkeys(library))
    dynamic = [str(Path(folder, "lib-dynload")) for folder in library if Path(folder, "lib-dynload").is_dir()]
    rights = {executable: confine.RUN}
    for folder in library:
        rights[folder] = confine.READ_DIR
        try:
            entries = sorted(os.listdir(folder))
        except OSError as error:
            raise SandboxUnavailable(
                f"the interpreter's own library {folder} can't be read: {error}; use a Python that this user can read"
            ) from error
        packages = (entry for entry in entries if entry not in _LEFT_OUT and not entry.startswith("config-"))
        rights.update((str(Path(folder, entry)), confine.READ) for entry in packages)
    shared = Path(sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("INSTSONAME") or "-")
    coarse = [executable, *library]
    if shared.is_file():
        rights[str(shared)] = confine.RUN
        coarse.append(str(shared))
    system = dict.fromkeys(_SYSTEM, confine.RUN)
    devices = dict.fromkeys(_DEVICES, confine.DEVICE)
    extra = {os.path.realpath(path): confine.READ for path in import_paths}
    wanted = {**rights, **system, **extra}
    skipped = tuple(path for path in wanted if not os.access(path, os.R_OK) and path not in system)
    if executable in skipped or set(library) & set(skipped):
        raise SandboxUnavailable(f"the interpreter {executable} can't be read by this user")
    readable = {path: right for path, right in wanted.items() if os.access(path, os.R_OK)}
    coarse += [path for path in (*system, *extra) if path in readable]
    return Interpreter(
        executable=executable,
        import_path=(*library, *dynamic, *(path for path in extra if path in readable)),
        rights={**readable, **{path: right for path, right in devices.items() if os.path.exists(path)}},
        coarse=tuple(coarse),
        skipped=skipped,
    )
