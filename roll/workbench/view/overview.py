"""What a whole run comes to: why episodes weren't trained on, and which tasks changed most."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from roll.tracking.rollouts import Kind
from roll.workbench.view.rows import RowIndex, plain, records

_MAX_CAUSES = 50
_MAX_TASKS = 300
_NUMBER = re.compile(r"\d+(\.\d+)?")


def causes(index: RowIndex, folder: Path | None) -> list[dict[str, Any]]:
    """Return why episodes weren't trained on, by tag, status and words; the most frequent first.

    Words that differ in numbers alone are one cause. Each has the number of its episodes, its first and last step, and
    the place of its first episode (`step`, `row` of the dropped ones).
    """
    by_cause: dict[tuple[str, str, str], dict[str, Any]] = {}
    table = index.table(folder, "dropped").select(["step", "row", "tag", "status", "dropped"])
    for row in table.to_pylist():
        words = row["dropped"] or row["status"] or ""
        key = (row["tag"] or "", row["status"] or "", _NUMBER.sub("0", words))
        cause = by_cause.setdefault(
            key, {**row, "dropped": words, "episodes": 0, "first_step": row["step"], "last_step": row["step"]}
        )
        cause["episodes"] += 1
        cause["last_step"] = row["step"]
    return sorted(by_cause.values(), key=lambda cause: -cause["episodes"])[:_MAX_CAUSES]


def tasks(index: RowIndex, folder: Path | None, kind: Kind) -> list[dict[str, Any]]:
    """Return tasks with the mean reward of the first and the last step that has them, those that changed most first."""
    table = index.table(folder, kind).select(["task_id", "tag", "step", "reward"])
    by_step = table.group_by(["task_id", "tag", "step"]).aggregate([("reward", "mean"), ("reward", "count")])
    by_task: dict[str, list[dict[str, Any]]] = {}
    for row in records(by_step.sort_by("step")):
        by_task.setdefault(row["task_id"], []).append(row)
    listed = [
        {
            "task_id": task,
            "tag": steps[0]["tag"],
            "steps": len(steps),
            "episodes": sum(step["reward_count"] for step in steps),
            "first_step": steps[0]["step"],
            "last_step": steps[-1]["step"],
            "first_reward": steps[0]["reward_mean"],
            "last_reward": steps[-1]["reward_mean"],
            "change": plain(_difference(steps[0]["reward_mean"], steps[-1]["reward_mean"])),
        }
        for task, steps in by_task.items()
    ]
    listed.sort(key=lambda task: (-task["steps"], -abs(task["change"] or 0.0)))
    return listed[:_MAX_TASKS]


def _difference(first: float | None, last: float | None) -> float | None:
    return None if first is None or last is None else last - first
