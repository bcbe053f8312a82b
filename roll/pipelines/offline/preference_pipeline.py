"""What learning from preferences has in common, whatever learns: its rows, and validation on pairs or labelled rows."""

from __future__ import annotations

import logging
from typing import Any

from roll.configs.schema.offline_config import OfflineDataArgs
from roll.configs.schema.preference_config import PreferenceConfig, PreferenceDataArgs
from roll.data.chat_masks import ConversationEncoder
from roll.data.finished_rows import EncodedRows
from roll.data.preference_rows import PreferenceRow, encode_preferences, read_preferences
from roll.pipelines.offline.encoders import conversation_encoder
from roll.pipelines.offline.offline_pipeline import OfflineData, OfflinePipeline, offline_data
from roll.pipelines.workers.preference_losses import UnitLoss
from roll.strategies.base import OutputName
from roll.types.metrics import Metrics

logger = logging.getLogger(__name__)


class PreferencePipeline(OfflinePipeline[PreferenceRow]):
    """Learns from pairs, or from single responses with a label or a score."""

    metrics_of = "preference"
    config: PreferenceConfig

    def held_out_metrics(self, output: OutputName, loss: UnitLoss) -> dict[str, float]:
        """Return the means of `loss` and of what it logs over the held-out rows."""
        metrics = Metrics()
        for batch in self.held_out_batches():
            batch = self.prepared(batch)
            outputs = self.forward(self.clusters.actor_train, batch, output)
            losses, logged = loss(outputs, batch)
            for name, values in {"loss": losses, **logged}.items():
                metrics.add_mean(f"val/{name}", float(values.double().sum()), len(values))
        return metrics.result()


def scored_ends(tokenizer: Any, encoder: ConversationEncoder) -> set[int]:
    """Return the tokens that are taken off the end of a response before it is scored."""
    return {tokenizer.pad_token_id, *encoder.appended_ends}


def preference_data(config: PreferenceConfig, tokenizer: Any, *, scores: bool) -> OfflineData[PreferenceRow]:
    """Read, render and tokenise all rows; raises `DataError` naming file and line.

    `scores`: as whoever scores with a classifier reads a response, which is up to the last token that isn't padding.
    Where the template doesn't say how a response ends, it has none of the tokens that are put behind it elsewhere.
    """

    def read(data: OfflineDataArgs) -> EncodedRows[PreferenceRow]:
        names_pictures = data.images is not None  # by itself: a validation without any may be of text alone
        data = config.data_args_of(data)
        assert isinstance(data, PreferenceDataArgs)
        encoder = conversation_encoder(config, data, tokenizer)
        logger.info("%s", encoder.describe_ends())
        return encode_preferences(
            read_preferences(data, pairs=config.pairs, some_shown=names_pictures),
            encoder,
            sequence_length=config.max_sequence_length,
            truncation=config.truncation,
            num_workers=data.preprocessing_num_workers,
            without_end=scored_ends(tokenizer, encoder) if scores else (),
        )

    return offline_data(config, read)
