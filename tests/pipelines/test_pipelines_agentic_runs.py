"""Runs with environments: the same seed gives the same episodes, wherever they are played, and after a kill."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
from statistics import fmean

import psutil
import pytest
from same_runs import check_ray_equals_inline, comparable, in_process, logged
from tiny_models import build_tiny_model
from toy import run_toy
from toy_env import CRITIC, SHORT, episodes, faulty, without_template, write_toy_env

NOT_THE_GAME = ("env/restarts", "env/replayed", "env/recycled")

# Everything that has a state: two optimizers, a schedule, shuffled mini-batches, tasks that filters and failures skip.
EVERYTHING = (
    "max_steps=5",
    "save_steps=2",
    "eval_steps=1",
    "sample_unit=concat",
    "custom_envs.letters.history_length=1",
    "adv_estimator=gae",
    "discount_over=turn",
    *CRITIC,
    "ppo_epochs=2",
    "train_env_manager={num_env_groups: 3, group_size: 8, group_size_redundancy: 1, group_filter: {type: std_filter}}",
    "actor_train.training_args.per_device_train_batch_size=16",
    "actor_train.training_args.lr_scheduler_type=cosine",
)


def everything(folder):
    """With environments that fail now and then."""
    return (*EVERYTHING, *faulty(folder, "raise", share=0.05))


def steps_seen(rows):
    """Rows of metrics that say what was played and learnt, and nothing of the processes it was played in."""
    return [{name: value for name, value in row.items() if name not in NOT_THE_GAME} for row in comparable(rows)]


@pytest.fixture(scope="module")
def uninterrupted(tiny_model, tmp_path_factory):
    # In a process of its own like the others: the number of threads is part of what makes the bits.
    folder = write_toy_env(tmp_path_factory.mktemp("agentic") / "whole", tiny_model)
    assert in_process(folder, everything(folder)) == 0
    return folder


def test_the_same_seed_gives_the_same_bits_with_more_environment_processes(uninterrupted, tiny_model, tmp_path):
    again = write_toy_env(tmp_path, tiny_model)
    assert in_process(again, everything(again), "env_workers.world_size=4") == 0
    assert logged(again) == logged(uninterrupted)
    assert episodes(again) == episodes(uninterrupted)
    assert sum(row.get("rollout/failed_env_error", 0) for row in logged(again)) > 0


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


def test_another_seed_gives_other_episodes(uninterrupted, tiny_model, tmp_path):
    run_toy(write_toy_env(tmp_path, tiny_model), *everything(tmp_path), "seed=4", "max_steps=1")
    mine = {tuple(row.token_ids) for row in episodes(tmp_path)}
    assert len(mine & {tuple(row.token_ids) for row in episodes(uninterrupted)}) < len(mine) / 2


@pytest.mark.parametrize(("moment", "nth"), [("environment", 500), ("checkpoint write", 2)])
def test_killed_and_resumed_equals_never_killed(uninterrupted, tiny_model, tmp_path, moment, nth):
    killed, rows = write_toy_env(tmp_path, tiny_model), logged(uninterrupted)
    assert in_process(killed, everything(killed), moment=moment, nth=nth) == -signal.SIGKILL
    done = logged(killed)
    assert 1 < len(done) < len(rows), f"killed {moment} after {len(done)} steps: choose another call"
    assert in_process(killed, everything(killed), "resume_from_checkpoint=auto") == 0
    assert logged(killed) == rows
    assert episodes(killed) == episodes(uninterrupted)
    assert not orphans()


def orphans():
    """Processes of environments that nobody owns any more."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended, or is a zombie that nobody has waited for yet
            if process.ppid() == 1 and "roll.envs.env_worker" in " ".join(process.cmdline()):
                found.append(process)
    return found


# --- other executors, engines and backends ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def plain_model(tiny_model, tmp_path_factory):
    return without_template(tiny_model, tmp_path_factory.mktemp("plain") / "llama")


def test_ray_with_two_data_parallel_ranks_plays_and_learns_what_one_process_does(tiny_model, tmp_path):
    settings = ("max_steps=3", "actor_train.training_args.per_device_train_batch_size=16", "sample_unit=step")
    check_ray_equals_inline(
        tiny_model,
        tmp_path,
        (*settings, "actor_train.training_args.gradient_accumulation_steps=2"),
        "actor_infer.device_mapping='0-1'",
        "env_workers.world_size=2",
        names=("actor/loss", "reward/mean", "env/letters/actions"),
        write=write_toy_env,
    )
    mine, theirs = episodes(tmp_path / "inline"), episodes(tmp_path / "ray")
    assert [(row.task_id, row.member, row.token_ids) for row in mine] == [
        (row.task_id, row.member, row.token_ids) for row in theirs
    ]


ASYNC = ("executor=ray", "async_generation_ratio=1", "policy_loss=decoupled_ppo")


def test_the_game_is_learnt_on_episodes_of_older_weights_from_environments_that_fail(plain_model, tmp_path):
    folder = write_toy_env(tmp_path, plain_model)
    run = (*ASYNC, SHORT[0], "save_steps=15", *faulty(folder, "exit", share=0.01, turns=2), "val_before_train=true")
    run_toy(folder, *run, "max_steps=15")
    rows = run_toy(folder, *run, "max_steps=35", "eval_steps=35", "resume_from_checkpoint=true")
    training = [row for row in rows if row["step"] > 0]
    assert [row["step"] for row in rows] == list(range(36))
    assert fmean(row["env/letters/success"] for row in training[:2]) < 0.2
    assert fmean(row["env/letters/success"] for row in training[-3:]) > 0.7
    assert rows[-1]["val/accuracy"] > 0.7 > rows[0]["val/accuracy"]
    assert max(row["staleness/max"] for row in training) == 1
    assert sum(row["env/restarts"] for row in training) > 0
    assert sum(row.get("rollout/failed_env_error", 0) for row in training) > 0
    played = [(row.task_id, row.member) for row in episodes(folder)]
    assert len(set(played)) == len(played), "an episode was trained on twice"
    numbers = {int(task.rpartition("-")[2]) for task, _ in played}
    assert numbers == set(range(35 * 8)), "what was ready, or under way, at the checkpoint is lost or was skipped"


ACTOR = "actor_train.strategy_args.strategy_name"


@pytest.mark.parametrize("unit", ["trajectory", "step"])
@pytest.mark.parametrize("backend", ["deepspeed_train", "megatron_train"])
def test_every_backend_takes_the_steps_that_fsdp2_takes(tiny_model, tmp_path, backend, unit):
    run = ("max_steps=2", f"sample_unit={unit}", "actor_train.training_args.adam_epsilon=1e-4")
    expected = run_toy(write_toy_env(tmp_path / "fsdp2", tiny_model), *run)
    rows = run_toy(write_toy_env(tmp_path / "other", tiny_model), *run, f"{ACTOR}={backend}")
    for row, other in zip(rows, expected, strict=True):
        assert row["mismatch/kl"] < 1e-9
        for name in ("reward/mean", "actor/loss", "actor/grad_norm", "actor/optimizer_steps"):
            assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


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
