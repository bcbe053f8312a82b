"""Preference training of a policy: DPO and its relatives.

rows -> reference log-probs (KTO: and the KL) -> TrainWorker.train_step     every step
held-out rows -> the same loss without a gradient                           every eval_steps
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from roll.configs.schema.preference_config import DPOConfig
from roll.data.preference_rows import PreferenceRow, batch_of, mismatched
from roll.pipelines.offline.offline_pipeline import OfflineData, run_offline
from roll.pipelines.offline.preference_pipeline import PreferencePipeline, preference_data
from roll.pipelines.workers.preference_losses import dpo_loss
from roll.types.batch import TokenBatch


class DPOPipeline(PreferencePipeline):
    """Makes chosen responses likelier than rejected ones."""

    batch_of = staticmethod(batch_of)
    config: DPOConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cache: dict[bytes, Tensor] = {}
        """The reference's log-probs [T] of sequences, by their contents: they never change."""

    def train(self) -> None:
        if self.config.precompute_ref_log_probs:
            for batch in self.batches_of(self._data.training.rows):
                self._keep(batch)
        super().train()

    def prepared(self, batch: TokenBatch) -> TokenBatch:
        """Add what the loss compares with: the reference's log-probs, and for labelled rows the KL."""
        if not self.config.uses_reference:
            return batch
        cached = [self._cache.get(key) for key in _contents(batch)]
        known = [row for row in cached if row is not None]
        batch = batch.with_columns(
            ref_logprobs=torch.cat(known) if len(known) == len(cached) else self._reference(batch)
        )
        return batch if self.config.pairs else batch.with_columns(targets=self._kl(batch))

    def evaluate(self, step: int) -> dict[str, float]:
        """Return loss, accuracy, margin and rewards on the held-out rows."""
        del step
        for batch in self.held_out_batches() if self.config.uses_reference else ():
            if any(key not in self._cache for key in _contents(batch)):
                self._keep(batch)
        return self.held_out_metrics("logprobs", dpo_loss(self.config))

    def _keep(self, batch: TokenBatch) -> None:
        rows = self._reference(batch).split(batch.lengths.tolist())
        self._cache.update((key, row.clone()) for key, row in zip(_contents(batch), rows, strict=True))

    def _reference(self, batch: TokenBatch) -> Tensor:
        """Return float32 [N], the reference's log-probs."""
        with self.timers.span("reference", waits=True):
            cluster = self.clusters.reference or self.clusters.actor_train
            outputs = self.forward(cluster, batch, "logprobs", adapters=not self.config.reference_is_actor)
        return outputs.require("logprobs")

    def _kl(self, batch: TokenBatch) -> Tensor:
        """Return float32 [B], the policy's KL from the reference: the mean log-ratio of responses to other rows'
        prompts.

        0, the least that it can be, for a single row, as an epoch may leave for its last step.
        """
        if len(batch) == 1:
            return torch.zeros(1)
        other = mismatched(batch, self.config.max_sequence_length)
        with self.timers.span("kl", waits=True):
            policy = self.forward(self.clusters.actor_train, other, "logprobs").require("logprobs")
        ratios = (policy - self._reference(other))[other.action_mask].double()
        return torch.full((len(batch),), max(0.0, float(ratios.sum()) / len(batch)))


def _contents(batch: TokenBatch) -> list[bytes]:
    """Return what tells sequences apart: their tokens, and which of them are the response's."""
    columns = (batch.token_ids.to(torch.int32), batch.action_mask)
    rows = zip(*(column.split(batch.lengths.tolist()) for column in columns), strict=True)
    return [
        hashlib.blake2b(ids.numpy().tobytes() + mask.numpy().tobytes(), digest_size=16).digest() for ids, mask in rows
    ]


def dpo_data(config: DPOConfig, tokenizer: Any) -> OfflineData[PreferenceRow]:
    """Read, render and tokenise all rows; raises `DataError` naming file and line."""
    return preference_data(config, tokenizer, scores=False)


def run_dpo(config: DPOConfig) -> None:
    """Run preference training to its end."""
    run_offline(config, dpo_data, DPOPipeline)
