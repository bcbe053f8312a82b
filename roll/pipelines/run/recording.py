"""What a run records about itself: profiles of chosen steps, spans for OpenTelemetry. Nothing, unless it is asked to.

    with recorder.run():                    opens what spans go to
        with recorder.step(3):              sets what ranks record, then collects it and writes the files
            pipeline.step(3)

Files of a profiled step, in `profiler_output_dir`:

    step-000003.controller.json.gz          phases, every rank's calls, episodes, memory     (Perfetto)
    step-000003.actor_train-0.json.gz       operators of one rank, written by it             (Perfetto)
    step-000003.summary.json                seconds by phase, call and operator              (`roll profile`)
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from roll import __version__
from roll.configs.schema.run_config import RunConfig
from roll.distributed.cluster import Cluster
from roll.distributed.worker import Worker
from roll.distributed.worker_errors import WorkerError
from roll.pipelines.run.clusters import Clusters
from roll.tracking.profiling.chrome import CONTROLLER, span_events, write_trace
from roll.tracking.profiling.otlp import OtlpCollector, SpanWriter, resource_of
from roll.tracking.profiling.profile_plan import RankPlan, StepPlan, profiling_step
from roll.tracking.profiling.profile_summary import summary_name, summary_of
from roll.tracking.profiling.recorder import RankRecord, trace_name
from roll.tracking.spans import Span, SpanContext, SpanLog, finished, recording_to, span
from roll.types.trajectory import Trajectory

logger = logging.getLogger(__name__)
SPANS_FILE = "spans.jsonl"
_TAKE_SECONDS = 600.0


@contextlib.contextmanager
def recorded_update(trajectories: Sequence[Trajectory], step: int) -> Iterator[None]:
    """Record the body as what these episodes are trained on: it links to each, and each one's trace ends with it."""
    episodes = [SpanContext.parse(trajectory.trace) for trajectory in trajectories if trajectory.trace]
    with span("update", links=episodes, step=step, episodes=len(trajectories)) as update:
        yield
    if update is not None:
        for episode in episodes:
            times = (update.start_ns, update.end_ns)
            finished("update", times, episode, links=(update.context,), step=step, weight_version=step)


class _Exporter(Protocol):
    def export(self, spans: list[Span]) -> None: ...

    def close(self) -> None: ...


class RunRecorder:
    """One per run."""

    def __init__(self, config: RunConfig, clusters: Clusters) -> None:
        self._config = config
        self._clusters = clusters
        self._exporters: list[_Exporter] = []
        self._log = SpanLog(CONTROLLER)

    @contextlib.contextmanager
    def run(self, *, resumed: bool) -> Iterator[None]:
        """Open what spans are exported to; close it whatever happens."""
        if not self._config.tracing.enabled:
            yield
            return
        resource = resource_of(self._config.exp_name, __version__)
        self._exporters = [SpanWriter(self._config.logging_path / SPANS_FILE, resource, resumed=resumed)]
        try:
            if self._config.tracing.endpoint is not None:
                self._exporters.append(OtlpCollector(self._config.tracing.endpoint, resource))
            with recording_to(self._log):
                yield
        finally:
            self._export([])
            for exporter in self._exporters:
                exporter.close()

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record what the body does, if it is to be. A step that fails leaves spans, but no profile."""
        profiled = step in self._config.profile_steps
        if not (profiled or self._exporters):
            yield
            return
        with contextlib.ExitStack() as stack:
            if not self._exporters:
                stack.enter_context(recording_to(self._log))
            if profiled:
                stack.enter_context(profiling_step(self._plan(step)))
            root = stack.enter_context(span(f"step {step}", step=step, run=self._config.exp_name))
            assert root is not None
            self._log.base = root
            try:
                yield
            finally:
                self._log.base = None
        records = self._records(root.start_ns)
        spans, dropped = self._take(records)
        if profiled:
            self._write(step, root, spans, records, dropped)
        self._export(spans)

    def _plan(self, step: int) -> StepPlan:
        options = self._config.profiler
        rank = RankPlan(
            step=step,
            folder=str(self._config.profiler_path.absolute()),
            torch="torch" in options.tools,
            memory="memory" in options.tools,
            nsight="nsight" in options.tools,
            activities=options.activities,
            record_shapes=options.record_shapes,
            with_stack=options.with_stack,
            max_events=options.max_events,
        )
        return StepPlan(rank, roles=options.roles, ranks=options.ranks)

    def _records(self, start_ns: int) -> list[RankRecord]:
        records: list[RankRecord] = []
        for role, cluster in self._clusters.by_role.items():
            records += self._of(role, cluster, start_ns)
        return records

    def _of(self, role: str, cluster: Cluster, start_ns: int) -> list[RankRecord]:
        try:
            records = cluster.call(Worker.take_record, start_ns, timeout=max(_TAKE_SECONDS, cluster.rpc_timeout))
        except WorkerError as error:
            logger.warning("what %s recorded is lost: %s", role, error)
            return []
        return [record for record in records if record is not None]

    def _take(self, records: list[RankRecord]) -> tuple[list[Span], int]:
        spans, dropped = self._log.take()
        for record in records:
            spans += record.spans
            dropped += record.dropped_spans
        return spans, dropped

    def _write(self, step: int, root: Span, spans: list[Span], records: list[RankRecord], dropped: int) -> None:
        folder = self._config.profiler_path
        name = trace_name(step, CONTROLLER)
        about: dict[str, Any] = {"run": self._config.exp_name, "step": step, "dropped_spans": dropped}
        about["processes"] = {record.track: f"{record.host}, pid {record.pid}" for record in records}
        write_trace(folder / name, span_events(spans, root.start_ns), about)
        summary = summary_of(step, root, spans, records)
        file = folder / summary_name(step)
        file.write_text(json.dumps({**summary, "file": name, **about}, indent=1) + "\n", encoding="utf-8")
        logger.info("step %d is profiled in %s; roll profile %s", step, folder, self._config.output_dir)

    def _export(self, spans: list[Span]) -> None:
        rest, _ = self._log.take()  # what ended since: an engine's calls in asynchronous generation
        for exporter in self._exporters:
            exporter.export([*spans, *rest])
