"""Credit of episodes of several turns: numbers worked by hand; the same credit whatever rows an episode is cut into."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import credited_by, fresh
from torch.testing import assert_close

from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.env_config import CustomEnv, EnvManager, RewardNormalization
from roll.configs.schema.policy_config import PfPpo
from roll.configs.schema.training_args import TrainingArgs
from roll.configs.schema.worker_config import ActorTrainConfig, TrainConfig
from roll.pipelines.credit.credit import credit_stages
from roll.pipelines.credit.turn_credit import TrajectoryView, turn_inputs
from roll.pipelines.rollouts.assemble import Rollouts, assemble
from roll.pipelines.workers.worker_losses import actor_loss
from roll.strategies.training.micro import denominators
from roll.types.batch import TokenOutputs
from roll.types.trajectory import Group, Task, Trajectory, Turn
from roll.utils.seeding import stable_hash

HALF = math.sqrt(0.5)


@dataclass(frozen=True)
class T:
    """A turn: its reward, number of tokens, and the state that it met."""

    reward: float
    tokens: int = 1
    state: str = "s"


def episode(group: str, member: int, turns: list[T], *, carried: int | None = None, status: str = "ok") -> Trajectory:
    """`carried`: exchanges after which the context is reset; None: never."""
    reset = [carried is not None and n > 0 and n % (carried + 1) == 0 for n in range(len(turns))]
    return Trajectory(
        task_id=group,
        member=member,
        turns=tuple(
            Turn(
                prompt_ids=(7,) * (5 if n == 0 or reset[n] else 2),
                response_ids=(9,) * turn.tokens,
                logprobs=(-1.0,) * turn.tokens,
                versions=(0,) * turn.tokens,
                finish_reason="stop",
                reward=turn.reward,
                resets_context=reset[n],
                state=turn.state,
            )
            for n, turn in enumerate(turns)
        ),
        reward=sum(turn.reward for turn in turns),
        status=status,  # type: ignore[arg-type]
    )


def rollouts_of(*groups: list[list[T]], carried: int | None = None, tags: str = "") -> Rollouts:
    """Groups of episodes of turns, one letter of `tags` per group."""
    named = enumerate(zip(groups, tags or "a" * len(groups), strict=True))
    return assemble(
        [
            Group(
                task=Task(id=f"t{i}", source="hand", payload={}, seed=0, tag=tag, domain=tag),
                trajectories=tuple(episode(f"t{i}", k, turns, carried=carried) for k, turns in enumerate(group)),
            )
            for i, (group, tag) in named
        ]
    )


def make_config(method: str = "identity", grouping: str = "traj_group", **keys: Any) -> AgenticConfig:
    defaults: dict[str, Any] = {
        "adv_estimator": "reinforce",
        "custom_envs": {tag: CustomEnv(env_type="sokoban-v1") for tag in "ab"},
        "train_env_manager": EnvManager(num_env_groups=2, group_size=2),
        "rollout_batch_size": 4,
        "response_length": 10,
        "actor_train": ActorTrainConfig(
            training_args=TrainingArgs(per_device_train_batch_size=2, gradient_accumulation_steps=2)
        ),
        "critic": TrainConfig(training_args=TrainingArgs(per_device_train_batch_size=4)),
        "reward_normalization": RewardNormalization(grouping=grouping, method=method),  # type: ignore[arg-type]
    }
    return AgenticConfig(pipeline="agentic", pretrain="none", **{**defaults, **keys})


def credited(rollouts: Rollouts, **keys: Any):
    return credited_by(credit_stages(make_config(**keys)), fresh(rollouts, 1), step=1)


def assigned(rollouts: Rollouts, **keys: Any):
    found, metrics = credited(rollouts, **keys)
    return found.batch, metrics


def shaped(rollouts: Rollouts, **keys: Any):
    return credited(rollouts, **keys)[0].shaped_rewards


def on_tokens(batch, name="advantages"):
    """A column's action tokens, in the order in which they were played."""
    return batch.require(name)[batch.action_mask].tolist()


def close(*values: float):
    return pytest.approx(values, abs=1e-5)


# Two episodes of one task, each a turn in state s and one in state t; tokens 2 + 1 and 1 + 1.
PAIR = [[T(0.0, 2, "s"), T(1.0, 1, "t")], [T(-0.5, 1, "s"), T(0.0, 1, "t")]]


# --- where rewards are placed, and what a discount counts -------------------------------------------------------------


def test_with_identity_a_turns_reward_is_on_its_last_token_and_gamma_counts_tokens():
    batch, _ = assigned(rollouts_of(PAIR), gamma=0.5)
    assert on_tokens(batch, "token_rewards") == [0, 0, 1, -0.5, 0]
    assert on_tokens(batch) == close(0.25, 0.5, 1, -0.5, 0)
    assert shaped(rollouts_of(PAIR), gamma=0.5).tolist() == [1.0, -0.5]


def test_rewards_that_a_stage_gives_are_the_episodes_and_stand_at_its_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stage = 'import roll\n\n@roll.stage(needs=("rewards",), gives=("rewards",))\ndef doubled(data):\n'
    (tmp_path / "own.py").write_text(stage + '    return {"rewards": 2 * data["rewards"]}\n')
    # Not 0, 0, 1, -0.5, 0 at the ends of turns, which would leave the stage without effect.
    assert on_tokens(assigned(rollouts_of(PAIR), stages=("own.py:doubled",))[0], "token_rewards") == [0, 0, 2, 0, -1]


def test_a_discount_over_turns_acts_once_per_turn():
    batch, _ = assigned(rollouts_of(PAIR), gamma=0.5, discount_over="turn")
    assert on_tokens(batch) == close(0.5, 0.5, 1, -0.5, 0)


@pytest.mark.parametrize("carried", [None, 0])
def test_gae_over_turns_takes_the_value_at_a_turns_first_token(carried):
    # gamma = lambda = 0.5. First episode: values 0.2 and 0.4, the 9 is never read. delta0 = 0 + 0.5 * 0.4 - 0.2 = 0,
    # delta1 = 1 - 0.4 = 0.6; A = 0.15, 0.6; returns 0.35, 1. Second: values 0.1, 0.3: delta0 = -0.5 + 0.15 - 0.1 =
    # -0.45, delta1 = -0.3; A = -0.525, -0.3; returns -0.425, 0. Every token of a turn has its return.
    rollouts = rollouts_of(PAIR, carried=carried)
    values = torch.full((rollouts.batch.num_tokens,), 99.0)
    values[rollouts.batch.action_mask] = torch.tensor([0.2, 9.0, 0.4, 0.1, 0.3])
    rollouts = replace(rollouts, batch=rollouts.batch.with_columns(values=values))
    batch, _ = assigned(rollouts, adv_estimator="gae", gamma=0.5, lambd=0.5, discount_over="turn")
    assert on_tokens(batch) == close(0.15, 0.15, 0.6, -0.525, -0.3)
    assert on_tokens(batch, "returns") == close(0.35, 0.35, 1.0, -0.425, 0.0)
    assert torch.equal(batch.loss_mask, batch.action_mask)


def test_gae_over_tokens_passes_from_the_last_token_of_a_row_to_the_next_row():
    # gamma = lambda = 0.5, a row per turn. deltas 0.1 - 0.2, 0.2 - 0.2, 1 - 0.4 = -0.1, 0, 0.6: A2 = 0.6, A1 = 0.15,
    # A0 = -0.1 + 0.25 * 0.15.
    rollouts = rollouts_of(PAIR[:1], carried=0)
    values = torch.zeros(rollouts.batch.num_tokens)
    values[rollouts.batch.action_mask] = torch.tensor([0.2, 0.2, 0.4])
    rollouts = replace(rollouts, batch=rollouts.batch.with_columns(values=values))
    batch, _ = assigned(rollouts, adv_estimator="gae", gamma=0.5, lambd=0.5)
    assert on_tokens(batch) == close(-0.0625, 0.15, 0.6)


def test_a_normalised_reward_is_the_episodes_and_placed_at_its_end():
    # Rewards 1 and -0.5: mean 0.25, so 0.75 and -0.75, on the last token of the last turn.
    batch, _ = assigned(rollouts_of(PAIR), method="mean", gamma=0.5)
    assert on_tokens(batch, "token_rewards") == close(0, 0, 0.75, 0, -0.75)
    assert on_tokens(batch) == close(0.1875, 0.375, 0.75, -0.375, -0.75)
    turns, _ = assigned(rollouts_of(PAIR), method="mean", gamma=0.5, discount_over="turn")
    assert on_tokens(turns) == close(0.375, 0.375, 0.75, -0.375, -0.75)


def test_a_clipped_reward_is_the_episodes_as_well():
    batch, _ = assigned(rollouts_of(PAIR), reward_clip=0.75)
    assert on_tokens(batch, "token_rewards") == close(0, 0, 0.75, 0, -0.5)


def test_what_shaping_adds_joins_the_last_turn():
    # Of three and two tokens the longer episode loses 0.5; the shorter one is wrong and gains nothing.
    found, _ = credited(rollouts_of(PAIR), add_len_reward=True)
    assert on_tokens(found.batch, "token_rewards") == close(0, 0, 0.5, -0.5, 0)
    assert found.shaped_rewards.tolist() == close(0.5, -0.5)


def test_an_episode_paid_beyond_its_turns_gets_the_rest_at_its_end():
    rollouts = rollouts_of([[T(0.5), T(0.0)]])
    paid = replace(rollouts.trajectories[0], reward=2.0)
    rollouts = replace(rollouts, trajectories=(paid,))
    assert on_tokens(assigned(rollouts)[0], "token_rewards") == [0.5, 1.5]


def test_the_reward_of_a_turn_without_tokens_joins_a_neighbour():
    before, _ = assigned(rollouts_of([[T(1.0), T(-0.5, 0), T(2.0)]]), gamma=0.5, discount_over="turn")
    assert on_tokens(before, "token_rewards") == [0.5, 2.0]
    assert on_tokens(before) == [1.5, 2.0]
    after, _ = assigned(rollouts_of([[T(-0.5, 0), T(1.0), T(2.0)]]))
    assert on_tokens(after, "token_rewards") == [0.5, 2.0]


def test_a_domains_weight_multiplies_the_rewards_of_turns():
    rollouts = rollouts_of(PAIR)
    mask = TrajectoryView.of(rollouts).pad(rollouts.batch.action_mask, False)
    steps = turn_inputs(rollouts, mask, make_config(), factor=torch.tensor([2.0, 4.0]), extra=torch.tensor([0.5, 0.0]))
    assert steps.turn_rewards.tolist() == [[0.0, 2.5], [-2.0, 0.0]]


def test_group_estimators_have_one_number_per_episode():
    # Rewards 1 and -0.5: +-0.75, divided by std 1.06066.
    for carried in (None, 0):
        batch, _ = assigned(rollouts_of(PAIR, carried=carried), adv_estimator="grpo")
        assert on_tokens(batch) == close(HALF, HALF, HALF, -HALF, -HALF)


def test_the_kl_in_the_reward_is_taken_off_tokens_and_so_off_their_turns():
    # Log-ratios to the reference 1, 2, 3, 4, 5, coefficient 0.1: turns cost 0.3, 0.3, 0.4, 0.5.
    for estimator in ("reinforce", "step_reinforce"):
        rollouts = rollouts_of(PAIR, carried=0)
        old = torch.zeros(rollouts.batch.num_tokens)
        old[rollouts.batch.action_mask] = torch.arange(1.0, 6.0)
        rows = rollouts.batch.with_columns(old_logprobs=old, ref_logprobs=torch.zeros_like(old))
        keys = {"add_token_level_kl": True, "init_kl_coef": 0.1, "discount_over": "turn", "step_reward_gamma": 1.0}
        batch, metrics = assigned(replace(rollouts, batch=rows), adv_estimator=estimator, **keys)
        assert on_tokens(batch) == close(0.4, 0.4, 0.7, -1.4, -0.5)
        assert metrics.result()["kl/reference"] == pytest.approx(3.0)


# --- normalisation over episodes --------------------------------------------------------------------------------------

# Rewards 0, 1 | 2, 4 | 6: the first two groups are of tag a; the first and third group begin in x, the second in y.
THREE = (
    [[T(0.0, 1, "x")], [T(0.5, 1, "x"), T(0.5, 3, "y")]],
    [[T(2.0, 1, "y")], [T(4.0, 2, "y")]],
    [[T(6.0, 1, "x"), T(0.0, 1, "y"), T(0.0, 1, "y")]],
)


@pytest.mark.parametrize("carried", [None, 0])
@pytest.mark.parametrize(
    ("grouping", "tags", "expected"),
    [
        ("traj_group", "aab", (-0.5, 0.5, -1, 1, 0)),
        ("batch", "aab", (-2.6, -1.6, -0.6, 1.4, 3.4)),  # mean 13 / 5
        ("tags", "aab", (-1.75, -0.75, 0.25, 2.25, 0)),  # mean 7 / 4
        ("inductive", "aab", (-1.75, -0.75, 0.25, 2.25, 0)),
        ("state", "aaa", (-7 / 3, -4 / 3, -1, 1, 11 / 3)),  # x: mean 7 / 3
        ("state", "aab", (-0.5, 0.5, -1, 1, 0)),  # another kind of environment's x is another state
    ],
)
def test_rewards_are_compared_with_those_of_the_grouping_and_never_per_row(grouping, tags, expected, carried):
    rollouts = rollouts_of(*THREE, tags=tags, carried=carried)
    assert shaped(rollouts, method="mean", grouping=grouping).tolist() == close(*expected)


def test_methods_of_normalisation():
    # Rewards 0, 0, 0, 0, 10: mean 2, std sqrt(80 / 4) = 4.47214.
    group = [[T(0.0)], [T(0.0)], [T(0.0)], [T(0.0)], [T(10.0)]]
    low, high = -2 / math.sqrt(20), 8 / math.sqrt(20)
    assert shaped(rollouts_of(group), method="mean_std").tolist() == close(*[low] * 4, high)
    # 20 of them: mean 0.5, squares 19 * 0.25 + 90.25, std sqrt(95 / 19) = 2.23607: 9.5 / 2.23607 = 4.2 -> 3.
    many = [[T(0.0)]] * 19 + [[T(10.0)]]
    assert shaped(rollouts_of(many), method="asym_clip")[-1] == 3.0
    assert shaped(rollouts_of(group), method="identity").tolist() == [0, 0, 0, 0, 10]


def test_penalties_are_part_of_what_is_normalised():
    # Both episodes won; one had a format penalty of 0.5 on the way: rewards 1 and 0.5.
    rewards = shaped(rollouts_of([[T(0.0), T(1.0)], [T(-0.5), T(1.0)]]), method="mean_std")
    assert rewards.tolist() == close(HALF, -HALF)


# --- turns compared with turns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("carried", [None, 0])
def test_gigpo_compares_episodes_and_the_turns_that_met_the_same_state(carried):
    # Episodes 1, -0.5: +-0.75. Step returns with gamma 0.5: 0.5, 1 and -0.5, 0. State s: mean 0, +-0.5; state t: mean
    # 0.5, +-0.5. Weights 1 and 2: 0.75 + 1 everywhere, and its opposite.
    keys = {"adv_estimator": "gigpo", "method": "mean", "step_reward_gamma": 0.5, "step_reward_weight": 2.0}
    batch, metrics = assigned(rollouts_of(PAIR, carried=carried), **keys)
    assert on_tokens(batch) == close(1.75, 1.75, 1.75, -1.75, -1.75)
    assert shaped(rollouts_of(PAIR, carried=carried), **keys).tolist()[0] == 1.0, "gigpo normalises on its own"
    assert metrics.result()["advantage/step_groups_of_one_share"] == 0.0
    # 1 turn, 4 turns: mean of 0, 1, -0.5, 0
    assert metrics.result()["reward/turn_mean"] == pytest.approx(0.125)
    batch, _ = assigned(rollouts_of(PAIR, carried=carried), **keys, episode_reward_weight=0.0)
    assert on_tokens(batch) == close(1, 1, 1, -1, -1)


def test_a_state_met_once_and_the_same_state_of_another_task_have_no_step_advantage():
    # Group 0: both meet s; u and v once each. Group 1 has s, too, alone in its task.
    rollouts = rollouts_of([[T(0.0), T(1.0, 1, "u")], [T(0.0), T(0.0, 1, "v")]], [[T(5.0)]])
    batch, metrics = assigned(rollouts, adv_estimator="gigpo", episode_reward_weight=0.0, method="mean")
    # gamma 0.95: 0.95 and 0 in s, mean 0.475
    assert on_tokens(batch) == close(0.475, 0, -0.475, 0, 0)
    assert metrics.result()["advantage/step_groups_of_one_share"] == pytest.approx(3 / 4)


def test_step_reinforce_gives_a_turn_its_discounted_reward_to_go():
    batch, _ = assigned(rollouts_of(PAIR, carried=0), adv_estimator="step_reinforce", step_reward_gamma=0.5)
    assert on_tokens(batch) == close(0.5, 0.5, 1, -0.5, 0)
    # Over the group of four turns: mean 0.25.
    keys = {"adv_estimator": "step_reinforce", "step_reward_gamma": 0.5, "method": "mean"}
    assert on_tokens(assigned(rollouts_of(PAIR), **keys)[0]) == close(0.25, 0.25, 0.75, -0.75, -0.25)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"adv_estimator": "gigpo"}, r"gigpo compares turns .* turn 1 of t0#0 has none"),
        ({"grouping": "state", "method": "mean"}, r"grouping: state compares turns .* turn 0 of t0#1 has none"),
    ],
)
def test_a_turn_without_a_state_is_no_state(keys, message):
    rollouts = rollouts_of([[T(0.0), T(0.0, 1, "")], [T(0.0, 1, "")]])
    with pytest.raises(ValueError, match=message):
        assigned(rollouts, **keys)


# --- groups with nothing to compare -----------------------------------------------------------------------------------

COMPARING = [
    {"adv_estimator": "reinforce", "method": "mean_std"},
    {"adv_estimator": "reinforce", "method": "asym_clip", "grouping": "state"},
    {"adv_estimator": "grpo"},
    {"adv_estimator": "rloo"},
    {"adv_estimator": "gigpo", "method": "mean_std"},
    {"adv_estimator": "gigpo", "method": "mean"},
    {"adv_estimator": "step_reinforce", "method": "mean_std", "step_reward_gamma": 1.0},
]


@pytest.mark.parametrize("keys", COMPARING)
@pytest.mark.parametrize("carried", [None, 0])
def test_a_group_of_one_has_no_advantage(keys, carried):
    rollouts = rollouts_of([[T(0.7, 2)]], [[T(0.3)]], tags="ab", carried=carried)
    assert on_tokens(assigned(rollouts, **keys)[0]) == [0, 0, 0]


@pytest.mark.parametrize("keys", COMPARING[:-1])  # the last compares all turns of a group, whatever state they met
@pytest.mark.parametrize("carried", [None, 0, 1])
def test_a_group_that_all_agrees_has_no_advantage_in_whatever_order_it_was_paid(keys, carried):
    # 0.1 + 0.2 - 0.3 isn't 0 in binary; on paper both episodes have 0, and every turn that met a state the same return.
    first = [T(0.0, 2, "s"), T(0.1, 1, "t"), T(0.2, 1, "u"), T(-0.3, 1, "v")]
    second = [T(0.0, 1, "s"), T(-0.3, 1, "w"), T(0.2, 1, "x"), T(0.1, 2, "y")]
    batch, _ = assigned(rollouts_of([first, second], carried=carried), **{"step_reward_gamma": 1.0, **keys})
    assert on_tokens(batch) == pytest.approx([0.0] * int(batch.action_mask.sum()), abs=1e-7)


@pytest.mark.parametrize("carried", [None, 0])
def test_a_failed_member_leaves_the_comparison_to_the_survivors(carried):
    task = Task(id="t", source="hand", payload={}, seed=0, tag="a", domain="a")
    played = [episode("t", k, turns, carried=carried) for k, turns in enumerate(PAIR)]
    failed = episode("t", 2, [T(-9.0, 1, "s"), T(-9.0, 1, "t")], carried=carried, status="env_error")
    rollouts = assemble([Group(task=task, trajectories=(played[0], failed, played[1]))])
    for keys in ({"method": "mean"}, {"adv_estimator": "gigpo", "method": "mean"}, {"adv_estimator": "dr_grpo"}):
        expected, _ = assigned(rollouts_of(PAIR, carried=carried), **keys)
        assert on_tokens(assigned(rollouts, **keys)[0]) == on_tokens(expected)


# --- the same credit whatever the sample unit -------------------------------------------------------------------------

SETTINGS = [
    {"adv_estimator": "gae", "lambd": 0.9},
    {"adv_estimator": "gae", "lambd": 0.9, "discount_over": "turn"},
    {"adv_estimator": "gae", "method": "mean_std", "discount_over": "turn"},
    {"adv_estimator": "reinforce"},
    {"adv_estimator": "reinforce", "discount_over": "turn"},
    {"adv_estimator": "reinforce", "method": "asym_clip", "grouping": "batch"},
    {"adv_estimator": "reinforce", "method": "mean", "grouping": "state"},
    {"adv_estimator": "reinforce_plus_plus", "reward_clip": 0.4},
    {"adv_estimator": "reinforce_plus_plus_baseline"},
    {"adv_estimator": "grpo"},
    {"adv_estimator": "dr_grpo"},
    {"adv_estimator": "reinforce", "whiten_rewards": True},
    {"adv_estimator": "rloo"},
    {"adv_estimator": "opo", "whiten_advantages": True},
    {"adv_estimator": "gpg", "advantage_clip": 0.5},
    {"adv_estimator": "gigpo", "method": "mean_std"},
    {"adv_estimator": "gigpo", "method": "identity", "grouping": "tags"},
    {"adv_estimator": "step_reinforce", "method": "mean_std"},
]
EXTRAS: list[dict[str, Any]] = [
    {},
    {"add_token_level_kl": True, "init_kl_coef": 0.1},
    {"add_len_reward": True, "difficulty_loss_weight": True},
    {"length_loss_weight": True, "pf_ppo": PfPpo(reweight_method="max_random")},
]

turns = st.builds(T, st.sampled_from([0.0, -0.1, 1.0, 0.3]), st.integers(0, 3), st.sampled_from("stu"))
episodes = st.lists(turns, min_size=1, max_size=5).filter(lambda played: any(turn.tokens for turn in played))
groups = st.lists(st.lists(episodes, min_size=1, max_size=4), min_size=1, max_size=3)


def with_models(rollouts: Rollouts) -> Rollouts:
    """Values and log-probs that depend on which token of which episode it is, not on its row."""
    batch = rollouts.batch
    owner = rollouts.row_trajectory.repeat_interleave(batch.lengths)[batch.action_mask].tolist()
    columns = {}
    for name in ("values", "old_logprobs", "ref_logprobs"):
        seen: dict[int, int] = {}
        numbers = []
        for trajectory in owner:
            seen[trajectory] = seen.get(trajectory, 0) + 1
            numbers.append(stable_hash(name, trajectory, seen[trajectory], bits=20) / 2**20 - 0.5)
        columns[name] = torch.full((batch.num_tokens,), 99.0)
        columns[name][batch.action_mask] = torch.tensor(numbers)
    return replace(rollouts, batch=batch.with_columns(**columns))


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=lambda i: "-".join(map(str, SETTINGS[i].values())))
@given(played=groups, extra=st.sampled_from(EXTRAS))
@settings(max_examples=8, deadline=None, derandomize=True)
def test_an_episode_gets_the_same_credit_whatever_rows_it_is_cut_into(number, played, extra):
    keys = {"gamma": 0.9, **SETTINGS[number], **extra}
    tags = "aba"[: len(played)]
    rollouts = with_models(rollouts_of(*played, tags=tags))
    found, whole_metrics = credited(rollouts, **keys)
    whole = found.batch
    expected = {name: torch.tensor(on_tokens(whole, name)) for name in ("advantages", "returns", "token_rewards")}
    for carried in (0, 1, 2):
        rows = with_models(rollouts_of(*played, tags=tags, carried=carried))
        cut, metrics = credited(rows, **keys)
        batch = cut.batch
        for name, column in expected.items():
            assert_close(torch.tensor(on_tokens(batch, name)), column, rtol=1e-4, atol=1e-5)
        assert not batch.advantages[~batch.action_mask].any()
        assert_close(cut.shaped_rewards, found.shaped_rewards)
        if whole.loss_weight is not None:
            assert_close(batch.loss_weight, whole.loss_weight[rows.row_trajectory])
        numbers = metrics.result()
        for name, value in whole_metrics.result().items():
            assert numbers[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


@given(played=groups, seed=st.integers(0, 99))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_rows_may_come_in_any_order(played, seed):
    rollouts = with_models(rollouts_of(*played, carried=1))
    order = torch.randperm(len(rollouts.batch), generator=torch.Generator().manual_seed(seed)).tolist()
    shuffled = replace(
        rollouts,
        batch=rollouts.batch.select(order),
        row_trajectory=rollouts.row_trajectory[order],
        row_turns=tuple(rollouts.row_turns[i] for i in order),
    )
    for keys in ({"adv_estimator": "gae"}, {"adv_estimator": "gigpo"}):
        expected, _ = assigned(rollouts, **keys)
        found = assigned(shuffled, **keys)[0].reorder(expected.row_ids)
        assert_close(found.advantages, expected.advantages)
        assert_close(shaped(shuffled, **keys), shaped(rollouts, **keys))


def test_a_view_of_rows_puts_back_what_it_took():
    rollouts = rollouts_of(PAIR, carried=0)
    view, column = TrajectoryView.of(rollouts), torch.arange(rollouts.batch.num_tokens).float()
    assert_close(view.unpad(view.pad(column)), column * rollouts.batch.action_mask)
    assert view.pad(rollouts.batch.action_mask, False).sum(1).tolist() == [3, 2]


# --- masks and weights of episodes ------------------------------------------------------------------------------------


def test_masks_take_whole_episodes():
    rollouts = rollouts_of(PAIR, carried=0)
    cut = replace(rollouts.trajectories[0], status="truncated")
    rollouts = replace(rollouts, trajectories=(cut, rollouts.trajectories[1]))
    batch, metrics = assigned(rollouts, max_len_mask=True)
    assert batch.pad("loss_mask", False).any(1).tolist() == [False, False, True, True]
    assert metrics.result()["rollout/masked_share"] == 0.5


def test_pf_ppo_draws_episodes_with_all_their_rows():
    rollouts = rollouts_of([[T(1.0), T(0.0), T(0.0)], [T(0.0)], [T(2.0), T(0.0)], [T(2.0)]], carried=0)
    kept = set()
    for step in range(1, 12):
        credit = credit_stages(make_config(pf_ppo=PfPpo()))
        weights = credited_by(credit, fresh(rollouts, step), step=step)[0].batch.loss_weight
        for i in range(4):
            assert len(set(weights[rollouts.row_trajectory == i].tolist())) == 1
        kept |= set(rollouts.row_trajectory[weights > 0].tolist())
        # Tokens that were drawn count once on average.
        assert float(weights[weights > 0].mean()) == pytest.approx(1.0)
    assert kept == {0, 2, 3}


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy_loss", ["ppo", "decoupled_ppo"])
@pytest.mark.parametrize(("ratio_type", "expected"), [("token", -3.2 / 3), ("segment", -3.4 / 3)])
def test_ratio_type_segment_gives_the_tokens_of_a_turn_one_ratio(policy_loss, ratio_type, expected):
    # Ratios 4, 1 in the first turn and 1 in the second; advantages 1, clip 0.2. Each token's own: 1.2, 1, 1. The first
    # turn's geometric mean is 2: 1.2, 1.2, 1.
    batch = rollouts_of(PAIR[:1]).batch
    acting = batch.action_mask
    new = torch.zeros(batch.num_tokens)
    new[acting] = torch.tensor([math.log(4.0), 0.0, 0.0])
    zeros = torch.zeros_like(new)  # who sampled is who is updated, so decoupled_ppo weighs every token by 1
    columns = {"old_logprobs": zeros, "sampling_logprobs": zeros, "advantages": acting.float(), "loss_mask": acting}
    batch = batch.with_columns(**columns)
    outputs = TokenOutputs(row_ids=batch.row_ids, offsets=batch.offsets, logprobs=new.requires_grad_())
    loss = actor_loss(make_config(policy_loss=policy_loss, ratio_type=ratio_type))
    terms = loss.compute(outputs, batch, denominators(batch))
    assert float(terms.loss.detach()) == pytest.approx(expected)
