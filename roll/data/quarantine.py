"""Rows that can't be used: counted, listed in a file, and too many of them end the run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import IO, Any

from roll.utils.rows import BadRowError, DataError

logger = logging.getLogger(__name__)

BAD_ROWS = {"train": "bad_rows.jsonl", "val": "bad_rows_validation.jsonl"}
"""Name of the list of bad rows, in the folder of the logs."""


class Quarantine:
    """Takes bad rows out of the data, up to a limit.

    Args:
        limit: how many may be bad: a count, or below 1 a share of all rows. 0: the first one raises.
        path: the list of bad rows; None: no list.
    """

    def __init__(self, limit: float = 0, path: Path | None = None) -> None:
        self._limit, self._path = limit, path
        if path is not None:
            path.unlink(missing_ok=True)  # of an earlier run
        self._file: IO[Any] | None = None
        self._first = ""
        self.rows = 0
        """Rows seen, bad ones included."""
        self.bad = 0
        self.duplicates = 0
        """Rows left out because an earlier one has the same prompt."""

    @property
    def lenient(self) -> bool:
        """Return whether any row may be bad."""
        return self._limit > 0

    def add(self, where: str, reason: str) -> None:
        """Take a row out; raises `BadRowError` for the first where none may be bad, `DataError` for one too many."""
        if not self._limit:
            raise BadRowError(f"{where}: {reason}")
        self.bad += 1
        self._first = self._first or f"{where}: {reason}"
        self._write(where, reason)
        if self._limit >= 1 and self.bad > self._limit:
            raise self._too_many()

    def finish(self) -> None:
        """Raise `DataError` if the share of bad rows is too high, once all rows were read; log what was left out."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self.bad > (self._limit if self._limit >= 1 else self._limit * self.rows):
            raise self._too_many()
        if self.bad:
            logger.warning("%d of %d rows are bad and left out%s", self.bad, self.rows, self._listed())
        if self.duplicates:
            logger.info("%d of %d rows repeat a prompt and are left out", self.duplicates, self.rows)

    def metrics(self) -> dict[str, float]:
        """Return the figures for the tracker."""
        return {"data/rows_bad": float(self.bad), "data/rows_duplicate": float(self.duplicates)}

    def _listed(self) -> str:
        return f"; the first is {self._first}" + (f"; all are listed in {self._path}" if self._path else "")

    def _too_many(self) -> DataError:
        if self._file is not None:
            self._file.close()
            self._file = None
        allowed = f"{self._limit:g}" if self._limit >= 1 else f"{self._limit:.3%} of the rows"
        return DataError(
            f"{self.bad} of {self.rows} rows are bad, and max_bad_rows allows {allowed}{self._listed()}. Mend the "
            "rows, or raise max_bad_rows"
        )

    def _write(self, where: str, reason: str) -> None:
        if self._path is None:
            return
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w", encoding="utf-8")
        file, _, line = where.removesuffix("]").replace("[row ", ":").rpartition(":")
        row = {"file": file or where, "line": int(line) if line.isdigit() else None, "reason": reason}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
