"""`wandb`: Weights & Biases, online or in files that `wandb sync` uploads later."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from roll.tracking.base import Destination, Sample, Tracker, persistent_run_id


class WandbTracker(Tracker):
    """Metrics by step, samples as a table, the configuration, the summary.

    A resumed run goes on in the same run of the service, which takes no step twice. Those that
    are played again give the same numbers.
    The key comes from `wandb login` or WANDB_API_KEY.
    """

    def __init__(
        self,
        destination: Destination,
        *,
        project: str = "roll",
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] | None = None,
        notes: str | None = None,
        mode: Any = None,
    ) -> None:
        """Open the run; `mode` None is what WANDB_MODE says, else online."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._table = wandb.Table
        self._run = wandb.init(
            project=project,
            name=name or destination.run_name or None,
            entity=entity,
            group=group,
            tags=list(tags) if tags else None,
            notes=notes,
            mode=mode,
            dir=str(destination.folder),
            id=persistent_run_id(destination, "wandb"),
            resume="allow",
            config=dict(destination.settings),
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        rows: list[list[object]] = [[s.domain, s.prompt, s.response, s.reward] for s in samples]
        table = self._table(columns=["domain", "prompt", "response", "reward"], data=rows)
        self._run.log({"samples": table}, step=step)

    def finish(self, summary: Mapping[str, float]) -> None:
        for name, value in summary.items():
            self._run.summary[f"summary/{name}"] = value
        self._run.finish(exit_code=0 if summary else 1)
