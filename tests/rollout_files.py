"""What a run dumped into `rollout_dump_dir`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace


def read_rollouts(path: Path) -> list[SimpleNamespace]:
    """Return the rows of a parquet file of rollouts, `reward_parts` as a dict."""
    import pyarrow.parquet as pq

    records = pq.read_table(path).to_pylist()
    return [SimpleNamespace(**{**record, "reward_parts": dict(record["reward_parts"])}) for record in records]
