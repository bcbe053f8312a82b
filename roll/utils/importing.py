"""Imports: objects of the user's own by path, `package.module:name` or `path/to/file.py:name`, and large libraries."""

from __future__ import annotations

import contextlib
import difflib
import gc
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

Kind = Literal["function", "class", "object"]

FILE_MODULE = "roll_user_"
"""How the names of modules begin that were imported from a file."""

_KINDS: dict[str, Callable[[Any], bool]] = {"function": inspect.isfunction, "class": inspect.isclass}


class _Imports:
    """There is one process, hence one state."""

    kept = False


def keep_imports() -> None:
    """Have `long_imports` take all objects out of later rounds of the garbage collector: for a process of our own. One
    of the user's may have garbage, which would stay."""
    _Imports.kept = True


@contextlib.contextmanager
def long_imports() -> Iterator[None]:
    """Import inside the block without rounds of the garbage collector, which are a fifth of the time that large
    libraries take: they make a million objects, and all of them stay."""
    if not gc.isenabled():  # by a block around this one, or by the user
        yield
        return
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if _Imports.kept and len(sys.modules) > before:
            gc.freeze()
        gc.enable()


def load_object(path: str, *, key: str = "", kind: Kind = "object") -> Any:
    """Import the object that `path` names; a relative file is looked for in the working directory.

    Raises `ValueError`, which names `key` and `kind`: no such file, module or name, or the module fails to import.
    """
    source, _, name = path.rpartition(":")
    at = f"{key}: " if key else ""
    if not source or not name:
        raise ValueError(f"{at}{path!r} is not a path; write {suggested_path(path)}")
    module = _from_file(Path(source).expanduser(), at) if source.endswith(".py") else _from_name(source, at)
    try:
        return getattr(module, name)
    except AttributeError:
        wanted = _KINDS.get(kind)
        own = {n: value for n, value in vars(module).items() if not n.startswith("_")}
        if wanted is not None:
            own = {n: v for n, v in own.items() if wanted(v) and v.__module__ == module.__name__}
        near = difflib.get_close_matches(name, own, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        has = f"it has {', '.join(sorted(own)[:20])}" if own else "it has none"
        raise ValueError(f"{at}{source} has no {kind} {name!r}; {hint}{has}") from None


def load_module(path: str, *, key: str) -> ModuleType:
    """Import `package.module` or `path/to/file.py`. Raises `ValueError`, which names `key`, if that fails."""
    at = f"{key}: "
    return _from_file(Path(path).expanduser(), at) if path.endswith(".py") else _from_name(path, at)


def suggested_path(text: str) -> str:
    """Return how a path is written; for `package.module.name`, that one."""
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", text) and not text.endswith(".py"):
        return f"{text.rpartition('.')[0]}:{text.rpartition('.')[2]}"
    return "package.module:name or path/to/file.py:name"


def own_files() -> dict[str, str]:
    """Return the user's files that were imported here, by name of module."""
    return {name: str(module.__file__) for name, module in list(sys.modules.items()) if name.startswith(FILE_MODULE)}


class OwnFiles:
    """Finds the modules of `own_files` of another process, for `sys.meta_path`: pickles name the modules only."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Return where to import one of the files from; `None` for other modules."""
        return importlib.util.spec_from_file_location(name, self._files[name]) if name in self._files else None


def _from_name(name: str, at: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ValueError(f"{at}can't import {name!r}: {type(error).__name__}: {error}") from error


def _from_file(file: Path, at: str) -> ModuleType:
    if not file.is_file():
        raise ValueError(f"{at}there is no file {str(file)!r} (looked from {str(Path.cwd())!r})")
    # One module per file, found again by pickle and by a second lookup.
    name = f"{FILE_MODULE}{hashlib.blake2b(str(file.resolve()).encode(), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        raise ValueError(f"{at}{str(file)!r} fails to import: {type(error).__name__}: {error}") from error
    return module
