"""Training a reward model: a sequence classifier with one output, from pairs or from scores.

rows -> TrainWorker.train_step           every step
held-out rows -> ForwardWorker.forward   every eval_steps
"""

from __future__ import annotations

from typing import Any

from roll.configs.schema.preference_config import RewardTrainingConfig
from roll.data.preference_rows import PreferenceRow, scored_batch_of
from roll.pipelines.offline.offline_pipeline import OfflineData, run_offline
from roll.pipelines.offline.preference_pipeline import PreferencePipeline, preference_data
from roll.pipelines.workers.preference_losses import reward_loss


class RewardModelPipeline(PreferencePipeline):
    """Makes chosen responses score higher than rejected ones, or scores equal a column."""

    batch_of = staticmethod(scored_batch_of)
    config: RewardTrainingConfig

    def evaluate(self, step: int) -> dict[str, float]:
        """Return loss, accuracy, margin and scores on the held-out rows."""
        del step
        return self.held_out_metrics("values", reward_loss(self.config))


def reward_data(config: RewardTrainingConfig, tokenizer: Any) -> OfflineData[PreferenceRow]:
    """Read, render and tokenise all rows; raises `DataError` naming file and line."""
    return preference_data(config, tokenizer, scores=True)


def run_reward_model(config: RewardTrainingConfig) -> None:
    """Run the training of a reward model to its end."""
    run_offline(config, reward_data, RewardModelPipeline)
