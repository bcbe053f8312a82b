"""What every run does around its steps: go on from a checkpoint, validate, log, save, end.

A subclass says what a step is; rl_pipeline.py is that of reinforcement learning, offline.py that of finished rows.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from roll.configs.schema.run_config import RunConfig
from roll.distributed.cluster import Cluster
from roll.pipelines.run.checkpoints import Checkpoints
from roll.pipelines.run.clusters import Clusters
from roll.pipelines.run.recording import RunRecorder
from roll.pipelines.run.report import RunReport
from roll.pipelines.run.stored_config import store_config
from roll.pipelines.workers.train_worker import ForwardWorker
from roll.strategies.base import Output
from roll.tracking.process_usage import RoleUsage
from roll.tracking.timing import Timers
from roll.types.batch import TokenBatch, TokenOutputs
from roll.utils.importing import load_object
from roll.utils.locking import run_lock

logger = logging.getLogger(__name__)


class OutOfTasks(Exception):
    """The last epoch has ended."""


class Loop(ABC):
    """Steps until the end: `run`, then `close`."""

    def __init__(self, config: RunConfig, clusters: Clusters, tokenizer: Any, *, total_steps: int) -> None:
        self.config = config
        self.clusters = clusters
        self.tokenizer = tokenizer
        self.timers = Timers()
        self.total_steps = total_steps
        self.checkpoints = Checkpoints(config, clusters)
        self.offloader = clusters.offloader
        self.recorder = RunRecorder(config, clusters)
        self._usage = RoleUsage(lambda: {role: cluster.processes for role, cluster in clusters.by_role.items()})
        self.start_step = 0
        self.report: RunReport

    # --- what a pipeline defines ----------------------------------------------------------------------------------

    @abstractmethod
    def step(self, step: int) -> None:
        """Walk one step, `conclude` included; raises `OutOfTasks` when there is nothing left to train on."""

    @abstractmethod
    def evaluate(self, step: int) -> dict[str, float]:
        """Return validation metrics under the current weights."""

    @abstractmethod
    def save_state(self, folder: Path) -> dict[str, Any]:
        """Return the pipeline's own state, JSON-able: at least its data's cursor. What is large goes into `folder`."""

    @abstractmethod
    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        """Continue from what `save_state` gave."""

    @property
    @abstractmethod
    def validates_first(self) -> bool:
        """Return whether the starting model is validated."""

    def stop(self) -> None:
        """End what the loop itself has begun, also after a failure. Default: there is nothing."""

    def close(self) -> None:
        """Release what isn't a cluster. Default: there is nothing."""

    def gauges(self) -> dict[str, Any]:
        """Return what is shown of a run under way, JSON values by name; called from another thread, every second."""
        return {"usage": self._usage.read()}

    # --- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Walk from the start, or from a checkpoint, to the last step."""
        only_validates = self.config.only_validates
        if not only_validates:
            # Before the checkpoint is looked at: a start that fails can be mended and resumed.
            store_config(self.config)
        self.restore()
        # A mere validation of an old checkpoint must not cut off what is on record after it.
        resume_step = None if only_validates else self.start_step or None
        self.report = RunReport(
            self.config,
            self.timers,
            self.tokenizer,
            resume_step=resume_step,
            total_steps=self.total_steps,
            first_step=next(iter(self.steps_left()), 1),
        )
        self.report.watch(self.gauges)
        try:
            with self.recorder.run(resumed=resume_step is not None):
                if only_validates or (self.start_step == 0 and self.validates_first):
                    with self.recorder.step(0):
                        values = self.validated(self.start_step)
                    self.report.row(self.start_step, values)
                if not only_validates:
                    self.train()
                    self.export()
                    self.checkpoints.finish()
            self.report.finish(self.checkpoints.latest(), self.checkpoints.best.record)
        finally:
            self.checkpoints.close()
            self.stop()
            self.report.close()

    def train(self) -> None:
        """Walk all steps that are left."""
        if 0 < self.total_steps <= self.start_step:
            logger.warning(
                "nothing is left to do: the checkpoint is that of step %d, of %d; raise max_steps to go on",
                self.start_step,
                self.total_steps,
            )
        for step in self.steps_left():
            try:
                with self.recorder.step(step):
                    self.step(step)
            except OutOfTasks as end:
                logger.info("training ends before step %d: %s", step, end)
                self.total_steps = step - 1
                if step - 1 > self.start_step:
                    self.conclude_late(step - 1)
                break

    def steps_left(self) -> Sequence[int]:
        """Return the numbers of the steps to come."""
        return range(self.start_step + 1, self.total_steps + 1)

    @property
    def validation_period(self) -> int | None:
        """Return steps between validations; 0 or None: there are none."""
        return self.config.eval_steps

    def conclude(self, step: int, values: dict[str, float]) -> None:
        """Evaluate, log and save as far as they are due. Logged before saved: a resumed run repeats no row."""
        self.checkpoints.check()
        validates = self.is_due(step, self.validation_period)
        improves = False
        if validates:
            values.update(self.validated(step))
            improves = self.checkpoints.best.improves(step, values)
        shown = validates or self.is_due(step, self.config.logging_steps) or step == self.total_steps
        self.report.row(step, values, due=shown)
        if improves or self.is_due(step, self.config.save_steps):
            self.save(step)

    def conclude_late(self, step: int) -> None:
        """Do what is due at the last step, where nobody knew in time that the tasks would end there."""
        improves = False
        if self.validation_period and step % self.validation_period:
            values = self.validated(step)
            improves = self.checkpoints.best.improves(step, values)
            self.report.row(step, values)
        if improves or (self.config.save_steps and step % self.config.save_steps):
            self.save(step)

    def is_due(self, step: int, period: int | None) -> bool:
        """Return whether something with this period is due; what is ever due is also due at the last step."""
        if not period:
            return False
        return step % period == 0 or step == self.total_steps

    def validated(self, step: int) -> dict[str, float]:
        """Return what `evaluate` gives, and time it."""
        with self.timers.span("validate", waits=True):
            return self.evaluate(step)

    def save(self, step: int) -> None:
        """Write a checkpoint."""
        with self.timers.span("save", waits=True):
            self.checkpoints.save(step, self.save_state)

    def export(self) -> None:
        """Write the trained model, unless the configuration says that it isn't wanted."""
        if self.config.exports and max(self.start_step, self.total_steps):
            with self.timers.span("export", waits=True):
                self.checkpoints.export(max(self.start_step, self.total_steps), self.save_state)
            logger.info("the trained model is in %s", self.config.export_path)

    def restore(self) -> None:
        """Continue from a checkpoint if the configuration asks for one."""
        loaded = self.checkpoints.load()
        if loaded is not None:
            state, folder = loaded
            self.start_step = state["step"]
            self.load_state(state, folder)
        self.checkpoints.release_loaded()

    def forward(self, cluster: Cluster, batch: TokenBatch, *outputs: Output, adapters: bool = True) -> TokenOutputs:
        """Run one forward pass over all rows."""
        self.offloader.onload(cluster.role)
        scored: TokenOutputs = cluster.call(ForwardWorker.forward, batch.with_row_units(), outputs, adapters)
        return scored


@contextlib.contextmanager
def own_folders(config: RunConfig) -> Iterator[None]:
    """Be the only run that writes to its folders, and call its `prepare`, which may write there too."""
    with run_lock(config.exclusive_folders):
        prepare(config)
        yield


def prepare(config: RunConfig) -> None:
    """Call the function that `prepare` names, with the configuration. It does nothing for what is there already."""
    if config.prepare is None:
        return
    make = load_object(config.prepare, key="prepare")
    if not callable(make):
        raise ValueError(f"prepare: {config.prepare!r} is {type(make).__name__}, expected a function")
    logger.info("preparing with %s", config.prepare)
    make(config)
