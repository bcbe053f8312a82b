"""Trackers: values of `track_with`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll.configs.catalog.entries import Entry, Option


@dataclass(frozen=True, kw_only=True)
class TrackerEntry(Entry):
    """A tracker that needs a package of its own."""

    package: str
    """What it imports and what `pip install` calls it."""


_OF_PROJECT = {"project": Option(str, default="roll"), "name": Option(str | None, key="exp_name")}

TRACKERS: dict[str, Entry] = {
    "jsonl": Entry(path="roll.tracking.jsonl:JsonlTracker"),
    "stdout": Entry(
        path="roll.tracking.stdout:StdoutTracker",
        options={"live": Option(bool | None), "rows": Option(int, bounds={"ge": 1}, default=20)},
    ),
    "tensorboard": Entry(path="roll.tracking.tensorboard:TensorboardTracker"),
    "wandb": TrackerEntry(
        path="roll.tracking.wandb:WandbTracker",
        package="wandb",
        options={
            **_OF_PROJECT,
            "entity": Option(str | None),
            "group": Option(str | None),
            "tags": Option(tuple[str, ...] | None),
            "notes": Option(str | None),
            "mode": Option(Literal["online", "offline", "disabled"] | None),
        },
    ),
    "swanlab": TrackerEntry(
        path="roll.tracking.swanlab:SwanlabTracker",
        package="swanlab",
        options={
            **_OF_PROJECT,
            "workspace": Option(str | None),
            "group": Option(str | None),
            "tags": Option(tuple[str, ...] | None),
            "mode": Option(Literal["online", "local", "offline", "disabled"] | None),
        },
    ),
    "mlflow": TrackerEntry(
        path="roll.tracking.mlflow:MlflowTracker",
        package="mlflow",
        options={**_OF_PROJECT, "tracking_uri": Option(str | None), "tags": Option(tuple[str, ...] | None)},
    ),
    "trackio": TrackerEntry(
        path="roll.tracking.trackio:TrackioTracker",
        package="trackio",
        options={**_OF_PROJECT, "space_id": Option(str | None), "group": Option(str | None)},
    ),
    "prometheus": TrackerEntry(
        path="roll.tracking.prometheus:PrometheusTracker",
        package="prometheus_client",
        options={
            "host": Option(str, default="127.0.0.1"),
            "port": Option(int, bounds={"ge": 0, "le": 65535}, default=9464),
        },
    ),
}
"""Classes of `roll.tracking.base.Tracker`, made as `cls(destination, **options)`."""
