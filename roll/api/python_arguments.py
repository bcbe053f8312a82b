"""What Python gives to a run, functions, classes and rows, as files that a configuration can name.

The processes that score and play are others than the caller's, and a run may be resumed later, so that a function
travels as a file: `<output_dir>/given/<name>-<hash>.py` with its code as a pickle beside it. A pickle is code: whoever
can write to a run's folder can have its resumption run theirs.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = "given"
_LOADER = '''\
"""Written by roll.train: {what}, as it was in {module}. The pickle beside this file holds its code."""

from pathlib import Path

import cloudpickle

{name} = cloudpickle.loads(Path(__file__).with_suffix(".pkl").read_bytes())
'''


def as_path(argument: Any, folder: Path, *, key: str) -> str:
    """Return what a configuration writes for a function or class: a text as it is, else the path of files written.

    Raises `ValueError` for something that can't be carried to another process.
    """
    if isinstance(argument, str):
        return argument
    if not callable(argument):
        raise ValueError(f"{key}: got {argument!r}, expected a function, a class, or its path as text")
    name = _identifier(getattr(argument, "__name__", type(argument).__name__))
    code = _pickled(argument, key)
    # Named by their contents: a second run in the folder changes nothing that the first one reads.
    stem = folder / FOLDER / f"{name}-{hashlib.blake2b(code, digest_size=6).hexdigest()}"
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".pkl").write_bytes(code)
    what = "a class" if inspect.isclass(argument) else "a function"
    module = getattr(argument, "__module__", None) or "__main__"
    text = _LOADER.format(what=what, module=module, name=name)
    stem.with_suffix(".py").write_text(text, encoding="utf-8")
    return f"{stem.with_suffix('.py')}:{name}"


def as_file(rows: Iterable[Mapping[str, Any]], folder: Path, *, key: str) -> str:
    """Return the path of a jsonl file with these rows; raise `ValueError` for what isn't rows."""
    if isinstance(rows, (str, Path)):
        return str(rows)
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        raise ValueError(f"{key}: got {type(rows).__name__}, expected a list of dictionaries, or a file's path")
    text = "".join(f"{line}\n" for line in _lines(rows, key))
    if not text:
        raise ValueError(f"{key}: there are no rows")
    file = folder / FOLDER / f"{key}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return str(file)


_ROWS_FILE = re.compile(r"(?:[^\s'\"]*/)?(data|validation_data)-[0-9a-f]{12}(?:\.jsonl)?(?:\[row (\d+)\]|:(\d+))?")


def rows_in_words(text: str) -> str:
    """Return a message in which rows that the caller gave are called `data[3]`, not by the file that holds them."""

    def words(match: re.Match[str]) -> str:
        number = match[2] or match[3]
        return match[1] if number is None else f"{match[1]}[{int(number) - 1}]"

    return _ROWS_FILE.sub(words, text)


@contextlib.contextmanager
def rows_named() -> Iterator[None]:
    """Have errors speak of rows as the caller gave them."""
    try:
        yield
    except ValueError as error:
        error.args = tuple(rows_in_words(each) if isinstance(each, str) else each for each in error.args)
        raise


def first_row(file: str) -> Mapping[str, Any]:
    """Return the first row of a data file; empty where there is none, which others report."""
    from roll.utils.readers import DataError, read_rows, resolve_sources

    try:
        return next((row.values for source in resolve_sources(file) for row in read_rows(source)), {})
    except DataError:
        return {}


def _lines(rows: Iterable[Any], key: str) -> Iterator[str]:
    for number, row in enumerate(rows):
        row = {"prompt": row} if isinstance(row, str) else row
        if not isinstance(row, Mapping):
            raise ValueError(
                f"{key}[{number}]: got {type(row).__name__}, expected a dictionary, e.g. prompt and answer"
            )
        try:
            yield json.dumps(dict(row), ensure_ascii=False, default=_plain)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{key}[{number}] can't be written as JSON: {error}") from None


def _plain(value: Any) -> Any:
    """Return numbers and arrays of numpy as JSON has them."""
    for name in ("tolist", "item"):
        if hasattr(value, name):
            return getattr(value, name)()
    raise TypeError(f"{type(value).__name__} isn't JSON")


def _pickled(function: Callable[..., Any], key: str) -> bytes:
    import cloudpickle

    module = sys.modules.get(getattr(function, "__module__", None) or "")
    by_value = module is not None and module.__name__ != "__main__" and _is_own(module)
    if by_value:  # its module may not be found from the process that calls it, or when the run is resumed
        cloudpickle.register_pickle_by_value(module)
    try:
        code: bytes = cloudpickle.dumps(function)
    except Exception as error:
        raise ValueError(
            f"{key}: {getattr(function, '__qualname__', function)!r} can't be carried to another process: "
            f"{type(error).__name__}: {error}. Make such things inside the function, or put it into a file and give "
            "path/to/file.py:name"
        ) from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return code


def _is_own(module: ModuleType) -> bool:
    """Return whether a module is the user's own: neither of this package, nor installed."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.split(".")[0] in ("roll", "builtins"):
        return False
    installed = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")]
    return not any(Path(file).resolve().is_relative_to(Path(folder).resolve()) for folder in installed)


def _identifier(name: str) -> str:
    return name if name.isidentifier() else "given"
