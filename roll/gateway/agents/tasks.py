"""Tasks of agents from files: an object per line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.configs.schema.agents_config import AgentEnv
from roll.utils.readers import read_rows
from roll.utils.rows import DataError, Source


def read_tasks(tag: str, env: AgentEnv) -> tuple[Mapping[str, Any], ...]:
    """Return the tasks of a tag's file, if it has one. Raises `DataError` naming the key, the file and the line."""
    if env.tasks is None:
        return ()
    file, key = Path(env.tasks).expanduser(), f"custom_envs.{tag}.env_config.tasks"
    if not file.is_file():
        raise DataError(f"{key}: there is no file {str(file)!r} (looked from {str(Path.cwd())!r})")
    rows = []
    for row in read_rows(Source(file.stem, str(file), "jsonl")):
        try:
            json.dumps(row.values)
        except (TypeError, ValueError) as error:
            raise DataError(f"{key}: {row.where}: {error}") from None
        rows.append(dict(row.values))
    if not rows:
        raise DataError(f"{key}: {file} has no tasks; expected an object of JSON on each line")
    return tuple(rows)
