"""Trackers: values of `track_with`."""

from __future__ import annotations

from roll.catalog.entries import Entry, Option

TRACKERS: dict[str, Entry] = {
    "jsonl": Entry(path="roll.tracking.jsonl:JsonlTracker"),
    "stdout": Entry(
        path="roll.tracking.stdout:StdoutTracker",
        options={"live": Option(bool | None), "rows": Option(int, bounds={"ge": 1}, default=20)},
    ),
    "tensorboard": Entry(path="roll.tracking.tensorboard:TensorboardTracker"),
}
"""Classes of `roll.tracking.base.Tracker`, made as `cls(destination, **options)`."""
