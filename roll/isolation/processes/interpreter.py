"""How a child runs under an interpreter of its own, whose packages differ from those of its parent.

The parent's `PYTHONPATH` would bring the parent's packages along, built for another Python perhaps. So such a child
gets this package by itself, and of the parent's path what isn't its installation: the user's own folders.
"""

from __future__ import annotations

import shutil
import site
import sysconfig
from collections.abc import Sequence
from pathlib import Path

OLDEST = (3, 11)
"""The oldest Python that environments run under."""

_START = """
import sys
if sys.version_info < {oldest}:
    sys.exit("Python %d.%d is too old: expected at least {wanted}" % sys.version_info[:2])
from importlib import util
spec = util.spec_from_file_location("roll", {file!r}, submodule_search_locations=[{folder!r}])
roll = sys.modules["roll"] = util.module_from_spec(spec)
spec.loader.exec_module(roll)
"""


def start_code() -> str:
    """Python that imports this very package, and nothing that stands beside it."""
    folder = Path(__file__).resolve().parents[2]
    wanted = ".".join(map(str, OLDEST))
    return _START.format(oldest=OLDEST, wanted=wanted, file=str(folder / "__init__.py"), folder=str(folder))


def own_entries(path: Sequence[str]) -> list[str]:
    """Return the entries of a `sys.path` outside an interpreter's own library and its installed packages."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    homes = [Path(path_) for path_ in paths if path_]
    return [
        entry
        for entry in path
        if not entry.endswith(".zip") and not any(Path(entry).is_relative_to(home) for home in homes)
    ]


def resolve_interpreter(python: str) -> str | None:
    """Return the absolute path of an interpreter, given as a path or as a name on the PATH; None if there is none.

    A link isn't followed: that of a virtual environment is what leads to its packages.
    """
    path = shutil.which(str(Path(python).expanduser()))
    return None if path is None else str(Path(path).absolute())
