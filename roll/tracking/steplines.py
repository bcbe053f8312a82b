"""A file of JSON lines, each with a `step`, that a kill and a resume leave as if there had been no kill."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ESCAPED = "backslashreplace"
"""A lone surrogate, which an error message may hold, becomes the escape that JSON has for it."""


def _plain(value: Any) -> Any:
    """Return non-finite numbers as words: JSON has no NaN, and `null` would lose which one it was."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, in order. A last line torn by a kill is left out.

    Raises:
        ValueError: when another line isn't a JSON object with an integer `step`; names file and line.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    lines.pop()  # what follows the last newline: nothing, or a line that was never finished
    return [_parse(path, number, line) for number, line in enumerate(lines, start=1)]


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{number}: not JSON ({error.msg}); delete that line") from error
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError(f"{path}:{number}: expected an object with an integer 'step', got {line[:80]!r}")
    return record


class StepLines:
    """Appends one record a line and flushes it.

    With `resume_step` set, records of later steps are removed first. Without, a file that is already
    there belongs to an earlier run: it is kept under the next free name `<stem>.<n><suffix>`.
    """

    def __init__(self, path: Path, resume_step: int | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if resume_step is None:
                _set_aside(path)
            else:
                _truncate(path, resume_step)
        self._file = path.open("a", encoding="utf-8", errors=_ESCAPED)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record; on return it outlives a kill of this process."""
        assert isinstance(record.get("step"), int), f"a record needs an integer 'step', got {record}"
        self._file.write(json.dumps(_plain(record), ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _set_aside(path: Path) -> None:
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)


def _truncate(path: Path, last_step: int) -> None:
    records = [record for record in read_steps(path) if record["step"] <= last_step]
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8", errors=_ESCAPED) as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
