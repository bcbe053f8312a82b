"""Supervised fine-tuning: rows in, one optimizer step per step, a Hugging Face folder out.

rows -> RowOrder.take -> TrainWorker.train_step       every step
held-out rows -> ForwardWorker.forward                every eval_steps
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.configs.schema.sft_config import SFTConfig, SFTDataArgs
from roll.data.chat_masks import ConversationEncoder
from roll.data.sft import RowOrder, TaughtRow, TaughtRows, batch_of, encode_rows, read_conversations
from roll.pipelines.clusters import Clusters, start_clusters
from roll.pipelines.loop import Loop, prepare
from roll.strategies.hf.hf_model import load_tokenizer
from roll.types.metrics import Metrics
from roll.utils.locking import run_lock
from roll.workers.train import TrainWorker, resolved_model_args

logger = logging.getLogger(__name__)

_LARGEST_EXPONENT = 700.0
_FORWARD_PASSES = 16  # Forward passes of one call in validation: its rows and their outputs lie in memory at once


@dataclass(frozen=True)
class SFTData:
    """What is trained on, and what is held out."""

    training: TaughtRows
    held_out: tuple[TaughtRow, ...] = ()

    def first_metrics(self) -> dict[str, float]:
        """Return what is logged once."""
        held_out = {"data/rows_held_out": float(len(self.held_out))} if self.held_out else {}
        return {**self.training.metrics(), **held_out}


class SFTPipeline(Loop):
    """Walks over the rows: `run`, then `close`."""

    config: SFTConfig

    def __init__(
        self, config: SFTConfig, clusters: Clusters, tokenizer: Any, *, data: SFTData, total_steps: int
    ) -> None:
        super().__init__(config, clusters, tokenizer, total_steps=total_steps)
        self._data = data
        shuffle = config.actor_train.data_args.shuffle
        self._order = RowOrder(data.training.rows, seed=config.seed, shuffle=shuffle)

    @property
    def validates_first(self) -> bool:
        return self.config.val_before_train

    def step(self, step: int) -> None:
        metrics = Metrics()
        if step == self.start_step + 1:
            metrics.update(self._data.first_metrics())
        with self.timers.span("step"):
            with self.timers.span("data"):
                batch = self._order.take(self._rows_of_next_step())
            metrics.update(
                {
                    "sft/rows": float(len(batch)),
                    "sft/row_length_mean": batch.num_tokens / len(batch),
                    "sft/epoch": self._order.epoch,
                    "tokens/read": float(batch.num_tokens),
                }
            )
            with self.timers.span("train_actor", waits=True):
                metrics.merge(self.clusters.actor_train.call(TrainWorker.train_step, batch))
        self.conclude(step, metrics.result())

    def _rows_of_next_step(self) -> int:
        """Return the size of a whole mini-batch, but no more than `num_train_epochs` have left."""
        rows, epochs = self.config.rows_per_step, self.config.num_train_epochs
        return min(rows, epochs * len(self._data.training.rows) - self._order.taken) if epochs else rows

    def evaluate(self, step: int) -> dict[str, float]:
        """Return loss, perplexity and accuracy on the held-out rows, over their taught tokens."""
        del step
        cluster = self.clusters.actor_train
        rows = self._data.held_out
        size = cluster.dp_size * self.config.actor_train.infer_batch_size * _FORWARD_PASSES
        loss = correct = tokens = 0.0
        for start in range(0, len(rows), size):
            batch = batch_of([(row.id, row) for row in rows[start : start + size]])
            outputs = self.forward(cluster, batch, "logprobs", "correct")
            mask = batch.action_mask
            loss -= float(outputs.require("logprobs")[mask].double().sum())
            correct += float(outputs.require("correct")[mask].double().sum())
            tokens += float(mask.sum())
        mean = loss / tokens
        return {
            "val/loss": mean,
            "val/perplexity": math.exp(mean) if mean < _LARGEST_EXPONENT else math.inf,
            "val/token_accuracy": correct / tokens,
            "val/tokens": tokens,
        }

    def save_state(self, folder: Path) -> dict[str, Any]:
        del folder
        return {"rows": self._order.state_dict()}

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        del folder
        self._order.load_state_dict(state["rows"])


def sft_data(config: SFTConfig, tokenizer: Any) -> SFTData:
    """Read, render and tokenise all rows; raises `DataError` naming file and line."""
    training = _rows(config, config.actor_train.data_args, tokenizer)
    if config.validation is not None:
        return SFTData(training, _rows(config, config.validation.data_args, tokenizer).rows)
    if config.validation_share:
        return SFTData(*training.split(config.validation_share, config.seed))
    return SFTData(training)


def _rows(config: SFTConfig, data: SFTDataArgs, tokenizer: Any) -> TaughtRows:
    rows = encode_rows(
        read_conversations(data),
        ConversationEncoder(
            tokenizer,
            template=data.template or config.actor_train.data_args.template or "native",
            train_on=config.train_on,
        ),
        sequence_length=config.max_sequence_length,
        truncation=config.truncation,
        num_workers=data.preprocessing_num_workers,
    )
    if rows.filtered or rows.truncated or rows.untaught:
        logger.warning(
            "%s: of rows longer than sequence_length = %d, %d were left out and %d cut, and %d rows without a token to "
            "learn were left out; %d are used",
            ", ".join(data.file_name),
            config.max_sequence_length,
            rows.filtered,
            rows.truncated,
            rows.untaught,
            len(rows.rows),
        )
    return rows


def planned_steps(config: SFTConfig, rows: Sequence[TaughtRow]) -> int:
    """Return the steps of the run: the fewer of `max_steps` and what `num_train_epochs` take.

    The last step may be a smaller one.
    """
    limits = [config.max_steps] if config.max_steps else []
    if config.num_train_epochs:
        limits.append(math.ceil(config.num_train_epochs * len(rows) / config.rows_per_step))
    return min(limits)


def run_sft(config: SFTConfig) -> None:
    """Run supervised fine-tuning to its end."""
    prepare(config)
    with run_lock(config.output_path, config.logging_path):
        tokenizer = load_tokenizer(resolved_model_args(config, "actor_train"))
        data = sft_data(config, tokenizer)
        total_steps = planned_steps(config, data.training.rows)
        logger.info("%d rows, %d steps of %s", len(data.training.rows), total_steps, config.batch.explain())
        logger.info("%s", config.placement.explain())
        with start_clusters(config, total_steps=total_steps) as clusters:
            pipeline = SFTPipeline(config, clusters, tokenizer, data=data, total_steps=total_steps)
            with contextlib.closing(pipeline):
                pipeline.run()
