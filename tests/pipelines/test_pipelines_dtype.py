"""`dtype: auto` in runs: one type for all roles, said at the start, kept in checkpoints, taken from them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import yaml
from toy import config_of, run_toy, write_toy

from roll.checkpoint.files import read_manifest
from roll.cli.__main__ import main
from roll.configs.checks.machine_checks import Machine
from roll.configs.parsing.loader import load_config
from roll.distributed.cluster import Executor
from roll.pipelines.check_process import StartCheck
from roll.pipelines.run import clusters, run_dtype
from roll.pipelines.run.run_dtype import foreseen, settled
from roll.strategies.engines.hf.hf_infer import HfInfer
from roll.strategies.hf.fsdp2 import Fsdp2Strategy
from roll.utils.processor import AMD, Processor

AUTO = ("actor_train.model_args.dtype=auto", "++actor_infer.model_args.dtype=auto")
NEW, OLD = (Machine(processor=Processor(AMD, frozenset({"avx2", *more}))) for more in ({"avx512_bf16"}, ()))
FP32 = "dtype: auto is fp32 for actor_train, actor_infer: the processor of this machine has neither avx512_bf16 nor"
BF16 = "dtype: auto is bf16 for actor_train, actor_infer: the processor of this machine has avx512_bf16"


@pytest.fixture
def on(monkeypatch):
    """`on(machine)` has runs start on such a machine."""
    return lambda machine: monkeypatch.setattr(run_dtype, "this_machine", lambda: machine)


def started(caplog) -> list[str]:
    """Lines about types that runs have begun with since the last call."""
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("dtype: ")]
    caplog.clear()
    return lines


def stored(folder: Path, step: int) -> dict[str, str]:
    return read_manifest(folder / "output" / "checkpoints" / f"checkpoint-{step}").meta["dtypes"]


def config_of_unchecked(folder: Path, *overrides: str):
    return load_config(folder, "toy", overrides, check=False)


def test_a_run_says_and_stores_its_type_and_a_resumed_one_takes_it_on_another_processor(
    on, tiny_model, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    folder = write_toy(tmp_path, tiny_model)
    on(NEW)
    first = run_toy(folder, *AUTO, "max_steps=2", "save_steps=2")
    assert started(caplog) == [BF16]
    assert stored(folder, 2) == {"actor_train": "bf16", "actor_infer": "bf16"}
    kept = yaml.safe_load((folder / "output" / "config.yaml").read_text())
    assert [kept[role]["model_args"]["dtype"] for role in ("actor_train", "actor_infer")] == ["bf16", "bf16"]
    # Engine and trainer round each in its own way, which every step measures; in fp32 they differ by 1e-12.
    assert all(1e-8 < row["mismatch/kl"] < 1e-2 for row in first if "mismatch/kl" in row)
    assert sum("mismatch/kl" in row for row in first) == 2

    on(OLD)
    line = (
        f"dtype: auto is bf16 for actor_train, actor_infer: {folder}/output/checkpoints/checkpoint-2 was written so; a "
        "new run would take fp32, because the processor of this machine has neither avx512_bf16 nor amx_bf16"
    )
    resumes = (*AUTO, "max_steps=3", "save_steps=3", "resume_from_checkpoint=true")
    assert foreseen(config_of(folder, *resumes)) == line
    run_toy(folder, *resumes)
    assert started(caplog) == [line]
    assert stored(folder, 3) == {"actor_train": "bf16", "actor_infer": "bf16"}


def test_a_run_that_starts_at_its_first_step_chooses_by_its_machine(on, tiny_model, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    folder = write_toy(tmp_path, tiny_model)
    on(OLD)
    run_toy(folder, *AUTO, "max_steps=1", "save_steps=1")
    assert started(caplog)[0].startswith(FP32)
    on(NEW)
    ways = {
        "fp32": ("auto", "true", "best", "checkpoint-1", str(tmp_path / "output" / "checkpoints" / "checkpoint-1")),
        "bf16": ("false", "checkpoint-9"),
    }
    for dtype, values in ways.items():
        for value in values:
            config = config_of_unchecked(folder, *AUTO, f"resume_from_checkpoint={value}")
            assert settled(config).actor_train.model_args.dtype == dtype, value
    weights = ("resume_from_checkpoint=checkpoint-1", "checkpoint_config.load_contents=[model]")
    assert settled(config_of_unchecked(folder, *AUTO, *weights)).actor_train.model_args.dtype == "bf16"


def test_a_checkpoint_that_is_elsewhere_says_its_type_before_it_is_downloaded(on, tiny_model, tmp_path):
    folder = write_toy(tmp_path / "one", tiny_model)
    store = f"checkpoint_config.output_dir=file://{tmp_path}/store"
    on(NEW)
    run_toy(folder, *AUTO, store, "max_steps=1", "save_steps=1")
    on(OLD)
    other = write_toy(tmp_path / "two", tiny_model)
    named = f"resume_from_checkpoint=file://{tmp_path}/store/checkpoint-1"
    for resume in ((store, "resume_from_checkpoint=auto"), (named,)):
        config = config_of_unchecked(other, *AUTO, *resume)
        assert settled(config).actor_infer.model_args.dtype == "bf16"
        assert foreseen(config).startswith(FP32)  # a check asks no store


class Cluster(Executor):
    """Two machines, the second of which is older."""

    def __init__(self) -> None:
        self._clusters = []

    def _start(self, *_):
        raise NotImplementedError

    def on_each_machine(self, function, *args, roles=None):
        return {"10.0.0.1": NEW, "10.0.0.2": OLD}


def test_the_machines_of_a_cluster_are_asked_once_and_all_roles_get_one_type(
    on, tiny_model, tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    asked = []
    monkeypatch.setattr(clusters, "open_executor", lambda _config, roles: asked.append(len(roles)) or Cluster())
    on(NEW)  # the controller's own
    config = config_of_unchecked(write_toy(tmp_path, tiny_model), *AUTO, "num_nodes=2", "executor=ray")
    assert foreseen(config) == (
        "dtype: auto of actor_train, actor_infer is chosen when the run has joined its 2 machines"
    )
    result = settled(config)
    assert [worker.model_args.dtype for worker in result.roles.values()] == ["fp32", "fp32"]
    assert asked == [2]
    assert started(caplog) == [
        "dtype: auto is fp32 for actor_train, actor_infer: the processor of 10.0.0.2 has neither avx512_bf16 nor "
        "amx_bf16"
    ]
    assert settled(result) is result
    assert not started(caplog)


def test_accelerators_that_are_hidden_from_a_run_dont_choose_its_type(on, tiny_model, tmp_path, monkeypatch):
    config = config_of_unchecked(write_toy(tmp_path, tiny_model), *AUTO)
    on(Machine(accelerators=("NVIDIA H100",), processor=OLD.processor))
    for visible, dtype in (("0", "bf16"), ("", "fp32"), ("-1", "fp32")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert settled(config).actor_train.model_args.dtype == dtype
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert settled(config).actor_train.model_args.dtype == "bf16"


def test_check_shows_the_choice_among_the_plan(on, tiny_model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(StartCheck, "violations", lambda *_: ())  # tokenizer and rows are of no concern here
    folder = write_toy(tmp_path, tiny_model)
    on(NEW)
    assert main(["check", str(folder / "toy.yaml"), *AUTO]) == 0
    assert BF16 in capsys.readouterr().out.splitlines()
    assert main(["check", str(folder / "toy.yaml")]) == 0
    assert "dtype: " not in capsys.readouterr().out


def test_bf16_trains_float32_weights_on_a_processor_and_samples_from_a_bf16_copy(on, tiny_model, tmp_path, monkeypatch):
    types: dict[str, set[torch.dtype]] = {"weights": set(), "gradients": set(), "moments": set(), "decoded": set()}
    apply, poll = Fsdp2Strategy._apply, HfInfer.poll

    def applied(self, *args, **kwargs):
        types["gradients"] |= {p.grad.dtype for p in self._module.parameters() if p.grad is not None}
        outcome = apply(self, *args, **kwargs)
        types["weights"] |= {p.dtype for p in self._module.parameters()}
        for state in (state for optimizer in self._optimizers for state in optimizer.state.values()):
            types["moments"] |= {value.dtype for name, value in state.items() if name.startswith("exp_avg")}
        return outcome

    def polled(self, *args, **kwargs):
        types["decoded"] |= {p.dtype for p in self._model.parameters()} | {self._decode_step._embedding.dtype}
        return poll(self, *args, **kwargs)

    monkeypatch.setattr(Fsdp2Strategy, "_apply", applied)
    monkeypatch.setattr(HfInfer, "poll", polled)
    on(NEW)
    rows = run_toy(write_toy(tmp_path, tiny_model), *AUTO, "max_steps=1")
    wide = {torch.float32}
    assert types == {"weights": wide, "gradients": wide, "moments": wide, "decoded": {torch.bfloat16}}
    assert rows[-1]["actor/grad_norm"] > 0
