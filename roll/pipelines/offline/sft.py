"""Supervised fine-tuning: rows in, one optimizer step per step, a model out. Its steps are in offline.py."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

from roll.configs.schema.offline_config import OfflineDataArgs
from roll.configs.schema.sft_config import SFTConfig, SFTDataArgs
from roll.data.sft_rows import TaughtRow, TaughtRows, batch_of, encode_rows, read_conversations
from roll.pipelines.credit.model_outputs import vocabulary_of, with_teacher
from roll.pipelines.offline.encoders import conversation_encoder
from roll.pipelines.offline.offline_pipeline import OfflineData, OfflinePipeline, offline_data, run_offline
from roll.types.batch import TokenBatch

_LARGEST_EXPONENT = 700.0

logger = logging.getLogger(__name__)


class SFTPipeline(OfflinePipeline[TaughtRow]):
    """Learns to write what the assistant says."""

    metrics_of = "sft"
    batch_of = staticmethod(batch_of)
    config: SFTConfig

    def prepared(self, batch: TokenBatch) -> TokenBatch:
        """Add what the teacher says of the taught tokens, where there is a teacher."""
        teacher = self.clusters.teachers.get("teacher")
        if teacher is None:
            return batch
        with self.timers.span("teacher", waits=True):
            forward, vocabulary = functools.partial(self.forward, teacher), vocabulary_of(self.config, self.tokenizer)
            return with_teacher(batch, forward, top_k=self.config.distill.top_k, vocabulary=vocabulary)

    def evaluate(self, step: int) -> dict[str, float]:
        """Return loss, perplexity and accuracy on the held-out rows, over their taught tokens."""
        del step
        loss = correct = tokens = 0.0
        for batch in self.held_out_batches():
            outputs = self.forward(self.clusters.actor_train, batch, "logprobs", "correct")
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


def sft_data(config: SFTConfig, tokenizer: Any) -> OfflineData[TaughtRow]:
    """Read, render and tokenise all rows; raises `DataError` naming file and line."""

    def read(data: OfflineDataArgs) -> TaughtRows:
        names_pictures = data.images is not None  # by itself: a validation without any may be of text alone
        data = config.data_args_of(data)
        assert isinstance(data, SFTDataArgs)
        encoder = conversation_encoder(config, data, tokenizer, train_on=config.train_on)
        logger.info("%s", encoder.describe_ends())
        return encode_rows(
            read_conversations(data, some_shown=names_pictures),
            encoder,
            sequence_length=config.max_sequence_length,
            truncation=config.truncation,
            num_workers=data.preprocessing_num_workers,
        )

    return offline_data(config, read)


def run_sft(config: SFTConfig) -> None:
    """Run supervised fine-tuning to its end."""
    run_offline(config, sft_data, SFTPipeline)
