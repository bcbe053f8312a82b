"""A training backend of the user's own: one file, named as `strategy_name`."""

from __future__ import annotations

from pathlib import Path

import pytest

OWN = '''
import torch
from transformers import AutoModelForCausalLM

from roll.distributed.layout import RankLayout
from roll.strategies.base import TrainStrategy
from roll.strategies.training.micro import denominators
from roll.types.batch import TokenOutputs


class PlainLoop(TrainStrategy):
    """One process, one row after another, plain gradient descent."""

    def __init__(self, spec, info):
        self.layout = RankLayout(dp_rank=info.rank, dp_size=info.world_size)
        path = spec.worker.model_args.model_name_or_path
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._rate = spec.worker.strategy_args.strategy_config.options["rate"]

    def _logprobs(self, batch):
        rows = []
        for i in range(len(batch)):
            ids = batch.row("token_ids", i)
            table = self._model(ids[None]).logits[0].log_softmax(-1)[:-1]
            rows.append(torch.cat([torch.zeros(1), table.gather(-1, ids[1:, None])[:, 0]]))
        logprobs = torch.cat(rows) * batch.action_mask
        return TokenOutputs(row_ids=batch.row_ids, offsets=batch.offsets, logprobs=logprobs)

    @torch.no_grad()
    def forward(self, batch, outputs, *, adapters=True):
        return self._logprobs(batch)

    def train_step(self, batch, loss_fn):
        self._model.zero_grad()
        terms = loss_fn.compute(self._logprobs(batch), batch, denominators(batch))
        terms.loss.backward()
        parameters = list(self._model.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        with torch.no_grad():
            for parameter in parameters:
                parameter -= self._rate * parameter.grad
        terms.metrics.add_mean("actor/grad_norm", float(norm))
        return terms.metrics

    def named_weights(self, part="merged"):
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach()

    def save(self, path):
        path.mkdir(parents=True)
        torch.save(self._model.state_dict(), path / "weights.pt")

    def load(self, path):
        self._model.load_state_dict(torch.load(path / "weights.pt"))

    def export(self, path):
        self._model.save_pretrained(path)
'''


def test_a_training_backend_of_ones_own_trains_two_steps_and_resumes(trained, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    expected = trained()
    Path("output").rename("built_in")
    role = "actor_train.strategy_args"
    keys = (f"{role}.strategy_name=own.py:PlainLoop", f"{role}.strategy_config={{rate: 0.1}}")
    rows = trained(*keys, "save_steps=1")
    assert [row["step"] for row in rows] == [1, 2]
    # The same responses and the same loss as those of the built-in backend, as long as the weights are the same.
    assert rows[0]["reward/mean"] == expected[0]["reward/mean"]
    assert rows[0]["actor/grad_norm"] == pytest.approx(expected[0]["actor/grad_norm"], rel=1e-4)
    assert rows[1]["actor/grad_norm"] != pytest.approx(rows[0]["actor/grad_norm"], rel=1e-4)
    Path("output").rename("whole")
    resumed = trained(*keys, "resume_from_checkpoint=whole/checkpoints/checkpoint-1")
    assert [row["step"] for row in resumed] == [2]
    assert resumed[0]["actor/grad_norm"] == rows[1]["actor/grad_norm"]
