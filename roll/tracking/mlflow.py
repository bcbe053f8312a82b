"""`mlflow`: a tracking server, or a database file in the run's logs."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from roll.tracking.base import Destination, Sample, Tracker
from roll.tracking.run_ids import earlier_run_id, keep_run_id

_MOST_PARAMETERS = 100  # In one call; the service's own limit
_LONGEST_VALUE = 6000


class MlflowTracker(Tracker):
    """Metrics by step, samples as artifacts, the configuration as parameters.

    Steps that a resumed run plays again are written again, with the same numbers.
    """

    def __init__(
        self,
        destination: Destination,
        *,
        project: str = "roll",
        name: str | None = None,
        tracking_uri: str | None = None,
        tags: Sequence[str] | None = None,
    ) -> None:
        """Open the run in the experiment `project`; without a uri MLFLOW_TRACKING_URI decides, else a file."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._metric = Metric
        folder = destination.folder.absolute()
        self._client = MlflowClient(uri or f"sqlite:///{folder / 'mlflow.db'}")
        experiment = self._client.get_experiment_by_name(project)
        where: dict[str, Any] = {} if uri else {"artifact_location": (folder / "mlflow_artifacts").as_uri()}
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(project, **where)
        self._run = earlier_run_id(destination, "mlflow") or ""
        if not self._run:
            run = self._client.create_run(
                experiment_id, run_name=name or destination.run_name or None, tags=dict.fromkeys(tags or (), "true")
            )
            self._run = run.info.run_id
            keep_run_id(destination, "mlflow", self._run)
            parameters = [Param(key, value[:_LONGEST_VALUE]) for key, value in _flat(destination.settings).items()]
            for first in range(0, len(parameters), _MOST_PARAMETERS):
                self._client.log_batch(self._run, params=parameters[first : first + _MOST_PARAMETERS])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = _milliseconds()
        values = [self._metric(name, value, now, step) for name, value in metrics.items() if math.isfinite(value)]
        self._client.log_batch(self._run, metrics=values)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        text = json.dumps([asdict(sample) for sample in samples], indent=1)
        self._client.log_text(self._run, text, f"samples/{step:06d}.json")

    def finish(self, summary: Mapping[str, float]) -> None:
        now = _milliseconds()
        values = [self._metric(f"summary/{name}", value, now, 0) for name, value in summary.items()]
        self._client.log_batch(self._run, metrics=[value for value in values if math.isfinite(value.value)])
        self._client.set_terminated(self._run, "FINISHED" if summary else "FAILED")


def _milliseconds() -> int:
    return int(time.time() * 1000)


def _flat(tree: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Return the leaves by their dotted names."""
    leaves: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= _flat(value, f"{above}{name}.")
        else:
            leaves[f"{above}{name}"] = str(value)
    return leaves
