"""Generation ahead of training, the whole loop: learns as the synchronous one does, and loses no prompt to a kill."""

from __future__ import annotations

import signal
from collections import Counter
from statistics import fmean

import pyarrow.parquet as pq
import pytest
from same_runs import in_process
from toy import metrics_of, run_toy, write_toy

ASYNC = ("executor=ray", "async_generation_ratio=1")


def test_the_toy_is_solved_on_samples_of_older_weights(shared_ray, tiny_model, tmp_path):
    schedule = ("max_steps=30", "eval_steps=30", "val_before_train=true")
    rows = run_toy(write_toy(tmp_path, tiny_model), *ASYNC, "policy_loss=decoupled_ppo", *schedule)
    training = [row for row in rows if row["step"] > 0]
    assert fmean(row["reward/mean"] for row in training[:2]) < 0.4
    assert fmean(row["reward/mean"] for row in training[-3:]) > 0.9
    assert rows[-1]["val/accuracy"] > 0.9 > rows[0]["val/accuracy"]
    assert max(row["staleness/max"] for row in training) == 1
    assert training[0]["staleness/max"] == 0


# One pass over 64 prompts in 8 steps; responses end at different times, and half a batch is ahead.
ONE_PASS = (
    "executor=ray",
    "async_generation_ratio=1.5",
    "train_infer_correction={level: token}",
    "num_train_epochs=1",
    "max_steps=0",
    "save_steps=2",
    "response_length=20",
    "actor_infer.generating_args.ignore_eos=false",
)


def trained_prompts(folder, upto=None):
    """How often each prompt stands in the dumps of the steps."""
    files = sorted((folder / "dump").glob("rollouts-*.parquet"))
    tables = [pq.read_table(file, columns=["step", "task_id", "member"]).to_pylist() for file in files]
    rows = [row for table in tables for row in table if upto is None or row["step"] <= upto]
    assert len({(row["task_id"], row["member"]) for row in rows}) == len(rows), "a response was trained on twice"
    return Counter(row["task_id"] for row in rows)


@pytest.mark.parametrize(("moment", "nth"), [("scoring", 360), ("checkpoint write", 2)])
def test_killed_and_resumed_no_prompt_is_skipped_or_repeated(tiny_model, tmp_path, moment, nth):
    folder = write_toy(tmp_path, tiny_model, rows=64)
    run = (*ONE_PASS, f"rollout_dump_dir={folder / 'dump'}")
    assert in_process(folder, run, moment=moment, nth=nth) == -signal.SIGKILL
    done = metrics_of(folder / "output" / "logs")
    assert 2 <= len(done) < 8, f"killed {moment} after {len(done)} steps: choose another call"
    assert in_process(folder, run, "resume_from_checkpoint=true") == 0
    rows = metrics_of(folder / "output" / "logs")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert max(row["staleness/max"] for row in rows) <= 2
    assert trained_prompts(folder) == dict.fromkeys((f"case:{i}" for i in range(64)), 8)


def test_a_synchronous_run_plays_what_an_asynchronous_one_had_ready_again(shared_ray, tiny_model, tmp_path):
    folder = write_toy(tmp_path, tiny_model, rows=64)
    run = (*ONE_PASS, f"rollout_dump_dir={folder / 'dump'}")
    run_toy(folder, *run, "num_train_epochs=0", "max_steps=2")
    run_toy(folder, *(o for o in run if "async" not in o and "executor" not in o), "resume_from_checkpoint=true")
    assert trained_prompts(folder) == dict.fromkeys((f"case:{i}" for i in range(64)), 8)
