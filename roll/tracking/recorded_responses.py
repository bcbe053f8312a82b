"""`roll.rollouts(RUN)`: the responses that a run has recorded, for Python. Needs pyarrow alone, not torch.

found = roll.rollouts("output/quickstart")
found.steps                                    # [1, 2, ...]
found.table(columns=["step", "reward"])        # a pyarrow table of all steps; .to_pandas() makes a data frame of it
found.rows(step=5)                             # dictionaries, one a row
found.row(5, "chain_sum:7#3")                  # one episode's
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.tracking.live import RUN_FILE
from roll.tracking.rollouts import FILE_NAMES, KINDS, METADATA_KEY, Kind, columns, file_of

if TYPE_CHECKING:
    import pyarrow


def rollouts(run: str | Path) -> RecordedRollouts:
    """Return what a run has recorded.

    Args:
        run: its folder (`output_dir`), or that of its rollouts (`rollout_dump_dir`).

    Raises:
        ValueError: nothing is recorded there; says how to have a run record.
    """
    folder = Path(run)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}")
    recorded = rollouts_folder(folder)
    if recorded is None:
        raise ValueError(f"{folder} has no rollouts; have the run record them: rollout_dump_dir=<output_dir>/rollouts")
    return RecordedRollouts(recorded)


def logs_folder(run: Path) -> Path:
    """Return the folder of a run's logs: `logs` in it, or the folder itself."""
    return run / "logs" if (run / "logs").is_dir() else run


def rollouts_folder(run: Path) -> Path | None:
    """Return where the rollouts of a run are, None where there are none: what its run.json says, `rollouts` in it, or
    the folder itself."""
    logs = logs_folder(run)
    candidates = [run, run / "rollouts"]
    try:
        stated = json.loads((logs / RUN_FILE).read_text(encoding="utf-8")).get("rollouts")
        candidates = [Path(os.path.normpath(logs / stated)), *candidates] if isinstance(stated, str) else candidates
    except (OSError, ValueError, AttributeError):
        pass
    return next(
        (
            candidate
            for candidate in candidates
            if candidate.is_dir() and any(steps_of(candidate, kind) for kind in KINDS)
        ),
        None,
    )


def steps_of(folder: Path, kind: Kind = "train") -> list[int]:
    """Return the steps that have a file of this kind, ascending."""
    prefix = FILE_NAMES[kind] + "-"
    names = (path.name[len(prefix) : -len(".parquet")] for path in folder.glob(f"{prefix}*.parquet"))
    return sorted(int(name) for name in names if name.isdecimal())


class RecordedRollouts:
    """Recorded rows by step. Files are read when they are asked for; a run under way adds to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """Where the files are."""

    def __repr__(self) -> str:
        return f"RecordedRollouts({str(self.folder)!r}, {len(self.steps)} steps)"

    @property
    def steps(self) -> list[int]:
        """Training steps that are recorded, ascending."""
        return steps_of(self.folder)

    @property
    def validations(self) -> list[int]:
        """Steps after which a validation is recorded, ascending."""
        return steps_of(self.folder, "validation")

    def table(
        self, step: int | Sequence[int] | None = None, *, columns: Sequence[str] | None = None, kind: Kind = "train"
    ) -> pyarrow.Table:
        """Return rows as a pyarrow table, in the order of steps and of the batch.

        Args:
            step: one, several, or None for all.
            columns: which to read; None: all. docs/view.md has the list.
            kind: `train`, `dropped` or `validation`.

        Raises:
            ValueError: a step isn't recorded, or a column doesn't exist.
        """
        import pyarrow as pa

        tables = [self._read(number, columns, kind) for number in self._steps(step, kind)]
        return pa.concat_tables(tables) if tables else self._empty(columns)

    def rows(self, step: int | Sequence[int] | None = None, *, kind: Kind = "train") -> Iterator[dict[str, Any]]:
        """Yield rows as dictionaries, a step in memory at a time; maps are dictionaries, too."""
        for number in self._steps(step, kind):
            yield from self._read(number, None, kind).to_pylist(maps_as_pydicts="strict")

    def row(self, step: int, row_id: str, *, kind: Kind = "train") -> dict[str, Any]:
        """Return one row as a dictionary. Raises `ValueError` if that step has no such row."""
        import pyarrow.parquet as pq

        (number,) = self._steps(step, kind)
        with pq.ParquetFile(file_of(self.folder, number, kind)) as file:
            for group in range(file.num_row_groups):
                names = file.read_row_group(group, columns=["row_id"])["row_id"].to_pylist()
                if row_id in names:
                    table = file.read_row_group(group).slice(names.index(row_id), 1)
                    row: dict[str, Any] = table.to_pylist(maps_as_pydicts="strict")[0]
                    return row
        raise ValueError(f"step {step} has no row {row_id!r}")

    def version(self, step: int, *, kind: Kind = "train") -> int:
        """Return the version of a file's schema; 1 where the file says none."""
        return int(self._about(step, kind).get("version", 1))

    def notes(self, step: int, *, kind: Kind = "train") -> dict[str, str]:
        """Return why token columns of a step are empty, by their names."""
        notes: dict[str, str] = self._about(step, kind).get("notes", {})
        return notes

    def _about(self, step: int, kind: Kind) -> dict[str, Any]:
        """Return what a file says of itself; empty in one of version 1."""
        import pyarrow.parquet as pq

        (number,) = self._steps(step, kind)
        about = (pq.read_schema(file_of(self.folder, number, kind)).metadata or {}).get(METADATA_KEY)
        metadata: dict[str, Any] = json.loads(about) if about else {}
        return metadata

    def _steps(self, step: int | Sequence[int] | None, kind: Kind) -> list[int]:
        there = steps_of(self.folder, kind)
        wanted = there if step is None else [step] if isinstance(step, int) else list(step)
        missing = [number for number in wanted if number not in there]
        if missing:
            listed = ", ".join(map(str, there[:20])) + (", ..." if len(there) > 20 else "")
            raise ValueError(
                f"{self.folder} has no {FILE_NAMES[kind]} of step {missing[0]}; there are {listed or 'none'}"
            )
        return wanted

    def _read(self, step: int, names: Sequence[str] | None, kind: Kind) -> pyarrow.Table:
        import pyarrow as pa
        import pyarrow.parquet as pq

        fields = columns()
        if names is not None and (unknown := [name for name in names if name not in fields]):
            raise ValueError(f"rollouts have no column {unknown[0]!r}; they have {', '.join(fields)}")
        path = file_of(self.folder, step, kind)
        there = set(pq.read_schema(path).names)
        table = pq.read_table(path, columns=None if names is None else [name for name in names if name in there])
        for name in fields if names is None else names:  # a file of an earlier version has fewer
            if name not in there:
                table = table.append_column(name, pa.nulls(table.num_rows, fields[name]))
        return table.select(list(fields if names is None else names))

    def _empty(self, names: Sequence[str] | None) -> pyarrow.Table:
        import pyarrow as pa

        fields = columns()
        return pa.schema([(name, fields[name]) for name in names or fields]).empty_table()
