"""Which columns the rows of a domain have, for reward functions that take columns by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.worker_config import DataArgs
from roll.utils.readers import resolve_sources, scan_rows
from roll.utils.rows import DataError, Row, Source, has_column

_MAX_ROWS = 100_000
"""Rows of a file that are looked at for a column which those before don't have."""
_TRUTHS = ("ground_truth", "answer", "response", "reward_model.ground_truth")
_NOT_HANDED_OVER = frozenset({"prompt", "completion", "completion_ids"})
_PROCEDURAL = frozenset({"question", "ground_truth", "reasoning_gym"})


class RewardColumns:
    """The columns of each domain's rows, read when they are asked for."""

    def __init__(self, config: RLVRConfig) -> None:
        self._config = config
        self._sections = [config.actor_train.data_args]
        if config.validation is not None:
            self._sections.append(config.validation.data_args)

    def of(self, domain: str, wanted: Collection[str]) -> frozenset[str] | None:
        """Return the columns that rows of a domain have: all of `wanted`, or every column of many rows of the training
        or validation data that lack one of them. None: rows that can't be read here, or none at all."""
        known: set[str] = set()
        try:
            for section in self._sections:
                columns: set[str] = set()
                for names in self._columns(section, domain):
                    columns |= names
                    if set(wanted) <= columns:
                        break
                if columns and not set(wanted) <= columns:
                    return frozenset(columns)
                known |= columns
        except (DataError, OSError, RecursionError, _UnreadableError):
            return None
        return frozenset(known) or None

    def _columns(self, data: DataArgs, domain: str) -> Iterator[set[str]]:
        if data.dataset is not None:
            raise _UnreadableError
        if any(self._config.domain_of(task.tag) == domain for task in data.procedural):
            yield set(_PROCEDURAL)
        for name in data.file_name:
            if self._config.prepare is not None and not Path(name).expanduser().exists():
                raise _UnreadableError
            for source in resolve_sources(name):
                if source.format == "hub":
                    raise _UnreadableError
                yield from self._of_rows(source, data, domain)

    def _of_rows(self, source: Source, data: DataArgs, domain: str) -> Iterator[set[str]]:
        for row in islice(scan_rows(source), _MAX_ROWS):
            if isinstance(row, Row) and self._domain_of(row, data, source) == domain:
                yield _handed_over(row.values, data)

    def _domain_of(self, row: Row, data: DataArgs, source: Source) -> str | None:
        if len(self._config.rewards) == 1:
            return next(iter(self._config.rewards))
        tag = row.values.get(data.tag or "tag")
        if tag is None and data.tag is None and data.default_tag is None:
            tag = row.values.get("data_source")
        return self._config.domain_of(str(tag or data.default_tag or source.name))


class _UnreadableError(Exception):
    """Rows that only the run itself makes or fetches."""


def _handed_over(values: dict[str, Any] | Any, data: DataArgs) -> set[str]:
    columns = {str(name) for name in values} - _NOT_HANDED_OVER
    truths = (data.ground_truth,) if data.ground_truth else _TRUTHS
    if any(has_column(values, name) for name in truths):
        columns.add("ground_truth")
    return columns
