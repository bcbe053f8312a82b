"""Finished groups on disk, for checkpoints of runs whose generation is ahead: one parquet file, a row per response."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from roll.rollout.async_scheduler import ReadyGroup
from roll.types.trajectory import Group, Task, Trajectory, Turn

_COLUMNS = ("response_ids", "logprobs", "versions")


def save_groups(path: Path, groups: Iterable[ReadyGroup]) -> None:
    """Write finished groups; log-probs and rewards keep every bit."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"position": ready.position, "version": ready.version, "task": ready.group.task.id, **_row(trajectory)}
        for ready in groups
        for trajectory in ready.group.trajectories
    ]
    # Small row groups: arrow reads at most 2 GB of bytes in lists from one, and experts of long episodes are large.
    pq.write_table(pa.Table.from_pylist(rows, schema=_schema(pa)), path, row_group_size=64)


def load_groups(path: Path, task: Callable[[str], Task]) -> list[ReadyGroup]:
    """Return what `save_groups` wrote; `task` finds a task by its id."""
    import pyarrow.parquet as pq

    members: dict[int, list[Trajectory]] = {}
    versions: dict[int, int] = {}
    for row in pq.read_table(path).to_pylist(maps_as_pydicts="strict"):
        position = row.pop("position")
        versions[position] = row.pop("version")
        turns: list[dict[str, Any]] = row.pop("turns")
        for turn in turns:
            turn["routed_experts"] = _array(turn.get("routed_experts"))  # older files have none
            turn.update({name: tuple(value) for name, value in turn.items() if isinstance(value, list)})
        played = tuple(Turn(**turn) for turn in turns)
        trajectory = Trajectory(task_id=row.pop("task"), turns=played, **row)
        members.setdefault(position, []).append(trajectory)
    return [
        ReadyGroup(position, Group(task=task(group[0].task_id), trajectories=tuple(group)), versions[position])
        for position, group in members.items()
    ]


def _row(trajectory: Trajectory) -> dict[str, Any]:
    row = {field.name: getattr(trajectory, field.name) for field in fields(trajectory)}
    return {**row, "turns": [_turn(turn) for turn in trajectory.turns]}


def _turn(turn: Turn) -> dict[str, Any]:
    row = {field.name: getattr(turn, field.name) for field in fields(turn) if field.name not in _COLUMNS}
    row |= {name: turn.array(name) for name in _COLUMNS}
    if turn.routed_experts is not None:
        row["routed_experts"] = {"shape": turn.routed_experts.shape, "numbers": turn.routed_experts.tobytes()}
    return row


def _array(stored: dict[str, Any] | None) -> np.ndarray | None:
    return None if stored is None else np.frombuffer(stored["numbers"], np.int16).reshape(stored["shape"])


def _schema(pa: Any) -> Any:
    pairs = pa.map_(pa.string(), pa.float64())
    ids = pa.list_(pa.int32())
    turn = pa.struct(
        {
            "prompt_ids": ids,
            "response_ids": ids,
            "logprobs": pa.list_(pa.float64()),
            "versions": ids,
            "finish_reason": pa.string(),
            "observation": pa.string(),
            "reward": pa.float64(),
            "metrics": pairs,
            "resets_context": pa.bool_(),
            "after": pa.int32(),
            "role": pa.string(),
            "state": pa.string(),
            "num_fire_tokens": pa.int32(),
            "routed_experts": pa.struct({"shape": ids, "numbers": pa.binary()}),
        }
    )
    return pa.schema(
        {
            "position": pa.int64(),
            "version": pa.int32(),
            "task": pa.string(),
            "member": pa.int32(),
            "turns": pa.list_(turn),
            "reward": pa.float64(),
            "reward_parts": pairs,
            "role_rewards": pairs,
            "status": pa.string(),
            "error": pa.string(),
            "answer": pa.string(),
            "explanation": pa.string(),
            "spans": pairs,
            "trace": pa.string(),
            "counts": pairs,
        }
    )
