"""`mlflow`: a tracking server, or a database file in the run's logs."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from roll.tracking.base import Destination, Sample, Tracker, earlier_run_id, keep_run_id

LONGEST_NAME = 250
_REFUSED = re.compile(r"[^\w\-. :/]|:(?=[0-9a-f]*:)")  # a colon that would read as a code is one itself
_DIGEST = 16


def mlflow_name(name: str) -> str:
    """Return the name to write: the same where mlflow takes it, and otherwise one that no other name gets."""
    parts = _REFUSED.sub(lambda match: _code(match[0]), name).split("/")
    # Empty parts and dots alone are steps of a path.
    written = "/".join(
        "::" if not part else "".join(map(_code, part)) if part in (".", "..") else part for part in parts
    )
    if len(written) <= LONGEST_NAME:
        return written
    digest = hashlib.blake2b(name.encode(), digest_size=_DIGEST // 2).hexdigest()
    return f"{written[: LONGEST_NAME - _DIGEST - 1]}:{digest}"


def _code(letter: str) -> str:
    return f":{ord(letter):x}:"


_MAX_PARAMETERS = 100  # In one call; the service's own limit
_LONGEST_VALUE = 6000


class MlflowTracker(Tracker):
    """Metrics by step, samples as artifacts, the configuration as parameters.

    mlflow takes nothing back: of steps that a resumed run plays again the first record stays. Names that it refuses are
    written as `mlflow_name` says.
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
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._metric = Metric
        folder = destination.folder.absolute()
        self._client = MlflowClient(uri or f"sqlite:///{folder / 'mlflow.db'}")
        experiment = self._client.get_experiment_by_name(project)
        where: dict[str, Any] = {} if uri else {"artifact_location": (folder / "mlflow_artifacts").as_uri()}
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(project, **where)
        self._run = earlier_run_id(destination, "mlflow") or ""
        self._recorded: int | None = None if self._run else -1  # last step that it has; None: not asked yet
        if not self._run:
            run = self._client.create_run(
                experiment_id,
                run_name=name or destination.run_name or None,
                tags={mlflow_name(tag): "true" for tag in tags or ()},
            )
            try:
                self._log_settings(run.info.run_id, destination.settings)
            except BaseException:  # half of a configuration would look like all of it
                self._client.set_terminated(run.info.run_id, "FAILED")
                self._client.delete_run(run.info.run_id)
                raise
            self._run = run.info.run_id
            keep_run_id(destination, "mlflow", self._run)

    def _log_settings(self, run: str, settings: Mapping[str, Any]) -> None:
        """Write the configuration as parameters; with a file of it where a value is longer than those may be."""
        from mlflow.entities import Param

        flat = _flat(settings)
        if any(len(value) > _LONGEST_VALUE for value in flat.values()):
            self._client.log_text(run, json.dumps(flat, indent=1), "settings.json")
        parameters = [Param(key, value[:_LONGEST_VALUE]) for key, value in flat.items()]
        for first in range(0, len(parameters), _MAX_PARAMETERS):
            self._client.log_batch(run, params=parameters[first : first + _MAX_PARAMETERS])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._recorded is None:
            self._recorded = self._last_step(metrics)
        if step <= self._recorded:
            return
        now = _milliseconds()
        finite = {mlflow_name(name): value for name, value in metrics.items() if math.isfinite(value)}
        values = [self._metric(name, value, now, step) for name, value in finite.items()]
        self._client.log_batch(self._run, metrics=values)

    def _last_step(self, metrics: Mapping[str, float]) -> int:
        """Return the last step that the run has of any of these metrics, -1: none."""
        known = self._client.get_run(self._run).data.metrics.keys() & {mlflow_name(name) for name in metrics}
        histories = (self._client.get_metric_history(self._run, name) for name in sorted(known))
        return max((entry.step for history in histories for entry in history), default=-1)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        text = json.dumps([asdict(sample) for sample in samples], indent=1)
        self._client.log_text(self._run, text, f"samples/{step:06d}.json")

    def finish(self, summary: Mapping[str, float]) -> None:
        now = _milliseconds()
        values = [self._metric(mlflow_name(f"summary/{name}"), value, now, 0) for name, value in summary.items()]
        self._client.log_batch(self._run, metrics=[value for value in values if math.isfinite(value.value)])
        self._client.set_terminated(self._run, "FINISHED" if summary else "FAILED")


def _milliseconds() -> int:
    return int(time.time() * 1000)


def _flat(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the leaves by their dotted names, as mlflow takes them."""
    flat: dict[str, str] = {}
    for path, value in _leaves(tree, ()):
        name = mlflow_name(".".join(path))
        if name in flat:  # a dot inside of a key has made the name that dots between keys make
            name = mlflow_name(f"{name}:{hashlib.blake2b(repr(path).encode(), digest_size=4).hexdigest()}")
        flat[name] = str(value)
    return flat


def _leaves(tree: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*above, str(name)))
        else:
            yield (*above, str(name)), value
