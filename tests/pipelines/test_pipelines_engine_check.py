"""What engines sample is held against the trainer's model, under the first weights of a run and the first trained ones.

Each fault is planted into the engine when weights arrive: before, engine and trainer have read the same folder.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small import run_small

from roll.configs.schema.engine_config import SglangConfig, VllmConfig
from roll.distributed.weights import WeightSyncError
from roll.pipelines.rl.engine_check import _bounds
from roll.strategies.engines.hf.hf_infer import HfInfer

QUIET = ("actor_train.training_args.learning_rate=0", "max_steps=2")
"""Nothing is learnt: the engine is right until something is wrong."""


def planted(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    update = HfInfer.update_weights

    def with_fault(self: HfInfer, version: int, weights: Any) -> None:
        update(self, version, weights)
        fault(self)

    monkeypatch.setattr(HfInfer, "update_weights", with_fault)
    monkeypatch.delattr(HfInfer, "borrow_weights")  # a fault in weights that are the trainer's, too, would be in both


@torch.no_grad()
def a_factor(engine: HfInfer) -> None:
    """One parameter of 1,000 is 5 % off, as a scaling that a loader forgets is."""
    engine._model.model.layers[1].mlp.down_proj.weight.mul_(1.05)


def positions_that_count_padding(engine: HfInfer) -> None:
    """The shorter row of two begins at the place where the longer one does."""
    forward = engine._model.forward

    def shifted(*args: Any, **given: Any) -> Any:
        ids = given["position_ids"]
        if len(ids) > 1 and ids.shape[1] > 1:
            given["position_ids"] = torch.arange(ids.shape[1]).expand_as(ids)
        return forward(*args, **given)

    engine._model.forward = shifted


@pytest.mark.parametrize("fault", [a_factor, positions_that_count_padding], ids=lambda fault: fault.__name__)
def test_an_engine_that_computes_otherwise_is_found_at_the_start(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    planted(monkeypatch, fault)
    with pytest.raises(WeightSyncError) as raised:
        run_small(tmp_path, tiny_model, *QUIET)
    text = str(raised.value)
    assert "under weights of version 0 different log-probs, model type 'llama'" in text
    assert "actor_infer rank 0 (hf_infer)" in text and "dtypes fp32 and fp32" in text


def test_a_run_that_corrects_for_another_distribution_is_warned(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planted(monkeypatch, a_factor)
    with caplog.at_level(logging.WARNING):
        run_small(tmp_path, tiny_model, *QUIET, "train_infer_correction={}")
    assert "give what was just sampled under weights of version 0" in caplog.text


@pytest.mark.parametrize(
    "keys",
    [
        ("actor_infer.model_args.dtype=bf16",),
        ("actor_infer.model_args.dtype=fp16", "actor_infer.generating_args.temperature=0.3"),
        ("actor_infer.generating_args.temperature=0.02",),
        ("actor_train.model_args.lora_rank=4", "actor_train.model_args.lora_target=all-linear"),
    ],
    ids=["bf16", "fp16 below temperature 1", "nearly greedy", "adapters"],
)
def test_rounding_is_no_fault(tiny_model: Path, tmp_path: Path, keys: tuple[str, ...]) -> None:
    run = run_small(tmp_path, tiny_model, "max_steps=1", "actor_train.training_args.learning_rate=0.01", *keys)
    assert len(run.rows) == 1


def test_engines_are_looked_at_twice_and_never_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    from roll.pipelines.rl import engine_check

    check = engine_check.check_engines
    monkeypatch.setattr(engine_check, "check_engines", lambda *args: (looked.append(args[-1]), check(*args)))
    run_small(tmp_path, tiny_model, "max_steps=3")
    assert looked == [0, 1]


def test_bounds_are_those_of_the_coarsest_arithmetic_on_the_way(tmp_path: Path) -> None:
    path = tmp_path
    (path / "config.json").write_text('{"num_hidden_layers": 2, "hidden_size": 32}')

    def bounds(options: Any, dtype: str = "fp32", temperature: float = 1.0, *, on_cpu: bool = True) -> Any:
        args = SimpleNamespace(dtype=dtype)
        worker = SimpleNamespace(model_args=args, strategy_args=SimpleNamespace(strategy_config=options))
        config: Any = SimpleNamespace(
            actor_infer=worker, actor_train=worker, temperature=temperature, model_path=lambda _: path
        )
        return _bounds(config, on_cpu=on_cpu)

    assert bounds(VllmConfig()) == (2e-5, 1e-4)
    assert bounds(VllmConfig(), temperature=0.5) == (4e-5, 2e-4)  # logits are doubled, and so is their rounding
    assert bounds(VllmConfig(), temperature=2.0) == (2e-5, 1e-4)
    assert bounds(VllmConfig(), "bf16").mean == 0.2
    assert bounds(VllmConfig(), on_cpu=False).mean == 0.02
    (path / "config.json").write_text('{"text_config": {"num_hidden_layers": 8, "hidden_size": 2048}}')
    assert bounds(VllmConfig()).mean == pytest.approx(16 * 2e-5)  # sqrt(8 x 2048 / (2 x 32)) = 16
    assert bounds(VllmConfig(quantization="fp8"), "bf16").mean == 1.0
    assert bounds(SglangConfig(engine_args={"quantization": "w8a8_int8"})).mean == 1.0
    assert bounds(VllmConfig(engine_args={"kv_cache_dtype": "fp8"}), "bf16").mean == 1.0
    assert bounds(SglangConfig(engine_args={"kv_cache_dtype": "bf16"})).mean == 0.2  # of keys and values alone
