"""Every rollout of a step, to one parquet file: tokens, masks, log-probs, rewards, advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow

TOKEN_COLUMNS = ("action_mask", "sampling_logprobs", "old_logprobs", "ref_logprobs", "versions", "advantages")
"""Columns with one entry per token, or empty where nobody computed them."""


def write_rollouts(folder: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write `rollouts-<step>.parquet`, a row per response (or context of an episode) as it was trained on.

    Rows have the columns of the schema but for `step`; token columns are aligned with `token_ids` as in `TokenBatch`.
    The file is there whole or not at all; a step that runs again replaces it. Returns its path.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rollouts-{step:06d}.parquet"
    temporary = path.with_name(path.name + ".tmp")
    pq.write_table(pa.Table.from_pylist([{"step": step, **row} for row in rows], schema=_schema()), temporary)
    temporary.replace(path)
    return path


def _schema() -> pyarrow.Schema:
    import pyarrow as pa

    text, floats = pa.string(), pa.list_(pa.float32())
    return pa.schema(
        [
            ("step", pa.int64()),
            ("task_id", text),
            ("domain", text),
            ("tag", text),
            ("member", pa.int64()),
            ("status", text),
            ("error", text),
            ("prompt", text),  # all before the first response that the row trains
            ("response", text),  # everything after it
            ("token_ids", pa.list_(pa.int64())),
            ("action_mask", pa.list_(pa.bool_())),
            ("sampling_logprobs", floats),
            ("old_logprobs", floats),
            ("ref_logprobs", floats),
            ("versions", pa.list_(pa.int64())),
            ("advantages", floats),
            ("reward", pa.float64()),
            ("reward_parts", pa.map_(text, pa.float64())),
        ]
    )
