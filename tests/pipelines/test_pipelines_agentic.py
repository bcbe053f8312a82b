"""Environments in the whole loop: what is learnt, what a row is, what is played at once, what is drawn."""

from __future__ import annotations

import contextlib
import functools
import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from statistics import fmean
from unittest import mock

import pytest
from toy import run_toy
from toy_env import CRITIC, SHORT, episodes, without_template, write_toy_env

from roll.envs.env_pool import EnvPool
from roll.rollout.episode_groups import FilterBudgetExhausted


@pytest.fixture(scope="session")
def plain_model(tiny_model, tmp_path_factory):
    return without_template(tiny_model, tmp_path_factory.mktemp("plain") / "llama")


# --- learning ---------------------------------------------------------------------------------------------------------

LATER = ("custom_envs.letters.history_length=1",)
ALONE = ("reward_normalization.method=identity",)
SLOWER = ("actor_train.training_args.learning_rate=5e-3", "max_steps=32", "eval_steps=32")
LEARNERS = {
    "whole episodes": (),
    "a row per turn": ("sample_unit=step", *LATER),
    "rows of two turns": ("sample_unit=concat", *LATER, "++custom_envs.letters.env_config.turns=3"),
    "grpo": ("adv_estimator=grpo", *ALONE),
    "gigpo": ("adv_estimator=gigpo",),
    "gigpo, a row per turn": ("adv_estimator=gigpo", "sample_unit=step"),
    # Its steps are larger than those of the others: at their learning rate it unlearns again, on some processors.
    "step_reinforce": ("adv_estimator=step_reinforce", "sample_unit=step", *SLOWER),
    "critic": ("adv_estimator=gae", "discount_over=turn", "sample_unit=step", *ALONE, *CRITIC),
}


@pytest.mark.parametrize("learner", LEARNERS)
def test_the_game_is_learnt(plain_model, tmp_path, learner):
    schedule = ("max_steps=24", "eval_steps=24", "val_before_train=true")
    rows = run_toy(write_toy_env(tmp_path, plain_model), *SHORT, *schedule, *LEARNERS[learner])
    training = [row["env/letters/success"] for row in rows if row["step"] > 0]
    assert fmean(training[:2]) < 0.2
    assert fmean(training[-3:]) > 0.7
    assert rows[0]["val/accuracy"] == rows[0]["val/letters/accuracy"] < 0.3
    assert rows[-1]["val/accuracy"] > 0.7
    assert max(row.get("mismatch/kl", 0.0) for row in rows) < 1e-9


def test_the_policy_is_trained_on_what_it_said_and_on_nothing_that_the_game_said(tiny_model, tmp_path):
    folder = write_toy_env(tmp_path, tiny_model)
    rows = run_toy(folder, "max_steps=1")
    assert rows[0]["mismatch/kl"] < 1e-9
    for row in episodes(folder):
        turns = row.response.count("<|im_start|>assistant\n") + 1
        assert sum(row.action_mask) == 2 * turns
        assert row.prompt.endswith("=<|im_end|>\n<|im_start|>assistant\n")
        assert row.reward == pytest.approx(sum(row.reward_parts.values()))
        assert not any(a for a, acting in zip(row.advantages, row.action_mask, strict=True) if not acting)


# --- what a row is ----------------------------------------------------------------------------------------------------

UNITS = ("trajectory", "step", "concat")


def test_the_schedule_is_the_same_whatever_a_row_is(tiny_model, tmp_path):
    schedule = (
        "max_steps=3",
        "ppo_epochs=2",
        "actor_train.training_args.per_device_train_batch_size=16",
        "actor_train.training_args.lr_scheduler_type=linear",
    )
    seen = {}
    for unit in UNITS:
        history = () if unit == "trajectory" else LATER
        rows = run_toy(write_toy_env(tmp_path / unit, tiny_model), *schedule, f"sample_unit={unit}", *history)
        seen[unit] = [(row["actor/optimizer_steps"], row["actor/lr"], row["rollout/responses"]) for row in rows]
        # A response that is only special tokens is no action: such an episode has a fourth turn.
        turns = [round(row["episode/turns_mean"] * row["rollout/responses"]) for row in rows]
        assert min(turns) >= 3 * 32
        made = [row["rollout/rows"] for row in rows]
        assert made == {"trajectory": [32] * 3, "step": turns, "concat": [64] * 3}[unit]
    assert seen["trajectory"] == seen["step"] == seen["concat"]
    assert [steps for steps, _, _ in seen["step"]] == [4, 4, 4], "two passes over two mini-batches of 16 episodes"
    assert len({lr for _, lr, _ in seen["step"]}) == 3


def test_a_context_that_is_never_reset_is_a_whole_episode(tiny_model, tmp_path):
    whole = run_toy(write_toy_env(tmp_path / "whole", tiny_model), "max_steps=2")
    concat = run_toy(write_toy_env(tmp_path / "concat", tiny_model), "max_steps=2", "sample_unit=concat")
    for name in ("reward/mean", "actor/loss", "actor/grad_norm", "rollout/rows"):
        assert [row[name] for row in whole] == [row[name] for row in concat]


@pytest.mark.parametrize("estimator", ["reinforce", "gigpo", "step_reinforce"])
def test_the_same_episodes_have_the_same_advantages_and_gradient_in_one_row_or_in_one_for_every_turn(
    plain_model, tmp_path, estimator
):
    # Without a template, a prompt that shows everything again is the very text that is carried on, unless a special
    # token was sampled: the toy's seed samples none.
    run = ("max_steps=1", "rollout_batch_size=8", *SHORT[1:], "train_env_manager={num_env_groups: 4, group_size: 2}")
    run = (*run, "actor_train.training_args.per_device_train_batch_size=8", f"adv_estimator={estimator}")
    rows, said = {}, {}
    for unit in ("trajectory", "step"):
        folder = write_toy_env(tmp_path / unit, plain_model)
        rows[unit] = run_toy(folder, *run, f"sample_unit={unit}")[0]
        said[unit] = defaultdict(list)
        for row in episodes(folder):
            chosen = zip(row.token_ids, row.advantages, row.action_mask, strict=True)
            said[unit][row.task_id, row.member] += [(token, advantage) for token, advantage, acting in chosen if acting]
    assert (rows["trajectory"]["rollout/rows"], rows["step"]["rollout/rows"]) == (8, 16)
    for episode, tokens in said["trajectory"].items():
        assert [token for token, _ in said["step"][episode]] == [token for token, _ in tokens]
        assert [a for _, a in said["step"][episode]] == pytest.approx([a for _, a in tokens], abs=1e-6)
    assert any(advantage for tokens in said["step"].values() for _, advantage in tokens)
    for name in ("actor/loss", "actor/grad_norm"):
        assert rows["step"][name] == pytest.approx(rows["trajectory"][name], rel=1e-4, abs=1e-7)


# --- groups and seeds -------------------------------------------------------------------------------------------------


@dataclass
class Played:
    """What the pool was asked for."""

    seeds: dict[str, int] = field(default_factory=dict)
    """By episode, `<purpose>/<step>/<task>#<member>`."""
    open: set[str] = field(default_factory=set)
    most_open: int = 0

    def group_seeds(self, beginning: str) -> dict[str, int]:
        """Seeds by group; the members of one must agree."""
        found: dict[str, set[int]] = defaultdict(set)
        for name, seed in self.seeds.items():
            if name.startswith(beginning):
                found[name.partition("#")[0]].add(seed)
        assert all(len(seeds) == 1 for seeds in found.values()), "members of a group met different seeds"
        return {name: seeds.pop() for name, seeds in found.items()}


@contextlib.contextmanager
def watched_pool(played):
    reset, close = EnvPool.reset, EnvPool.close

    @functools.wraps(reset)
    async def watched_reset(pool, episode, tag, seed, options):
        assert episode not in played.seeds, "an episode is begun once"
        played.seeds[episode] = seed
        played.open.add(episode)
        played.most_open = max(played.most_open, len(played.open))
        return await reset(pool, episode, tag, seed, options)

    @functools.wraps(close)
    async def watched_close(pool, episode):
        played.open.discard(episode)
        await close(pool, episode)

    with mock.patch.object(EnvPool, "reset", watched_reset), mock.patch.object(EnvPool, "close", watched_close):
        yield


def run_watched(folder, *overrides):
    played = Played()
    with watched_pool(played):
        rows = run_toy(folder, *overrides)
    assert not played.open, "an environment was left open"
    return rows, played


def test_every_step_has_new_seeds_and_every_validation_the_same(tiny_model, tmp_path):
    folder = write_toy_env(tmp_path, tiny_model)
    _, first = run_watched(folder, "max_steps=2", "eval_steps=1", "save_steps=2")
    _, rest = run_watched(folder, "max_steps=4", "eval_steps=1", "save_steps=2", "resume_from_checkpoint=true")
    assert {name.split("/")[1] for name in rest.group_seeds("train/")} == {"3", "4"}
    trained = [*first.group_seeds("train/").values(), *rest.group_seeds("train/").values()]
    assert len(trained) == len(set(trained)) == 4 * 4
    validated = [
        list(played.group_seeds(f"val/{step}/").values()) for played, steps in ((first, (1, 2)), (rest, (3, 4)))
        for step in steps
    ]  # fmt: skip
    assert len(validated[0]) == 16
    assert all(seeds == validated[0] for seeds in validated)
    assert not set(trained) & set(validated[0])


def test_redundant_members_keep_groups_whole_and_open_groups_are_bounded(tiny_model, tmp_path):
    manager = "train_env_manager={num_env_groups: 2, group_size: 8, group_size_redundancy: 2}"
    rows, played = run_watched(write_toy_env(tmp_path, tiny_model), manager, "max_steps=2", "eval_steps=2")
    for row in rows:
        assert row["group/size_mean"] == 8
        assert row["rollout/responses"] == 32
        assert row["rollout/surplus_episodes"] == 8
    assert played.most_open == 2 * 10
    members = Counter(row.task_id for row in episodes(tmp_path))
    assert set(members.values()) == {8}


def test_tags_get_their_share_and_metrics_of_their_own(tiny_model, tmp_path):
    folder = write_toy_env(tmp_path, tiny_model)
    short = f"+custom_envs.short={{env_type: '{folder}/letters.py:Letters', env_config: {{turns: 1}}, "
    short += "action_pattern: null, system_template: null}"
    train = "train_env_manager={num_env_groups: 4, group_size: 8, tags: [letters, short], num_groups_partition: [1, 3]}"
    val = "val_env_manager.tags=short"
    rows = run_toy(folder, short, train, val, "max_steps=2", "eval_steps=2")
    for row in rows:
        assert (row["data/letters/share"], row["data/short/share"]) == (0.25, 0.75)
        assert row["env/short/actions"] <= 1 < row["env/letters/actions"]
    assert {name for name in rows[-1] if name.endswith("/accuracy")} == {"val/accuracy", "val/short/accuracy"}


def test_groups_that_teach_nothing_are_dropped_counted_and_replaced(tiny_model, tmp_path):
    folder = write_toy_env(tmp_path, tiny_model)
    manager = "train_env_manager={num_env_groups: 4, group_size: 2, group_filter: {type: std_filter}}"
    run = (manager, "rollout_batch_size=8", "actor_train.training_args.per_device_train_batch_size=8", "max_steps=1")
    row = run_toy(folder, *run, "max_num_gen_batches=9")[0]
    dropped = row["rollout/filtered_groups"]
    assert dropped == row["dropped/filtered_group"] > 0
    assert row["group/zero_signal_share"] == 0
    assert row["env/episodes"] == 2 * (4 + dropped)
    rewards = defaultdict(set)
    for episode in episodes(folder):
        rewards[episode.task_id].add(episode.reward)
    assert [len(of_group) for of_group in rewards.values()] == [2, 2, 2, 2]
    lines = (folder / "output" / "logs" / "dropped.jsonl").read_text().splitlines()
    assert all(len(set(json.loads(line)["sample"]["scores"])) == 1 for line in lines)


def test_an_environment_that_has_played_its_share_ends_the_step(tiny_model, tmp_path):
    manager = "train_env_manager={num_env_groups: 2, group_size: 2, max_traj_per_env: 2, group_filter: "
    manager += "{type: mean_filter, filter_args: {threshold_down: 5, threshold_up: 6}}}"
    run = (manager, "rollout_batch_size=8", "actor_train.training_args.per_device_train_batch_size=8", "max_steps=1")
    with pytest.raises(FilterBudgetExhausted, match="started 4 .*kept 0 of the 4") as error:
        run_toy(write_toy_env(tmp_path, tiny_model), *run, "max_num_gen_batches=9")
    assert "max_traj_per_env" in str(error.value)


# --- the bundled environments -----------------------------------------------------------------------------------------

SIZE = (
    "~custom_envs.letters",
    "max_steps=1",
    "rollout_batch_size=4",
    "train_env_manager.num_env_groups=2",
    "train_env_manager.group_size=2",
    "val_env_manager.num_env_groups=2",
    "eval_steps=1",
    "actor_train.training_args.per_device_train_batch_size=4",
    "sequence_length=240",
)
LETTERS = "action_pattern: '(.)', action_lookup: {a: Up, b: Down, c: Left, d: Right}, system_template: null"
BUNDLED = {
    "sokoban-v1": f"env_config: {{dim_room: 6}}, {LETTERS}, max_steps: 2",
    "frozen_lake-v1": f"{LETTERS}, max_steps: 3",
    "countdown-v1": "action_pattern: null, system_template: null, max_steps: 2",
    "question_answer-v1": "env_config: {file_name: FOLDER/questions.jsonl, max_tries: 2}, action_pattern: null, "
    "system_template: null",
}


@pytest.mark.parametrize("unit", ["trajectory", "step"])
@pytest.mark.parametrize("env_type", BUNDLED)
def test_a_bundled_environment_is_trained_on(tiny_model, tmp_path, env_type, unit):
    folder = write_toy_env(tmp_path, tiny_model)
    questions = [{"id": str(i), "prompt": f"1+{i}=", "ground_truth": str(1 + i)} for i in range(8)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    env = f"+custom_envs.game={{env_type: {env_type}, {BUNDLED[env_type].replace('FOLDER', str(folder))}}}"
    row = run_toy(folder, *SIZE, env, f"sample_unit={unit}")[0]
    assert row["rollout/responses"] == 4
    assert (row["rollout/rows"] > 4) is (unit == "step")
    assert {"env/game/success", "env/game/invalid_actions", "reward/game/part/env", "val/game/accuracy"} <= set(row)
    assert "actor/grad_norm" in row


def test_validation_episodes_are_drawn_and_told(tiny_model, tmp_path):
    folder = write_toy_env(tmp_path, tiny_model)
    env = f"+custom_envs.game={{env_type: sokoban-v1, {BUNDLED['sokoban-v1']}}}"
    pictures = tmp_path / "pictures"
    run_toy(folder, *SIZE, env, "max_steps=2", "eval_steps=2", f"render_save_dir={pictures}", "log_val_generations=1")
    drawn = pictures / "step-000002" / "game-val-0"
    assert sorted(path.relative_to(pictures) for path in pictures.rglob("*.*")) == [
        (drawn / name).relative_to(pictures) for name in ("episode.png", "episode.txt", "first.png")
    ]
    for name in ("episode.png", "first.png"):
        assert (drawn / name).read_bytes().startswith(b"\x89PNG")
    text = (drawn / "episode.txt").read_text()
    assert text.count("--- response") == 2
    assert "--- reward" in text
    assert text.splitlines()[0].startswith("#")
