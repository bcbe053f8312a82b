"""Every rollout of a step, to one parquet file: tokens, masks, log-probs, rewards, advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow

TOKEN_COLUMNS = ("action_mask", "sampling_logprobs", "old_logprobs", "ref_logprobs", "versions", "advantages")
"""Columns with one entry per token, or empty where nobody computed them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """One response (or episode) as it was trained on, or the reason why it wasn't.

    Token columns are aligned with `token_ids` as in `TokenBatch`; an empty one wasn't computed in this run.
    """

    step: int
    task_id: str
    domain: str
    tag: str
    member: int
    status: str
    error: str = ""
    prompt: str
    """Text of the first turn's prompt."""
    response: str
    """Text of everything after it."""
    token_ids: Sequence[int]
    action_mask: Sequence[bool] = ()
    sampling_logprobs: Sequence[float] = ()
    old_logprobs: Sequence[float] = ()
    ref_logprobs: Sequence[float] = ()
    versions: Sequence[int] = ()
    advantages: Sequence[float] = ()
    reward: float | None = None
    """None when the status isn't trainable: there is no reward then, not one of 0."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in TOKEN_COLUMNS:
            length = len(getattr(self, name))
            if length not in (0, len(self.token_ids)):
                raise ValueError(
                    f"rollout {self.task_id}#{self.member}: {name} has {length} entries, "
                    f"expected {len(self.token_ids)} (one per token) or none"
                )


class RolloutWriter:
    """Writes `rollouts-<step>.parquet` files below a folder; a step that runs again replaces its file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, step: int, rows: Sequence[RolloutRow]) -> Path:
        """Write the rollouts of a step; the file is there whole or not at all. Returns its path."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        wrong = sorted({row.step for row in rows} - {step})
        assert not wrong, f"rollouts of steps {wrong} in the file of step {step}"
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rollouts-{step:06d}.parquet"
        temporary = path.with_name(path.name + ".tmp")
        pq.write_table(pa.Table.from_pylist([_record(row) for row in rows], schema=_schema()), temporary)
        temporary.replace(path)
        return path


def read_rollouts(path: Path) -> list[RolloutRow]:
    """Return the rows of a file that `RolloutWriter` wrote."""
    import pyarrow.parquet as pq

    records = pq.read_table(path, schema=_schema()).to_pylist()
    return [RolloutRow(**{**record, "reward_parts": dict(record["reward_parts"])}) for record in records]


def _record(row: RolloutRow) -> dict[str, Any]:
    record = {f.name: getattr(row, f.name) for f in fields(row)}
    record["reward_parts"] = sorted(row.reward_parts.items())
    return record


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
            ("prompt", text),
            ("response", text),
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
