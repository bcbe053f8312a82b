"""Runs with environments: the same seed gives the same episodes, wherever they are played, and after a kill."""

from __future__ import annotations

import importlib.util
import json
from statistics import fmean

import pytest
from same_runs import comparable
from tiny_models import build_tiny_model
from toy import run_toy
from toy_env import SHORT, episodes, faulty, without_template, write_toy_env


# Everything that has a state: two optimizers, a schedule, shuffled mini-batches, tasks that filters and failures skip.
def test_environments_wait_for_room_in_the_same_order_in_one_process_or_in_several(tiny_model, tmp_path):
    # Room for six episodes; a group has eight, and a redundant one.
    manager = "train_env_manager={num_env_groups: 4, group_size: 8, group_size_redundancy: 1}"
    run = ("max_steps=2", "eval_steps=2", manager)
    seen = []
    for processes, each in ((1, 6), (3, 2)):
        folder = write_toy_env(tmp_path / str(processes), tiny_model)
        room = (f"env_workers.world_size={processes}", f"env_workers.max_env_num_per_worker={each}")
        seen.append((comparable(run_toy(folder, *run, *room)), episodes(folder)))
    assert seen[0] == seen[1]
    assert seen[0][0][-1]["rollout/responses"] == 32


# --- other executors, engines and backends ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def plain_model(tiny_model, tmp_path_factory):
    return without_template(tiny_model, tmp_path_factory.mktemp("plain") / "llama")


ASYNC = ("executor=ray", "async_generation_ratio=1", "policy_loss=decoupled_ppo")


def test_the_game_is_learnt_on_episodes_of_older_weights_from_environments_that_fail(shared_ray, plain_model, tmp_path):
    folder = write_toy_env(tmp_path, plain_model)
    # At a steady rate what was learnt early is forgotten now and then: the rate falls over the 90 optimizer steps.
    falls = "learning_rate: 7.0e-3, lr_scheduler_type: linear, min_lr_ratio: 0.1, lr_decay_steps: 90"
    steady = f"actor_train.training_args={{{falls}}}"
    fault = faulty(folder, "exit", share=0.01, turns=2)
    run = (*ASYNC, SHORT[0], steady, "save_steps=15", *fault, "val_before_train=true")
    run_toy(folder, *run, "max_steps=15")
    rows = run_toy(folder, *run, "max_steps=45", "eval_steps=45", "resume_from_checkpoint=true")
    training = [row for row in rows if row["step"] > 0]
    assert [row["step"] for row in rows] == list(range(46))
    assert fmean(row["env/letters/success"] for row in training[:2]) < 0.2
    assert fmean(row["env/letters/success"] for row in training[-10:]) > 0.7
    assert rows[-1]["val/accuracy"] > 0.7 > rows[0]["val/accuracy"]
    assert max(row["staleness/max"] for row in training) == 1
    assert sum(row["env/restarts"] for row in training) > 0
    assert sum(row.get("rollout/failed_env_error", 0) for row in training) > 0
    played = [(row.task_id, row.member) for row in episodes(folder)]
    assert len(set(played)) == len(played), "an episode was trained on twice"
    records = map(json.loads, (folder / "output/logs/dropped.jsonl").read_text().splitlines())
    dropped = [record["item"] for record in records if record["reason"] == "failed_group"]
    numbers = {int(task.rpartition("-")[2]) for task in [*(task for task, _ in played), *dropped]}
    assert numbers == set(range(len(numbers))), "what was ready, or under way, at the checkpoint is lost or was skipped"
    assert len(numbers) == 45 * 8 + len(dropped), "a group that was dropped is replaced once"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm, which isn't installed")
def test_vllm_carries_tokens_and_resets_the_context_as_the_trainer_does(tmp_path):
    model = build_tiny_model(tmp_path / "model", "llama", hidden=128)
    engine = "actor_infer.strategy_args={strategy_name: vllm, strategy_config: {kv_cache_memory_bytes: 67108864}}"
    folder = write_toy_env(tmp_path, model)
    run = (engine, "sample_unit=concat", "custom_envs.letters.history_length=1", "max_steps=2", "eval_steps=2")
    rows = run_toy(folder, *run)
    for row in rows:
        assert (row["rollout/responses"], row["rollout/rows"]) == (32, 64)
        assert row["mismatch/kl"] < 1e-6
        assert row["mismatch/ratio_max"] < 1.01
    assert rows[-1]["val/responses"] >= 16 * 3
