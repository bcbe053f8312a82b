"""What other people's data, rewards, tokenizers, habits and machines do to a run."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time

import psutil
import pytest
from tiny_models import build_tiny_model
from toy import metrics_of, run_toy, write_toy

from roll.distributed.worker_errors import WorkerDied, WorkerRefused
from roll.rollout.episode_groups import FilterBudgetExhausted
from roll.utils.locking import run_lock
from roll.utils.readers import DataError

SIZES = ("actor_train.training_args.per_device_train_batch_size=40", "rollout_batch_size=5")
EPOCH = ("max_steps=0", "num_train_epochs=1", *SIZES[:1], "actor_train.training_args.gradient_accumulation_steps=1")

# Prompts from 5 upwards have responses of equal score, which std_filter drops: 16 rows give one batch, not three.
HALF = "def case(response, task):\n    return float(response[:1].islower()) if task.payload['prompt'] < '5' else 0.0\n"


def toy_with(folder, model, reward):
    write_toy(folder, model)
    (folder / "case_reward.py").write_text(reward)
    return folder


@pytest.mark.parametrize(
    ("overrides", "validated_in"),
    [
        (("eval_steps=1",), 1),
        (("eval_steps=9",), 2),  # step 1 has its row already: the validation has the row of the step that never was
        (("eval_steps=9", "logging_steps=9"), 1),
        (("logging_steps=9",), None),
    ],
)
def test_tasks_that_run_out_early_end_the_run_with_all_that_is_due_at_its_end(
    tiny_model, tmp_path, overrides, validated_in
):
    folder = toy_with(tmp_path, tiny_model, HALF)
    dropping = "rewards.case.query_filter_config.type=std_filter"
    rows = run_toy(folder, *EPOCH, SIZES[1], dropping, "save_steps=9", *overrides)
    assert rows[0]["step"] == 1
    assert "actor/loss" in rows[0]
    assert [row["step"] for row in rows if "val/accuracy" in row] == ([validated_in] if validated_in else [])
    assert [path.name for path in (folder / "output" / "checkpoints").glob("checkpoint-*")] == ["checkpoint-1"]


def test_epochs_that_are_shorter_than_a_step_are_refused(tiny_model, tmp_path):
    with pytest.raises(DataError, match="give 16 prompts, fewer than one step takes: rollout_batch_size is 20"):
        run_toy(write_toy(tmp_path, tiny_model), *EPOCH, "rollout_batch_size=20")


def test_a_reward_that_always_fails_ends_the_run_with_its_own_words(tiny_model, tmp_path):
    folder = toy_with(tmp_path, tiny_model, "def case(response, task):\n    raise KeyError('no such answer')\n")
    with pytest.raises(FilterBudgetExhausted, match="KeyError: 'no such answer'"):
        run_toy(folder, "max_num_gen_batches=1")
    dropped = [json.loads(line) for line in (folder / "output" / "logs" / "dropped.jsonl").read_text().splitlines()]
    assert "no such answer" in dropped[0]["detail"]
    assert dropped[0]["step"] == 1


def test_a_tokenizer_without_special_tokens_will_do(tiny_model, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    for name in ("pad_token", "bos_token", "eos_token", "additional_special_tokens", "extra_special_tokens"):
        config.pop(name, None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "special_tokens_map.json").unlink(missing_ok=True)
    folder = write_toy(tmp_path, model)
    rows = [
        {"tag": "case", "prompt": "x" * n, "ground_truth": "lower"} for n in range(1, 9)
    ]  # lengths differ, so prompts are padded
    (folder / "case.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run_toy(folder, "max_steps=1")[0]["prompt/length_max"] == 8


def test_a_checkpoint_of_another_model_is_refused_in_a_line(tiny_model, tmp_path):
    folder = write_toy(tmp_path, tiny_model)
    run_toy(folder, "max_steps=1", "save_steps=1")
    wider = build_tiny_model(tmp_path / "wider", hidden=48)
    with pytest.raises(WorkerRefused, match=r"doesn't fit the model of actor_train: Size mismatch.*32.*48") as error:
        run_toy(folder, "max_steps=2", "resume_from_checkpoint=auto", f"pretrain={wider}")
    assert len(str(error.value)) < 500


def test_a_second_run_in_the_same_folder_is_refused_and_disturbs_nothing(tiny_model, tmp_path):
    folder = write_toy(tmp_path, tiny_model)
    (folder / "makes.py").write_text(f"def make(config):\n    open({str(tmp_path / 'made')!r}, 'x').close()\n")
    run_toy(folder, "max_steps=1")
    before = metrics_of(folder / "output" / "logs")
    with (
        run_lock({"output_dir": folder / "output"}),
        pytest.raises(ValueError, match="another run is writing to .*output; give each run its own output_dir"),
    ):
        run_toy(folder, "max_steps=1", f"prepare={folder / 'makes.py'}:make")
    assert metrics_of(folder / "output" / "logs") == before
    assert not (tmp_path / "made").exists(), "what the first run reads isn't written anew"


def test_a_new_run_tells_of_checkpoints_that_are_not_its_own(tiny_model, tmp_path, caplog):
    folder = write_toy(tmp_path, tiny_model)
    run_toy(folder, "max_steps=1", "save_steps=1")
    with caplog.at_level(logging.WARNING, logger="roll"):
        run_toy(folder, "max_steps=1")
    assert "checkpoint-1 is there from an earlier run" in caplog.text
    run_toy(folder, "max_steps=2", "save_steps=2", "checkpoint_config.max_to_keep=1")
    root = folder / "output" / "checkpoints"
    saved = {str(path.relative_to(root)) for path in root.rglob("checkpoint-*")}
    assert saved == {"earlier.1/checkpoint-1", "checkpoint-2"}  # max_to_keep counts its own


def test_a_resumed_run_speaks_of_its_own_steps_and_a_finished_one_of_none(tiny_model, tmp_path, caplog, capsys):
    folder = write_toy(tmp_path, tiny_model)
    run_toy(folder, "max_steps=2", "save_steps=1")
    for more, said in (("max_steps=3", ": 1 steps in"), ("max_steps=2", ": 0 steps in")):
        capsys.readouterr()
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="roll"):
            run_toy(folder, more, "resume_from_checkpoint=auto")
        assert said in capsys.readouterr().err
        assert ("nothing is left to do" in caplog.text) == (more == "max_steps=2")


def test_ctrl_c_ends_episodes_and_engine_threads(tiny_model, tmp_path, monkeypatch):
    folder = write_toy(tmp_path, tiny_model)
    complaints: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: complaints.append(repr(event.exc_value)))

    def press():
        wait_for_rows(folder, 2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_toy(folder, "max_steps=100000", "response_length=60")
    finally:
        signal.signal(signal.SIGINT, before)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("actor_infer")]
    gc.collect()
    assert not complaints


def wait_for_rows(folder, count):
    path = folder / "output" / "logs" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not path.exists() or path.read_text().count("\n") < count):
        time.sleep(0.02)


def worker_processes():
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it may end while it is looked at
            if "WorkerShell" in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_an_engine_process_that_is_killed_is_named_within_seconds_and_leaves_nothing(tiny_model, tmp_path):
    folder = write_toy(tmp_path, tiny_model)
    killed: dict[str, float] = {}

    def kill():
        wait_for_rows(folder, 2)
        engine = max(worker_processes(), key=lambda process: process.create_time())  # the last role to start
        killed.update(pid=engine.pid, at=time.monotonic())
        engine.kill()

    threading.Thread(target=kill).start()
    with pytest.raises(WorkerDied, match=r"actor_infer rank 0 died during '\w+' \(process \d+") as error:
        run_toy(folder, "executor=ray", "max_steps=100000", "response_length=40")
    assert time.monotonic() - killed["at"] < 20
    assert f"process {killed['pid']}" in str(error.value)
    assert not worker_processes()
