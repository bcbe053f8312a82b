"""A micro-batch of a trainer: what in its passes and its loss makes the host wait for the device.

A tensor on the meta device has no numbers: whatever would read one, raises.
"""

from __future__ import annotations

import pytest
import torch
import transformers.masking_utils
from train_contract import build, make_batch, make_spec, with_worker

from roll.configs.schema.rlvr_config import RLVRConfig
from roll.pipelines.workers.worker_losses import actor_loss, with_mismatch_metrics
from roll.strategies.training import common
from roll.strategies.training.micro import denominators
from roll.types.metrics import Metrics


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_micro_batch_asks_the_device_once_and_a_padded_one_three_times(
    tiny_model, monkeypatch, packed, checkpointing
):
    asked = []
    monkeypatch.setattr(common, "nonfinite_rows", lambda outputs, batch: asked.append("finite") or set())
    monkeypatch.setattr(transformers.masking_utils, "fast_all", lambda mask: asked.append("padded") or False)
    spec = make_spec(tiny_model, model={"disable_gradient_checkpointing": not checkpointing})
    strategy = build(with_worker(spec, use_sequence_packing=packed))
    asked.clear()  # the checks of a model that is built may ask
    batch = make_batch()
    batch = batch.with_columns(sampling_logprobs=torch.zeros(batch.num_tokens), old_logprobs=batch.advantages)
    loss_fn = with_mismatch_metrics(actor_loss(RLVRConfig(pipeline="rlvr", rewards={})), 0, mixed_versions=False)
    strategy._module.to("meta")
    strategy._device = torch.device("meta")
    strategy._share_rows(strategy.layout)
    metrics = Metrics()
    for _ in range(2):
        outputs = strategy._score(batch, loss_fn.needs, 1)
        loss, said = strategy._losses.of(outputs, batch, loss_fn, denominators(batch), is_padding=False)
        metrics.merge(said)
        strategy._accumulate(loss, last=True)
    assert asked == (["finite"] if packed else ["padded", "padded", "finite"]) * 2
    assert all(parameter.grad is not None for parameter in strategy._module.parameters())
