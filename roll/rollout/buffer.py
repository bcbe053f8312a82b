"""Finished groups on disk, for checkpoints of runs whose generation is ahead: one parquet file, a row per response."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from roll.rollout.async_scheduler import ReadyGroup
from roll.types.episode import Group, Task, Trajectory, Turn


def save_groups(path: Path, groups: Iterable[ReadyGroup]) -> None:
    """Write finished groups; log-probs and rewards keep every bit."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"position": ready.position, "version": ready.version, "task": ready.group.task.id, **_row(trajectory)}
        for ready in groups
        for trajectory in ready.group.trajectories
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=_schema(pa)), path)


def load_groups(path: Path, task: Callable[[str], Task]) -> list[ReadyGroup]:
    """Return what `save_groups` wrote; `task` finds a task by its id."""
    import pyarrow.parquet as pq

    members: dict[int, list[Trajectory]] = {}
    heads: dict[int, tuple[str, int]] = {}
    for row in pq.read_table(path).to_pylist():
        heads[row["position"]] = (row["task"], row["version"])
        members.setdefault(row["position"], []).append(_trajectory(row))
    return [
        ReadyGroup(position, Group(task=task(heads[position][0]), trajectories=tuple(trajectories)), heads[position][1])
        for position, trajectories in members.items()
    ]


def _row(trajectory: Trajectory) -> dict[str, Any]:
    """Write mappings as lists of pairs: parquet has no columns whose keys differ by row."""
    turns = [{**asdict(turn), "metrics": list(turn.metrics.items())} for turn in trajectory.turns]
    return {
        "member": trajectory.member,
        "turns": turns,
        "reward": trajectory.reward,
        "reward_parts": list(trajectory.reward_parts.items()),
        "status": trajectory.status,
        "error": trajectory.error,
        "spans": list(trajectory.spans.items()),
    }


def _trajectory(row: dict[str, Any]) -> Trajectory:
    turns = tuple(
        Turn(
            **{
                **turn,
                "prompt_ids": tuple(turn["prompt_ids"]),
                "response_ids": tuple(turn["response_ids"]),
                "logprobs": tuple(turn["logprobs"]),
                "versions": tuple(turn["versions"]),
                "metrics": dict(turn["metrics"]),
            }
        )
        for turn in row["turns"]
    )
    return Trajectory(
        task_id=row["task"],
        member=row["member"],
        turns=turns,
        reward=row["reward"],
        reward_parts=dict(row["reward_parts"]),
        status=row["status"],
        error=row["error"],
        spans=dict(row["spans"]),
    )


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
            "state": pa.string(),
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
            "status": pa.string(),
            "error": pa.string(),
            "spans": pairs,
        }
    )
