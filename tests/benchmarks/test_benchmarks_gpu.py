"""What `benchmarks/gpu.py` runs on accelerators, as small as it gets on a CPU, and how it reports what goes wrong."""

from __future__ import annotations

import importlib

import pytest
from printed import rows

from roll.configs.parsing.loader import load_config


def test_the_parts_of_a_train_step(bench):
    assert rows(bench("gpu_parts", "machine"))[:2] == ["what", "torch"]
    assert len(rows(bench("gpu_parts", "head", "--dry-run", "--rounds", 1))) == 3
    assert rows(bench("gpu_parts", "attention", "--dry-run", "--rounds", 1)) == ["rows", "3 of 5", "1 of 16"]
    printed = bench("gpu_parts", "optimizer", "--dry-run", "--rounds", 1)
    assert rows(printed) == ["AdamW", "fused", "foreach", "plain"]
    printed = bench("gpu_parts", "waits", "--dry-run")
    assert "one step of 2 micro-batches" in printed
    assert rows(printed)[0] == "call"
    assert rows(bench("gpu_parts", "sleep", "--dry-run", "--rounds", 1)) == ["way", "to the host", "back"]


def test_a_whole_step_beside_the_roofline(bench):
    printed = bench("gpu_step", "--dry-run")
    assert rows(printed)[-4:] == ["score", "train, gather, optimizer", "sync", "step"]
    assert "mismatch/abs_log_ratio_mean" in printed


@pytest.mark.parametrize(("part", "trains"), [("step", 1), ("apart", 1), ("step8", 8), ("offload", 8), ("apart8", 4)])
def test_the_configuration_for_accelerators_passes_every_check(bench, tmp_path, part, trains):
    bench("gpu_parts", "machine")  # puts the folder of benchmarks on the path
    step = importlib.import_module("gpu_step")
    args = step.parse([*importlib.import_module("gpu").PARTS[part].command[1:]])
    step.write_config(tmp_path, args)
    step.write_prompts(tmp_path, args)
    # Its widths don't matter here.
    importlib.import_module("gpu_model").write_model(args.model, tmp_path / "model", layers=1, vocabulary=1000)
    config = load_config(tmp_path, "step", args.set)
    assert config.actor_infer.strategy_args.strategy_name == "vllm"
    assert config.actor_train.device_mapping == tuple(range(trains))
    first = trains if part.startswith("apart") else 0
    assert config.actor_infer.device_mapping == tuple(range(first, args.gpus))


def test_a_part_that_fails_or_hangs_is_reported_and_the_others_run(bench, tmp_path, monkeypatch, capsys):
    bench("gpu_parts", "machine")
    gpu = importlib.import_module("gpu")
    hangs = "import time; print('began', flush=True); time.sleep(60)"
    parts = {
        "wrong": gpu.Part("Wrong", ("-c", "import sys; sys.exit('the kernel is missing')"), ()),
        "hangs": gpu.Part("Hangs", ("-c", hangs), ()),
        "right": gpu.Part("Right", ("-c", "print('| a |'); print('| 1 |')"), ()),
        "large": gpu.Part("Large", ("-c", "1 / 0"), (), least=8),
    }
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr("sys.argv", ["gpu.py", "--dry-run", "--output", str(tmp_path), "--timeout", "3"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 1
    report = (tmp_path / "report.md").read_text()
    assert "**Failed: exit code 1.**" in report
    assert "the kernel is missing" in report
    assert "stopped after 3.0 s" in report
    assert "| a |\n| 1 |" in report
    assert "Left out: it takes 8 accelerators, here are 1." in report
    assert "failed: wrong, hangs" in capsys.readouterr().out


def test_every_part_is_a_file_that_is_there(bench):
    bench("gpu_parts", "machine")
    gpu = importlib.import_module("gpu")
    files = [part.command[0] for part in gpu.PARTS.values() if part.command[0] != "-m"]
    assert all((gpu.ROOT / name).is_file() for name in files)


def test_without_an_accelerator_it_says_so(bench, monkeypatch):
    bench("gpu_parts", "machine")
    gpu = importlib.import_module("gpu")
    monkeypatch.setattr(gpu, "accelerators", lambda: 0)
    with pytest.raises(SystemExit, match="no accelerator was found by torch; --dry-run shows"):
        bench("gpu")


def test_a_dry_run_of_two_parts_with_one_command(bench, tmp_path):
    with pytest.raises(SystemExit) as ended:
        bench("gpu", "--dry-run", "--parts", "machine", "head", "--output", tmp_path)
    assert ended.value.code == 0
    assert "chunks of" in (tmp_path / "report.md").read_text()
