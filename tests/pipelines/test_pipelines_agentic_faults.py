"""Environments that do what they shouldn't: the step completes, what is lost is counted, and nothing hangs."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter

import pytest
from toy import run_toy
from toy_env import episodes, faulty, write_toy_env

from roll.rollout.episode_groups import AllEpisodesFailed

QUICK = ("env_workers.timeout_s=1", "env_workers.world_size=2", "response_length=1")
STATUS = {"raise": "env_error", "wrong_type": "env_error", "exit": "env_error", "hang": "timeout"}
WORDS = {
    "raise": "KeyError: 'no such letter'",
    "wrong_type": r"returned ('not', 'what', 'was', 'asked', 'for') (tuple)",
    "exit": "its process ended with exit code 3",
    "hang": "took over 1 s",
}


def dropped_lines(folder):
    return [json.loads(line) for line in (folder / "output" / "logs" / "dropped.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("fault", STATUS)
def test_single_members_that_fail_are_counted_and_the_others_are_trained_on(tiny_model, tmp_path, fault):
    folder = write_toy_env(tmp_path, tiny_model)
    share = 0.1 if fault == "hang" else 0.2
    row = run_toy(folder, *QUICK, *faulty(folder, fault, share=share, turns=2), "max_steps=1")[0]
    failed = row[f"rollout/failed_{STATUS[fault]}"]
    assert 1 <= failed < 16
    assert row["rollout/responses"] == 32 - failed
    assert row["group/size_mean"] == (32 - failed) / 4
    assert row["dropped/failed_response"] == failed
    assert row["env/timeouts"] == (failed if fault == "hang" else 0)
    assert row["env/restarts"] == (failed if fault in ("hang", "exit") else 0)
    assert row["env/episodes"] == 32
    for line in dropped_lines(folder):
        assert line["sample"]["status"] == STATUS[fault]
        assert WORDS[fault] in line["detail"], line["detail"]
    assert {episode.status for episode in episodes(folder)} <= {"ok", "truncated"}


@pytest.mark.parametrize("fault", ["raise", "wrong_type", "exit"])
def test_groups_that_never_began_are_replaced_by_others(tiny_model, tmp_path, fault):
    folder = write_toy_env(tmp_path, tiny_model)
    row = run_toy(folder, *QUICK, *faulty(folder, fault, where="reset", share=0.5, turns=1), "max_steps=1")[0]
    lost = row["rollout/failed_groups"]
    assert lost == row["dropped/failed_group"] >= 1
    assert row["rollout/failed_env_error"] == 8 * lost
    assert row["rollout/groups"] == 4
    assert row["group/size_mean"] == 8
    assert row["env/episodes"] == 8 * (4 + lost)
    line = dropped_lines(folder)[0]
    assert set(line["sample"]["statuses"]) == {"env_error"}
    assert line["detail"].startswith("fewer than 2 usable responses")
    assert WORDS[fault] in line["detail"]


def test_redundant_members_take_the_place_of_those_that_fail(tiny_model, tmp_path):
    folder = write_toy_env(tmp_path, tiny_model)
    manager = "train_env_manager={num_env_groups: 4, group_size: 8, group_size_redundancy: 8}"
    row = run_toy(folder, *QUICK, *faulty(folder, "raise", share=0.2, turns=2), manager, "max_steps=1")[0]
    assert row["dropped/failed_response"] == row["rollout/failed_env_error"] >= 1
    assert WORDS["raise"] in dropped_lines(folder)[0]["detail"]
    assert set(Counter(episode.task_id for episode in episodes(folder)).values()) == {8}
    assert row["rollout/surplus_episodes"] + row["rollout/failed_env_error"] == 4 * 8


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Unsteady", "custom_envs.letters: members of the group letters-train-0 were shown different beginnings"),
        ("Deaf", "custom_envs.letters: no response of this step led to an action, e.g. "),
    ],
)
def test_what_makes_training_senseless_is_said_once(tiny_model, tmp_path, caplog, name, message):
    folder = write_toy_env(tmp_path, tiny_model)
    with caplog.at_level(logging.WARNING, logger="roll"):
        run_toy(folder, *QUICK, f"custom_envs.letters.env_type='{folder}/letters.py:{name}'", "max_steps=2")
    warnings = [record.getMessage() for record in caplog.records if "custom_envs.letters: " in record.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].startswith(message)


def test_faults_in_validation_are_counted_and_left_out_of_its_means(tiny_model, tmp_path):
    folder = write_toy_env(tmp_path, tiny_model)
    run = (*QUICK, *faulty(folder, "exit", share=0.2, turns=2), "val_only=true", "val_env_manager.group_size=2")
    row = run_toy(folder, *run, "val_env_manager.generating_args.temperature=1.0")[0]
    assert 1 <= row["val/letters/failed"] == row["val/env_restarts"] < 32
    assert 0 <= row["val/accuracy"] <= 1


ALWAYS = [("raise", "reset"), ("raise", "step"), ("exit", "reset"), ("hang", "step")]


@pytest.mark.parametrize(("fault", "where"), ALWAYS)
def test_an_environment_that_always_fails_ends_the_run_within_seconds_with_its_own_words(
    tiny_model, tmp_path, fault, where
):
    folder = write_toy_env(tmp_path, tiny_model)
    few = ("train_env_manager={num_env_groups: 2, group_size: 2}", "rollout_batch_size=4", "max_num_gen_batches=1")
    few = (*few, "actor_train.training_args.per_device_train_batch_size=4")
    began = time.monotonic()
    with pytest.raises(AllEpisodesFailed) as error:
        run_toy(folder, *QUICK, *few, *faulty(folder, fault, where=where, share=1.0, turns=1))
    assert time.monotonic() - began < 20
    assert WORDS[fault] in str(error.value)
    assert "step 1: each of the 4 episodes that were played failed, the first, " in str(error.value)
    assert dropped_lines(folder)[0]["step"] == 1


def test_an_environment_that_leaks_is_moved_to_a_new_process(tiny_model, tmp_path):
    folder = write_toy_env(tmp_path, tiny_model)
    source = (folder / "letters.py").read_text()
    leak = "        KEPT.append(b'x' * (1 << 20))\n        rng = random"
    (folder / "letters.py").write_text(source.replace("        rng = random", leak, 1) + "\n\nKEPT = []\n")
    limits = ("env_workers.memory_limit_mb=90", "train_env_manager.num_env_groups=1", "max_steps=3")
    rows = run_toy(folder, *limits)
    assert [row["rollout/responses"] for row in rows] == [32, 32, 32]
    assert sum(row["env/recycled"] for row in rows) >= 1
    assert not any("rollout/failed_env_error" in row for row in rows)


def test_a_first_prompt_without_room_for_a_response_is_counted_with_its_length(tiny_model, tmp_path):
    folder = write_toy_env(tmp_path, tiny_model)
    with pytest.raises(AllEpisodesFailed, match="turn 0 has 21 tokens of context .* sequence_length is 20"):
        run_toy(folder, "sequence_length=20", "prompt_length=18", "max_num_gen_batches=1")
    assert set(dropped_lines(folder)[0]["sample"]["statuses"]) == {"truncated"}


@pytest.mark.parametrize("unit", ["trajectory", "step"])
def test_a_context_that_overflows_later_ends_the_episode_and_is_trained_on(tiny_model, tmp_path, unit):
    folder = write_toy_env(tmp_path, tiny_model)
    row = run_toy(folder, "sequence_length=60", f"sample_unit={unit}", "max_steps=1", "eval_steps=1")[0]
    assert row["response/truncated_share"] == 1
    assert row["rollout/responses"] == 32
    assert row["episode/turns_mean"] == pytest.approx(2, abs=0.2)
    assert row["val/accuracy"] == 0
    assert "no room to respond" in episodes(folder)[0].error
    assert row["actor/grad_norm"] > 0
