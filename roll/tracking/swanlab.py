"""`swanlab`: SwanLab, in its cloud or in files of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roll.tracking.base import Destination, Sample, Tracker, persistent_run_id


class SwanlabTracker(Tracker):
    """Metrics by step, samples as text. The key comes from `swanlab login` or SWANLAB_API_KEY."""

    def __init__(
        self,
        destination: Destination,
        *,
        project: str = "roll",
        name: str | None = None,
        workspace: str | None = None,
        group: str | None = None,
        tags: Sequence[str] | None = None,
        mode: Any = None,
    ) -> None:
        """Open the run; `mode` None is what SWANLAB_MODE says, else online."""
        import swanlab

        self._swanlab = swanlab
        online = mode in (None, "online")
        resumed = {"id": persistent_run_id(destination, "swanlab") * 2, "resume": "allow"} if online else {}
        swanlab.init(
            project=project,
            name=name or destination.run_name or None,
            workspace=workspace,
            group=group,
            tags=list(tags) if tags else None,
            mode=mode,
            log_dir=str(destination.folder / "swanlab"),
            config=dict(destination.settings),
            **resumed,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        texts = [self._swanlab.Text(f"{s.prompt}\n>>> {s.response}", caption=f"reward {s.reward:.3g}") for s in samples]
        self._swanlab.log({"samples": texts}, step=step)

    def finish(self, summary: Mapping[str, float]) -> None:
        del summary  # it has no place for single numbers
        self._swanlab.finish()
