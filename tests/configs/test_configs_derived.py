"""Derived values: batch plan, placement, models, tags, paths, warnings."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.configs.parsing.loader import PIPELINES
from roll.configs.rules.validate import warnings_of
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.batch_plan import BatchPlan
from roll.configs.schema.env_config import CustomEnv
from roll.configs.schema.placement_plan import PlacementPlan, parse_device_mapping
from roll.configs.schema.reward_config import RewardConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.training_args import TrainingArgs
from roll.configs.schema.worker_config import (
    ActorInferConfig,
    ActorTrainConfig,
    ModelArgs,
    ReferenceConfig,
    TrainConfig,
)


def config_with(**values) -> RLVRConfig:
    rewards = {"math": RewardConfig(name="math_rule")}
    return RLVRConfig(**{"pipeline": "rlvr", "pretrain": "p", "rewards": rewards, **values})


NOTATIONS = [
    ([0, 1], (0, 1)),
    (3, (3,)),
    ("3", (3,)),
    ("[0, 1]", (0, 1)),
    ("[4,]", (4,)),
    ("0-7,12", (0, 1, 2, 3, 4, 5, 6, 7, 12)),
    ("list(range(0, 8))", tuple(range(8))),
    ("range(2)", (0, 1)),
    ("list( range(0, 8, 2) )", (0, 2, 4, 6)),
    ("range(3, -1, -1)", (3, 2, 1, 0)),
    ("5,3", (5, 3)),
]


@pytest.mark.parametrize(("text", "slots"), NOTATIONS)
def test_device_mappings_in_every_notation(text, slots):
    assert parse_device_mapping(text) == slots


HOSTILE = [
    *("__import__('os').system('true')", "list(range(0, 8)", "range(0, 8))", "range()", "range(0, 1, 0)"),
    *("range(10**9)", "range(999999999)", "0-999999999", "[0", "0]", "", "[]", "a", "1.0", "0--1", "-1", "3-1"),
    *("0,0", "0-2,1", "range(-1, 2)", "range(1,2,3,4)", "1_0", "\u0663"),
    *([], [-1], [True], [0, 0], [1.0], [None], {"a": 1}, 1.5),
]


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_anything_else_is_refused_and_never_evaluated(value):
    with pytest.raises(ValueError):
        parse_device_mapping(value)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=30, unique=True))
def test_a_list_and_its_text_name_the_same_slots(slots):
    assert parse_device_mapping(slots) == tuple(slots)
    assert parse_device_mapping(str(slots)) == tuple(slots)
    assert parse_device_mapping(",".join(map(str, slots))) == tuple(slots)


@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 5))
def test_a_range_means_what_python_means(start, length, step):
    expected = tuple(range(start, start + length, step))
    assert parse_device_mapping(f"list(range({start}, {start + length}, {step}))") == expected
    assert parse_device_mapping(f"{start}-{start + length}") == tuple(range(start, start + length + 1))


@given(st.text(max_size=12))
def test_any_text_gives_slots_or_a_value_error(text):
    try:
        slots = parse_device_mapping(text)
    except ValueError:
        return
    assert slots
    assert all(type(slot) is int and slot >= 0 for slot in slots)


def test_a_rank_may_not_lie_on_two_nodes():
    plan = PlacementPlan(num_nodes=2, num_gpus_per_node=2, roles={"a": ((0, 1), (2, 3)), "b": ((1, 2),)})
    assert plan.split_ranks() == [("b", 0)]
    assert plan.colocated() == [("a", "b")]
    assert "share slots: a+b" in plan.explain()


def test_only_roles_that_something_needs_are_started():
    quiet = config_with(reference=ReferenceConfig(), critic=TrainConfig())
    assert list(quiet.roles) == ["actor_train", "actor_infer"]
    assert "reference is configured" in warnings_of(quiet)[0]
    busy = config_with(reference=ReferenceConfig(), critic=TrainConfig(), use_kl_loss=True, adv_estimator="gae")
    assert list(busy.roles) == ["actor_train", "actor_infer", "reference", "critic"]
    assert busy.placement.colocated()


def test_world_size_and_slots_follow_from_each_other():
    assert ActorInferConfig(device_mapping=(4, 5)).ranks == 2
    assert ActorInferConfig(world_size=3).slots == (0, 1, 2)
    assert ActorInferConfig().slots == (0,)


def test_a_role_without_a_model_takes_the_nearest_default():
    own = ActorTrainConfig(model_args=ModelArgs(model_name_or_path="own"))
    config = config_with(actor_train=own, critic=TrainConfig(), reward_pretrain="judge")
    assert config.model_path("actor_train") == "own"
    assert config.model_path("actor_infer") == "p"
    assert config.model_path("critic") == "judge"
    assert config_with(actor_train=own, pretrain=None).model_path("actor_infer") == "own"
    with pytest.raises(ValueError, match="no model for actor_infer"):
        config_with(pretrain=None).model_path("actor_infer")


def test_tags_find_their_domain():
    rewards = {"math": RewardConfig(name="math_rule", tag_included=("a", "b")), "words": RewardConfig(name="gsm8k")}
    config = config_with(rewards=rewards)
    assert [config.domain_of(tag) for tag in ("a", "b", "words", "c")] == ["math", "math", "words", None]


def test_folders_default_to_places_below_the_output():
    config = config_with(output_dir="out")
    assert (config.logging_path, config.checkpoint_path) == (Path("out/logs"), Path("out/checkpoints"))


def test_normalisation_levels_follow_the_switches():
    # reward_norm alone: mean and std; shift: the mean only; scale: the std only; scaling: the running std.
    def levels(**values):
        config = config_with(**values)
        return config.reward_mean_over, config.reward_std_over

    assert levels() == (None, None)
    assert levels(reward_norm="group") == ("group", "group")
    assert levels(reward_norm="group", reward_shift=True) == ("group", None)
    assert levels(reward_norm="batch", reward_scale=True) == (None, "batch")
    assert levels(use_reward_scaling=True) == (None, "running")
    assert levels(use_reward_scaling=True, use_reward_norm=True) == ("running", "running")


def test_names_known_here_are_those_of_the_registries():
    from roll.configs.schema.worker_config import TEMPLATES
    from roll.data import templates

    assert set(TEMPLATES) == {"native", *templates.TEMPLATES}


def test_the_plan_counts_what_happens_in_a_step():
    # 8 prompts x 4 = 32 responses; mini-batch 2 x 4 x 2 = 16 -> 2 mini-batches, 3 passes -> 6 optimizer steps.
    training = TrainingArgs(per_device_train_batch_size=2, gradient_accumulation_steps=4)
    actor = ActorTrainConfig(training_args=training, world_size=2)
    plan = config_with(rollout_batch_size=8, num_return_sequences_in_group=4, ppo_epochs=3, actor_train=actor).batch
    assert plan.rows == 32
    assert [b.optimizer_steps for b in plan.train_batches] == [6]
    assert not list(plan.violations())
    assert "32 / 16 = 2 mini-batches, x 3 passes = 6 optimizer steps per step" in plan.explain()


def test_mini_batches_of_less_than_a_group_are_warned_of():
    def said(rows: int) -> list[str]:
        actor = ActorTrainConfig(training_args=TrainingArgs(per_device_train_batch_size=rows))
        config = config_with(rollout_batch_size=8, num_return_sequences_in_group=4, actor_train=actor)
        return [warning for warning in warnings_of(config) if "slow and noisy" in warning]

    (warning,) = said(1)  # what nobody has set
    assert warning.startswith("each step makes 32 optimizer steps of 1 response each")
    assert "actor_train.training_args.per_device_train_batch_size" in warning
    assert "x 1 data-parallel rank(s) = 32 makes one optimizer step" in warning
    assert len(said(2)) == 1
    assert said(4) == said(32) == []


SIZES = st.integers(1, 12)


@given(SIZES, SIZES, SIZES, SIZES, SIZES)
def test_the_suggested_sizes_fit_and_are_the_nearest(prompts, group, per_device, accumulation, ranks):
    def plan(prompts: int, accumulation: int) -> BatchPlan:
        args = TrainingArgs(per_device_train_batch_size=per_device, gradient_accumulation_steps=accumulation)
        worker = TrainConfig(training_args=args, world_size=ranks)
        return BatchPlan(roles={"actor_train": worker}, tasks=prompts, group_size=group)

    given_plan = plan(prompts, accumulation)
    assert bool(list(given_plan.violations())) == (not given_plan.train_batches[0].fits)
    suggested = given_plan.nearest_sizes()
    assert suggested
    assert all(plan(size, accumulation).train_batches[0].fits for size in suggested)
    mini_batch = per_device * accumulation * ranks
    legal = [size for size in range(1, prompts + mini_batch + 1) if size * group % mini_batch == 0]
    below, above = [size for size in legal if size <= prompts], [size for size in legal if size >= prompts]
    assert set(suggested) == {*below[-1:], *above[:1]}
    for count in given_plan.train_batches[0].nearest_accumulations():
        assert plan(prompts, count).train_batches[0].fits


def test_a_run_is_named_after_its_pipeline_unless_it_has_a_name():
    names = {cls.__name__: cls.__dataclass_fields__["exp_name"].default for cls in PIPELINES.values()}
    assert names == {
        "RLVRConfig": "rlvr",
        "DistillConfig": "distill",
        "AgenticConfig": "agentic",
        "SFTConfig": "sft",
        "DPOConfig": "dpo",
        "RewardTrainingConfig": "reward_model",
    }


def test_only_an_agent_whose_tags_all_say_one_token_has_responses_of_one_token():
    def config(*tokens: int | None) -> AgenticConfig:
        envs = {str(i): CustomEnv(env_type="sokoban-v1", max_tokens_per_step=n) for i, n in enumerate(tokens)}
        return AgenticConfig(pipeline="agentic", pretrain="none", custom_envs=envs)

    assert config(1, 1).one_token_responses
    assert not config(1, None).one_token_responses
    assert not RLVRConfig(pipeline="rlvr", rewards={"math": RewardConfig(name="gsm8k")}).one_token_responses


def test_of_many_ranks_the_first_and_the_last_are_listed():
    roles = {"a": tuple((slot,) for slot in range(128)), "b": tuple((slot,) for slot in range(16))}
    lines = PlacementPlan(num_nodes=16, num_gpus_per_node=8, roles=roles).explain().splitlines()
    assert lines[1].endswith("rank:slots  0:0  1:1  2:2  3:3  4:4  5:5  6:6  7:7  ...  127:127")
    assert lines[2].endswith("14:14  15:15") and "..." not in lines[2]
