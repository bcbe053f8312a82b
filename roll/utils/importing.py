"""Objects of the user's own, by path: `package.module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def load_object(path: str, *, key: str) -> Any:
    """Return the object that `path` names.

    Args:
        path: `package.module:name` or `path/to/file.py:name`.
        key: the configuration key it came from, for error messages.

    Raises:
        ValueError: no such file, module or name, or the module fails to import.
    """
    source, _, name = path.rpartition(":")
    if not source or not name:
        raise ValueError(f"{key}: {path!r} is not a path; expected package.module:name or path/to/file.py:name")
    try:
        module = _from_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except Exception as error:
        raise ValueError(f"{key}: importing {source!r} failed: {type(error).__name__}: {error}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        known = [n for n in vars(module) if not n.startswith("_")]
        raise ValueError(f"{key}: {source!r} defines no {name!r}; it has {', '.join(sorted(known)[:20])}") from None


def _from_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}")
    # One module per file, found again by pickle and by a second lookup.
    name = f"roll_user_{hashlib.blake2b(str(file.resolve()).encode(), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
