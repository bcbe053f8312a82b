"""A pipeline of the user's own, preference pairs: configuration, loop and loss in one file, named as `pipeline`."""

from __future__ import annotations

import json

import pytest

from roll.cli.__main__ import main

OWN = '''
import contextlib
from dataclasses import dataclass, replace

import torch

from roll.configs.catalog.pipeline_table import PIPELINES, Pipeline
from roll.configs.schema.fields import number
from roll.configs.schema.sft_config import SFTConfig
from roll.pipelines.run.clusters import start_clusters
from roll.pipelines.offline.sft import SFTPipeline, sft_data
from roll.strategies.base import LossFn, LossTerms
from roll.strategies.hf.hf_model import load_tokenizer
from roll.types.metrics import Metrics
from roll.pipelines.workers.train_worker import TrainWorker, resolved_model_args


@dataclass(frozen=True, kw_only=True)
class PairConfig(SFTConfig):
    """Rows come in pairs: the chosen one, then the rejected one."""

    pipeline: str
    """own.py:pairs."""

    beta: float = number(0.1, gt=0)
    """Slope of the loss."""


def pairwise(config, kind):
    """-log sigmoid(beta (log p(chosen) - log p(rejected)))."""

    def compute(outputs, batch, sizes):
        per_row = (outputs.pad("logprobs") * batch.pad("loss_mask", False)).sum(1)
        pairs = torch.tensor(batch.units())
        margin = config.beta * (per_row[pairs[:, 0]] - per_row[pairs[:, 1]])
        losses = -torch.nn.functional.logsigmoid(margin)
        metrics = Metrics()
        metrics.add_mean("custom/pair_loss", float(losses.detach().sum()), len(pairs))
        return LossTerms(loss=losses.sum() / sizes.units, metrics=metrics)

    return LossFn(compute=compute, needs=("logprobs",))


class PairPipeline(SFTPipeline):
    def step(self, step):
        batch = self._order.take(self.config.rows_per_step)
        batch = replace(batch, unit_ids=tuple(str(row // 2) for row in range(len(batch))))
        self.conclude(step, self.clusters.actor_train.call(TrainWorker.train_step, batch).result())


def run(config):
    tokenizer = load_tokenizer(resolved_model_args(config, "actor_train"))
    data = sft_data(config, tokenizer)
    with start_clusters(config, total_steps=config.max_steps) as clusters:
        pipeline = PairPipeline(config, clusters, tokenizer, data=data, total_steps=config.max_steps)
        with contextlib.closing(pipeline):
            pipeline.run()


pairs = replace(PIPELINES["sft"], path="own.py:run", config="own.py:PairConfig", objective="own.py:pairwise")
'''

JOB = """
pipeline: own.py:pairs
beta: 0.5
executor: inline
output_dir: output
export_model: false
track_with: jsonl
pretrain: {model}
max_steps: 2
sequence_length: 32
actor_train:
  model_args: {{disable_gradient_checkpointing: true}}
  training_args: {{learning_rate: 1.0e-2, per_device_train_batch_size: 8, gradient_accumulation_steps: 1}}
  data_args: {{file_name: pairs.jsonl, prompt: prompt, response: response, template: plain, shuffle: false}}
"""


@pytest.fixture
def job(tmp_path, tiny_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i}=", "response": response} for i in range(4) for response in ("aaaa", "BBBB")]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "pairs.yaml").write_text(JOB.format(model=tiny_model))
    return tmp_path


def logged(output):
    return [json.loads(line) for line in (output / "logs" / "metrics.jsonl").read_text().splitlines()]


def test_preference_pairs_train_two_steps(job, capsys):
    assert main(["train", "pairs"]) == 0, capsys.readouterr().err
    rows = logged(job / "output")
    first, second = (row["custom/pair_loss"] for row in rows)
    assert second < first
    assert all(row["actor/grad_norm"] > 0 for row in rows)


def test_two_ranks_under_ray_take_the_same_steps(job, capsys):
    ranks = ["executor=ray", "num_gpus_per_node=2", "actor_train.device_mapping=[0,1]"]
    ranks += ["actor_train.training_args.per_device_train_batch_size=4", "output_dir=ray"]
    assert main(["train", "pairs"]) == 0, capsys.readouterr().err
    assert main(["train", "pairs", *ranks]) == 0, capsys.readouterr().err
    for name in ("custom/pair_loss", "actor/grad_norm"):
        alone, together = ([row[name] for row in logged(job / output)] for output in ("output", "ray"))
        assert together == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("pipeline=own.py:run", "own.py:run isn't a pipeline"),
        ("pipeline=own.py:gone", "own.py has no object 'gone'"),
        ("pipeline=sfft", "which pipeline the file is for"),
        ("betta=1", "did you mean 'beta'"),
        ("beta=0", "a number > 0"),
        ("max_steps=0", "max_steps"),
    ],
)
def test_what_is_wrong_is_said_as_for_any_pipeline(job, capsys, override, expected):
    assert main(["check", "pairs", override]) == 2
    assert expected in capsys.readouterr().err
