"""The command that users type, from YAML to exit code."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rows import make_config
from toy import metrics_of, write_toy

from roll.cli.__main__ import main
from roll.cli.train import start_pipeline
from roll.configs.schema.training_args import TrainingArgs
from roll.configs.schema.worker_config import ActorTrainConfig
from roll.pipelines import choose_products, load_pipeline
from roll.pipelines.run import clusters
from roll.pipelines.run.clusters import ray_address

START = Path(__file__).parents[2] / "examples" / "start_pipeline.py"


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(START), "--config_path", str(folder), "--config_name", "toy", *arguments]
    # From another directory: nothing may depend on where the command is typed.
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, check=False)


@pytest.mark.parametrize(("executor", "expected"), [("inline", "5000"), ("ray", None)])
def test_threads_of_a_process_that_computes_alone_spin_for_a_moment(monkeypatch, executor, expected):
    config = SimpleNamespace(executor=executor, pipeline="rlvr")
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    load_pipeline(config)
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert os.environ.get("GOMP_SPINCOUNT") == expected
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    load_pipeline(config)
    assert os.environ["GOMP_SPINCOUNT"] == "7"


@pytest.mark.parametrize(
    ("vendor", "flags", "expected"),
    [
        ("AuthenticAMD", "fma avx avx2", "AVX2"),
        ("AuthenticAMD", "fma avx avx2 avx512f avx512_bf16", None),  # not measured there
        ("AuthenticAMD", "avx", None),
        ("GenuineIntel", "fma avx avx2", None),
    ],
)
def test_products_take_the_code_for_avx2_on_an_amd_processor_that_has_no_more(
    monkeypatch, tmp_path, vendor, flags, expected
):
    processors = tmp_path / "cpuinfo"
    processors.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\n\n")
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    choose_products(processors)
    assert os.environ["MKL_CBWR"] == "COMPATIBLE"
    monkeypatch.delenv("MKL_CBWR")
    choose_products(processors.with_name("absent"))
    assert "MKL_CBWR" not in os.environ
    choose_products(processors)
    assert os.environ.get("MKL_CBWR") == expected


def test_a_run_prints_a_row_a_step_and_a_summary_and_leaves_its_files(tiny_model, tmp_path):
    folder = write_toy(tmp_path, tiny_model)
    run = start(
        folder,
        "track_with=[stdout,jsonl,tensorboard]",
        "max_steps=3",
        "save_steps=3",
        "eval_steps=3",
        "val_before_train=true",
        "checkpoint_config.save_hf_model=true",
        "log_val_generations=1",
    )
    assert run.returncode == 0, run.stderr
    assert [line.split("  ")[0] for line in run.stdout.splitlines() if line.startswith("step ")] == [
        "step 0",
        "step 1",
        "step 2",
        "step 3",
    ]
    for text in ("old log-probs come from: update", "held-out accuracy", "where the time went", "checkpoint-3"):
        assert text in run.stderr
    assert [row["step"] for row in metrics_of(folder / "output" / "logs")] == [0, 1, 2, 3]
    assert list((folder / "output" / "logs" / "tensorboard").iterdir())
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = folder / "output" / "checkpoints" / "checkpoint-3" / "hf_model"
    AutoModelForCausalLM.from_pretrained(exported)
    AutoTokenizer.from_pretrained(exported)


def test_the_command_runs_what_the_script_runs(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(write_toy(tmp_path, tiny_model))
    assert main(["train", "toy", "max_steps=1", "output_dir=one"]) == 0
    assert start_pipeline(["--config_name", "toy", "max_steps=1", "output_dir=other"], tmp_path) == 0
    (one,), (other,) = metrics_of(tmp_path / "one" / "logs"), metrics_of(tmp_path / "other" / "logs")
    measured = ("time/", "throughput/", "memory/", "sync/")
    assert {key: value for key, value in one.items() if not key.startswith(measured)} == {
        key: value for key, value in other.items() if not key.startswith(measured)
    }


FILTER = "rewards.case.query_filter_config.type=mean_filter"


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("prompt_length=1",), 2, "more than prompt_length = 1 tokens"),
        (("resume_from_checkpoint=true",), 2, "checkpoint"),
        (("max_num_gen_batches=1", FILTER, "response_length=1"), 1, "kept"),
    ],
)
def test_a_failure_is_a_few_lines_and_its_traceback_is_in_a_file(
    tiny_model, tmp_path, capfd, arguments, code, expected
):
    folder = write_toy(tmp_path, tiny_model)
    if code == 1:  # with all that had been started
        run = start(folder, *arguments)
        status, errors = run.returncode, run.stderr
    else:
        status = start_pipeline(["--config_path", str(folder), "--config_name", "toy", *arguments], folder)
        errors = capfd.readouterr().err
    assert status == code, errors
    assert "error: " in errors or "problem" in errors
    assert expected in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(("nodes", "address"), [(1, None), (2, "auto")])
def test_a_run_on_several_machines_joins_the_ray_cluster_that_spans_them(nodes, address):
    assert ray_address(make_config(num_nodes=nodes)) == address


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_start_says_once_how_weights_would_stay_within_machines(monkeypatch, caplog, nodes):
    def refuse(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(clusters, "make_executor", refuse)
    actor = ActorTrainConfig(device_mapping=(0, 1, 2, 3), training_args=TrainingArgs(per_device_train_batch_size=1))
    config = make_config(num_nodes=nodes, num_gpus_per_node=4 // nodes, actor_train=actor)
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(KeyboardInterrupt),
        clusters.start_clusters(config, total_steps=1),
    ):
        pass
    said = [record.getMessage() for record in caplog.records if "fsdp_size" in record.getMessage()]
    assert len(said) == nodes - 1
    assert all("actor_train.strategy_args.strategy_config.fsdp_size=2 would keep a copy" in line for line in said)
