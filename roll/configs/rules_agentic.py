"""Rules about environments: tags, groups, concurrency, templates, credit. Each yields what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from roll.configs.environments import CustomEnv, EnvManager
from roll.configs.errors import Violation, did_you_mean
from roll.configs.policy import GROUP_ESTIMATORS, TURN_ESTIMATORS
from roll.configs.rules_rewards import filter_rules

if TYPE_CHECKING:
    from roll.configs.agentic import AgenticConfig


def env_rules(config: AgenticConfig) -> Iterator[Violation]:
    """Each kind of environment by itself."""
    if not config.custom_envs:
        yield Violation("custom_envs", "at least one environment", "custom_envs: {game: {env_type: sokoban-v1}}", {})
    for tag, env in config.custom_envs.items():
        path = f"custom_envs.{tag}"
        if "/" in tag or tag != tag.strip():
            yield Violation(path, "a tag without slashes or spaces at its ends: metrics are named after it", "", tag)
        yield from _pattern(path, env)
        limit = config.actor_infer.generating_args.max_new_tokens or config.response_length
        if env.max_tokens_per_step is not None and env.max_tokens_per_step > config.response_length:
            expected = f"at most response_length ({limit})"
            yield Violation(f"{path}.max_tokens_per_step", expected, "raise response_length", env.max_tokens_per_step)
        if env.max_actions_per_step > 1 and not env.action_separator:
            yield Violation(f"{path}.action_separator", "a text, because max_actions_per_step is above 1", "", "")
        if env.history_length is not None and config.sample_unit == "trajectory":
            expected = "null with sample_unit trajectory, where everything is carried on"
            yield Violation(f"{path}.history_length", expected, "sample_unit=step or concat", env.history_length)
        if env.history_length == 0 and config.sample_unit == "concat":
            expected = "at least 1 with sample_unit concat; 0 is what sample_unit step has"
            yield Violation(f"{path}.history_length", expected, "sample_unit=step", 0)


def _pattern(path: str, env: CustomEnv) -> Iterator[Violation]:
    if env.action_pattern is not None:
        try:
            groups = re.compile(env.action_pattern).groups
        except re.error as error:
            yield Violation(f"{path}.action_pattern", f"a regular expression; {error}", "", env.action_pattern)
        else:
            if groups == 0:
                expected = "a regular expression with a group (...) around the action"
                yield Violation(f"{path}.action_pattern", expected, "<answer>(.*?)</answer>", env.action_pattern)
    tags = env.thinking_tags
    if tags is not None and (len(tags) != 2 or not all(tags)):
        yield Violation(f"{path}.thinking_tags", "two texts that aren't empty", '["<think>", "</think>"]', list(tags))


def manager_rules(config: AgenticConfig) -> Iterator[Violation]:
    """Groups, their sizes and tags, in training and validation."""
    train, val = config.train_env_manager, config.val_env_manager
    yield from _manager(config, "train_env_manager", train)
    size = config.rollout_batch_size
    if size % train.group_size:
        below, above = size // train.group_size * train.group_size, -(-size // train.group_size) * train.group_size
        expected = f"whole groups: {size} episodes / {train.group_size} per group"
        fix = f"rollout_batch_size={below} or {above}" if below else f"rollout_batch_size={above}"
        yield Violation("rollout_batch_size", expected, fix, size)
    elif train.max_traj_per_env > 0 and train.num_env_groups * train.max_traj_per_env < config.groups_per_step:
        most = train.num_env_groups * train.max_traj_per_env
        sums = f"{train.num_env_groups} env groups x {train.max_traj_per_env} = {most}"
        expected = f"enough for a step of {config.groups_per_step} groups; {sums}"
        fix = f"max_traj_per_env={-(-config.groups_per_step // train.num_env_groups)}, or -1"
        yield Violation("train_env_manager.max_traj_per_env", expected, fix, train.max_traj_per_env)
    if val is not None:
        yield from _manager(config, "val_env_manager", val)
        if val.group_filter.type != "no_filter":
            yield Violation("val_env_manager.group_filter", "nothing: validation counts every group", "remove it")
        if val.group_size_redundancy:
            expected = "0: validation plays what it is asked for"
            yield Violation("val_env_manager.group_size_redundancy", expected, "", val.group_size_redundancy)
        if config.val_batch_size is not None and config.val_batch_size % val.group_size:
            expected = f"whole groups of {val.group_size} episodes"
            yield Violation("val_batch_size", expected, "", config.val_batch_size)


def _manager(config: AgenticConfig, path: str, manager: EnvManager) -> Iterator[Violation]:
    for tag in manager.tags:
        if tag not in config.custom_envs:
            expected = f"tags of custom_envs: {', '.join(config.custom_envs)}"
            yield Violation(f"{path}.tags", expected, did_you_mean(tag, config.custom_envs), tag)
    tags, parts = config.tags_of(manager), manager.num_groups_partition
    if parts is not None:
        if len(parts) != len(tags) or sum(parts) != manager.num_env_groups or min(parts, default=0) < 0:
            sums = " + ".join(map(str, parts))
            expected = (
                f"a number for each of the {len(tags)} tags that add up to num_env_groups "
                f"({manager.num_env_groups}); {sums} = {sum(parts)}"
            )
            yield Violation(f"{path}.num_groups_partition", expected, "remove it to split evenly", list(parts))
    elif manager.num_env_groups < len(tags):
        expected = f"at least {len(tags)}, one group for every tag"
        yield Violation(f"{path}.num_env_groups", expected, "or fewer tags", manager.num_env_groups)
    if manager.max_traj_per_env == 0:
        yield Violation(f"{path}.max_traj_per_env", "-1 for no limit, or at least 1", "", 0)
    for key in ("format_penalty", "invalid_action_penalty"):
        value = getattr(manager, key)
        if value > 0:
            yield Violation(f"{path}.{key}", "0 or less: it is added to the reward", f"{path}.{key}={-value:g}", value)
    yield from filter_rules(f"{path}.group_filter", manager.group_filter)


def turn_credit_rules(config: AgenticConfig) -> Iterator[Violation]:
    """Rewards are normalised once; keys of estimators act."""
    rule, name = config.reward_normalization, config.adv_estimator
    if name in GROUP_ESTIMATORS - set(TURN_ESTIMATORS) | {"remax"} and rule.method != "identity":
        expected = f"identity with adv_estimator {name}, which compares the members of a group itself"
        fix = "reward_normalization.method=identity, or adv_estimator=reinforce"
        yield Violation("reward_normalization.method", expected, fix, rule.method)
    for key in ("reward_norm", "use_reward_scaling"):
        if getattr(config, key):
            expected = "off in pipeline agentic: reward_normalization says how rewards are normalised"
            yield Violation(key, expected, "remove it", getattr(config, key))
    if config.discount_over == "turn" and name not in ("gae", "reinforce"):
        expected = f"token with adv_estimator {name}"
        yield Violation("discount_over", expected, "adv_estimator=gae or reinforce, or remove it", "turn")
    if name == "remax":
        expected = "another one: the greedy response of remax is one for one prompt, and episodes have several turns"
        yield Violation("adv_estimator", expected, "adv_estimator=reinforce", name)


def sample_rules(config: AgenticConfig) -> Iterator[Violation]:
    """What has a meaning for prompts of data sets only."""
    data = config.actor_train.data_args
    for key, value in (("file_name", data.file_name), ("procedural", data.procedural)):
        if value:
            expected = "nothing in pipeline agentic: tasks are environments and seeds"
            yield Violation(f"actor_train.data_args.{key}", expected, "custom_envs", list(map(str, value)))
    if config.num_train_epochs:
        expected = "null: environments have no epochs"
        yield Violation("num_train_epochs", expected, "max_steps=100", config.num_train_epochs)
    if config.truncation not in ("error", "filter"):
        expected = "error in pipeline agentic: a context that is too long ends its episode"
        yield Violation("truncation", expected, "remove it", config.truncation)
    if config.render_save_dir and not (config.val_env_manager and config.log_val_generations):
        expected = "null: pictures are made of the first log_val_generations validation episodes, and there are none"
        fix = "log_val_generations=4 and a val_env_manager"
        yield Violation("render_save_dir", expected, fix, config.render_save_dir)
    if config.warm_start is not None and config.pretrain is not None:
        expected = "null: warm_start makes the model to start from, out of the pretrain of its own file"
        yield Violation("pretrain", expected, "remove one of the two", config.pretrain)


def warnings(config: AgenticConfig) -> Iterator[str]:
    """What is allowed but probably not meant."""
    lowest = min((env.max_steps for env in config.custom_envs.values()), default=0)
    if config.adv_estimator == "step_reinforce" and lowest == 1:
        yield "adv_estimator step_reinforce credits turns, but max_steps is 1: every episode is one turn"


RULES = (env_rules, manager_rules, turn_credit_rules, sample_rules)
