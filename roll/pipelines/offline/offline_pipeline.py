"""Learning from finished rows: what every such pipeline shares. A subclass says what it measures on held-out rows.

rows -> RowOrder.take -> prepared -> TrainWorker.train_step     every step
held-out rows -> ForwardWorker.forward                          every eval_steps
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from roll.configs.schema.offline_config import OfflineConfig, OfflineDataArgs
from roll.data.finished_rows import BatchOf, EncodedRows, OfflineRow, RowOrder
from roll.pipelines.credit.model_outputs import require_same_tokens
from roll.pipelines.run.clusters import Clusters, start_clusters
from roll.pipelines.run.loop import Loop, own_folders
from roll.pipelines.workers.train_worker import TrainWorker, resolved_model_args
from roll.strategies.training.pretrained import load_tokenizer
from roll.types.batch import TokenBatch
from roll.types.metrics import Metrics

logger = logging.getLogger(__name__)

_FORWARD_PASSES = 16  # Forward passes of one call in validation: its rows and their outputs lie in memory at once

R = TypeVar("R", bound=OfflineRow)
C = TypeVar("C", bound=OfflineConfig)


@dataclass(frozen=True)
class OfflineData(Generic[R]):
    """What is trained on, and what is held out."""

    training: EncodedRows[R]
    held_out: tuple[R, ...] = ()

    def first_metrics(self) -> dict[str, float]:
        """Return what is logged once."""
        held_out = {"data/rows_held_out": float(len(self.held_out))} if self.held_out else {}
        return {**self.training.metrics(), **held_out}


class OfflinePipeline(Loop, Generic[R]):
    """Walks over the rows: `run`, then `close`."""

    metrics_of: ClassVar[str]
    """Beginning of the names of its metrics."""
    batch_of: BatchOf[R]
    """Makes a batch of rows; a static method."""
    config: OfflineConfig

    def __init__(
        self, config: OfflineConfig, clusters: Clusters, tokenizer: Any, *, data: OfflineData[R], total_steps: int
    ) -> None:
        super().__init__(config, clusters, tokenizer, total_steps=total_steps)
        self._data = data
        shuffle = config.actor_train.data_args.shuffle
        self._order = RowOrder(data.training.rows, self.batch_of, seed=config.seed, shuffle=shuffle)

    @property
    def validates_first(self) -> bool:
        return self.config.val_before_train

    def prepared(self, batch: TokenBatch) -> TokenBatch:
        """Add what the loss compares with. Default: nothing."""
        return batch

    def step(self, step: int) -> None:
        metrics = Metrics()
        if step == 1:  # not again after a resume
            metrics.update(self._data.first_metrics())
        with self.timers.span("step"):
            with self.timers.span("data"):
                rows = self._rows_of_next_step()
                batch = self._order.take(rows)
            metrics.update(
                {
                    f"{self.metrics_of}/rows": float(rows),
                    f"{self.metrics_of}/row_length_mean": batch.num_tokens / len(batch),
                    f"{self.metrics_of}/epoch": self._order.epoch,
                    "tokens/read": float(batch.num_tokens),
                }
            )
            batch = self.prepared(batch)
            with self.timers.span("train_actor", waits=True):
                self.offloader.onload("actor_train")
                metrics.merge(self.clusters.actor_train.call(TrainWorker.train_step, batch))
        self.conclude(step, metrics.result())

    def _rows_of_next_step(self) -> int:
        """Return the size of a whole mini-batch, but no more than `num_train_epochs` have left."""
        rows, epochs = self.config.rows_per_step, self.config.num_train_epochs
        return min(rows, epochs * len(self._data.training.rows) - self._order.taken) if epochs else rows

    def held_out_batches(self) -> Iterator[TokenBatch]:
        """Return the held-out rows in order, see `batches_of`."""
        return self.batches_of(self._data.held_out)

    def batches_of(self, rows: Sequence[R]) -> Iterator[TokenBatch]:
        """Yield rows in order, as many at once as a call of the workers takes."""
        worker = self.config.actor_train
        sequences = self.clusters.actor_train.dp_size * worker.infer_batch_size * _FORWARD_PASSES
        size = max(1, sequences // self.config.sequences_per_row)
        for start in range(0, len(rows), size):
            yield self.batch_of([(row.id, row) for row in rows[start : start + size]])

    def save_state(self, folder: Path) -> dict[str, Any]:
        del folder
        return {"rows": self._order.state_dict()}

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        del folder
        self._order.load_state_dict(state["rows"])


def offline_data(config: OfflineConfig, read: Callable[[OfflineDataArgs], EncodedRows[R]]) -> OfflineData[R]:
    """Return the rows of both kinds; `read` gives those of one section."""

    def rows_of(data: OfflineDataArgs) -> EncodedRows[R]:
        rows = read(data)
        if rows.filtered or rows.truncated or rows.untaught:
            logger.warning(
                "%s: of rows longer than sequence_length = %d, %d were left out and %d cut, and %d rows without a "
                "token to learn were left out; %d are used",
                ", ".join(data.file_name),
                config.max_sequence_length,
                rows.filtered,
                rows.truncated,
                rows.untaught,
                len(rows.rows),
            )
        return rows

    training = rows_of(config.actor_train.data_args)
    if config.validation is not None:
        return OfflineData(training, rows_of(config.validation.data_args).rows)
    if config.validation_share:
        return OfflineData(*training.split(config.validation_share, config.seed))
    return OfflineData(training)


def planned_steps(config: OfflineConfig, rows: Sequence[OfflineRow]) -> int:
    """Return the steps of the run: the fewer of `max_steps` and what `num_train_epochs` take.

    The last step may be a smaller one.
    """
    limits = [config.max_steps] if config.max_steps else []
    if config.num_train_epochs:
        limits.append(math.ceil(config.num_train_epochs * len(rows) / config.rows_per_step))
    return min(limits)


def run_offline(config: C, read: Callable[[C, Any], OfflineData[Any]], pipeline: type[OfflinePipeline[Any]]) -> None:
    """Run a pipeline of this kind to its end; `read(config, tokenizer)` gives its rows."""
    with own_folders(config):
        tokenizer = load_tokenizer(resolved_model_args(config, "actor_train"))
        require_same_tokens(config, tokenizer)
        data = read(config, tokenizer)
        total_steps = planned_steps(config, data.training.rows)
        logger.info("%d rows, %d steps", len(data.training.rows), total_steps)
        with start_clusters(config, total_steps=total_steps) as clusters:
            running = pipeline(config, clusters, tokenizer, data=data, total_steps=total_steps)
            with contextlib.closing(running):
                running.run()
