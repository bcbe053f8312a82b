"""Runs in which several agents share an episode: credit by role, who is trained, the same seed, and after a kill."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import pytest
from same_runs import in_process, logged
from toy import run_toy
from toy_env import YAML, episodes

SELF_PLAY = "{{env_type: '{folder}/duel.py:Duel', action_pattern: null, system_template: '{{role}}', max_steps: 4}}"
NOT_THE_GAME = ("env/restarts", "env/replayed", "env/recycled")


def write_duel(folder: Path, model: Path) -> Path:
    """Write a run of the duel into `folder`; validation plays x against a word, and with places by seed."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("toy_duel.py"), folder / "duel.py")
    before, _, rest = YAML.partition("custom_envs:\n")
    _, _, after = rest.partition("\n")
    against = "roles: {{o: {{player: '{folder}/duel.py:Says', player_config: {{word: '~'}}}}}}, swap_roles: true}}"
    environments = f"  self_play: {SELF_PLAY}\n  against: {SELF_PLAY[:-2]}, {against}\n"
    after = after.replace(
        "{{num_env_groups: 4, group_size: 8}}", "{{tags: self_play, num_env_groups: 4, group_size: 8}}"
    )
    after = after.replace("{{num_env_groups: 16,", "{{tags: against, num_env_groups: 16,")
    text = f"{before}custom_envs:\n{environments}{after}"
    (folder / "toy.yaml").write_text(text.format(output=folder / "output", model=model, folder=folder))
    return folder


def test_each_role_is_compared_with_itself_in_the_other_members(tiny_model, tmp_path):
    folder = write_duel(tmp_path, tiny_model)
    rows = run_toy(folder, "max_steps=1", "reward_normalization.method=mean")
    played = defaultdict(list)
    for row in episodes(folder):
        played[row.task_id].append(row)
    assert len(played) == 8 and all(len(members) == 8 for members in played.values()), "a group for each role"
    rewards: dict[str, list[float]] = {"x": [], "o": []}
    for task, members in played.items():
        rewards[task.rpartition("@")[2]] += [row.reward for row in members]
        mean = fmean(row.reward for row in members)
        for row in members:
            chosen = [a for a, acting in zip(row.advantages, row.action_mask, strict=True) if acting]
            assert chosen == pytest.approx([row.reward - mean] * len(chosen), abs=1e-6)
            shown = [int(number) for number in re.findall(r"user\n(\d)=<", row.prompt + row.response)]
            assert shown in ([0, 2], [1, 3]), "its own turns, and nothing of the other role's"
    # Both rounds are zero-sum, and the four steps pay 0.125 to everybody.
    assert fmean(rewards["x"]) + fmean(rewards["o"]) == pytest.approx(2 * 4 * 0.125)
    assert {round(reward - 0.5) for role in rewards.values() for reward in role} == {-2, 0, 2}
    last = rows[-1]
    assert last["role/self_play/x/reward"] == pytest.approx(fmean(rewards["x"]))
    # A response of special tokens alone is no action: that role has another turn.
    assert last["role/self_play/o/turns"] == pytest.approx(2, abs=0.3)
    assert last["mismatch/kl"] < 1e-9


def test_a_shared_reward_compares_whole_episodes(tiny_model, tmp_path):
    folder = write_duel(tmp_path, tiny_model)
    rows = run_toy(folder, "max_steps=1", "++custom_envs.self_play.role_rewards=shared")
    played = episodes(folder)
    assert len({row.task_id for row in played}) == 4 and len(played) == 64, "a row for each role, one group"
    assert {row.reward for row in played} == {0.5}  # four steps of 0.125, and nothing of a zero-sum game
    assert rows[-1]["rollout/responses"] == 32


def test_validation_against_a_fixed_player_counts_the_policys_roles(tiny_model, tmp_path):
    sampled = "val_env_manager.generating_args.temperature=1.0"
    rows = run_toy(write_duel(tmp_path, tiny_model), "max_steps=1", "eval_steps=1", sampled)
    last = rows[-1]
    won = [last[f"val/against/role/{role}/success"] for role in ("x", "o")]
    assert min(won) >= 0 and max(won) < 0.5, "hardly anything comes after ~"
    assert last["val/against/role/x/turns"] == pytest.approx(2, abs=0.3)
    assert last["val/against/reward"] < 0.5


def test_episodes_are_written_with_the_role_of_each_turn(tiny_model, tmp_path):
    folder = write_duel(tmp_path, tiny_model)
    sampled = "val_env_manager.generating_args.temperature=1.0"
    tags = "val_env_manager.tags=[self_play]"
    run_toy(folder, "val_only=true", sampled, tags, "log_val_generations=1")
    lines = [json.loads(line) for line in (folder / "output" / "episodes.jsonl").read_text().splitlines()]
    assert all({turn["role"] for turn in line["turns"]} == {"x", "o"} for line in lines)
    (sample,) = [json.loads(line) for line in (folder / "output" / "logs" / "samples.jsonl").read_text().splitlines()]
    first, second = sample["prompt"][1], "xo"["ox".index(sample["prompt"][1])]
    assert sample["prompt"].startswith(f"[{first}] ") and sample["response"].count(f"\n[{second}] ") == 1


EVERYTHING = (
    "max_steps=4",
    "save_steps=2",
    "eval_steps=2",
    "adv_estimator=gigpo",
    "sample_unit=concat",
    "++custom_envs.self_play.history_length=1",
    "++custom_envs.against.history_length=1",
    "ppo_epochs=2",
    "train_env_manager={tags: self_play, num_env_groups: 3, group_size: 8, group_size_redundancy: 1}",
    "actor_train.training_args.per_device_train_batch_size=16",
)


def steps_seen(folder: Path):
    return [{name: value for name, value in row.items() if name not in NOT_THE_GAME} for row in logged(folder)]


def test_self_play_is_the_same_with_more_processes_and_after_a_kill(tiny_model, tmp_path):
    whole, again, killed = (write_duel(tmp_path / name, tiny_model) for name in ("whole", "again", "killed"))
    assert in_process(whole, EVERYTHING) == 0
    assert in_process(again, EVERYTHING, "env_workers.world_size=3") == 0
    assert steps_seen(again) == steps_seen(whole) and episodes(again) == episodes(whole)
    assert in_process(killed, EVERYTHING, moment="environment", nth=500) == -signal.SIGKILL
    assert 0 < len(logged(killed)) < len(logged(whole))
    assert in_process(killed, EVERYTHING, "resume_from_checkpoint=auto") == 0
    assert steps_seen(killed) == steps_seen(whole) and episodes(killed) == episodes(whole)
