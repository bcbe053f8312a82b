"""Rules about environments: tags, groups, concurrency, templates, credit. Each yields what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator

from roll.configs.catalog.env_table import ENDPOINT
from roll.configs.catalog.estimator_table import ESTIMATORS
from roll.configs.errors import Violation, did_you_mean, nearest, no_effect, problem
from roll.configs.rules import agents_rules as agents
from roll.configs.rules.endpoint_rules import endpoint_rules
from roll.configs.rules.rewards_rules import filter_rules
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.env_config import (
    OTHER_NAMES,
    SYSTEM_NAMES,
    TURN_NAMES,
    CustomEnv,
    EnvManager,
    EnvWorkers,
    RoleConfig,
    names_in,
    unknown_names,
)


def env_rules(config: AgenticConfig) -> Iterator[Violation]:
    """Check each kind of environment by itself."""
    if not config.custom_envs:
        yield Violation("custom_envs", "at least one environment", "custom_envs: {game: {env_type: sokoban-v1}}", {})
    for tag, env in config.custom_envs.items():
        path = f"custom_envs.{tag}"
        if not tag or "/" in tag or tag != tag.strip():
            expected = "a tag that isn't empty, without slashes or spaces at its ends: metrics are named after it"
            yield Violation(path, expected, "another tag", tag)
        yield from _pattern(path, env)
        yield from _stops(path, env, config)
        yield from _templates(path, env)
        if env.max_tokens_per_step is not None and env.max_tokens_per_step > config.response_length:
            expected = f"at most response_length ({config.response_length})"
            yield Violation(f"{path}.max_tokens_per_step", expected, "raise response_length", env.max_tokens_per_step)
        if env.max_actions_per_step > 1 and not env.action_separator.strip():
            expected = "more than blanks between two actions, because max_actions_per_step is above 1"
            yield Violation(f"{path}.action_separator", expected, f'{path}.action_separator="||"', env.action_separator)
        names = [name.strip().casefold() for name in env.action_lookup]
        if len(set(names)) < len(names):
            twice = [name for name, folded in zip(env.action_lookup, names, strict=True) if names.count(folded) > 1]
            expected = "names that differ in more than upper and lower case, which doesn't count"
            yield Violation(f"{path}.action_lookup", expected, "keep one of them", twice)
        if env.history_length == 0 and config.sample_unit == "concat":
            expected = "at least 1 with sample_unit concat; 0 is what sample_unit step has"
            yield Violation(f"{path}.history_length", expected, "sample_unit=step", 0)


def role_rules(config: AgenticConfig) -> Iterator[Violation]:
    """Check who plays which role, where the configuration says it. Which roles there are the environment knows."""
    for tag, env in config.custom_envs.items():
        path = f"custom_envs.{tag}"
        players = list(env.roles.values())
        for role, role_config in env.roles.items():
            if role_config.player == ENDPOINT:
                role_path = f"{path}.roles.{role}"
                if role_config.endpoint is None:
                    fix = f"{role_path}.endpoint=http://localhost:8000/v1"
                    yield Violation(
                        f"{role_path}.endpoint", "the address of the service that plays the role", fix, None
                    )
                else:
                    yield from endpoint_rules(
                        role_path, role_config.endpoint, role_config.model, role_config.api_key_env
                    )
        if env.swap_roles and players and all(player == RoleConfig() for player in players):
            yield no_effect(f"{path}.swap_roles", ": the policy plays every role", "remove it", True)


def _pattern(path: str, env: CustomEnv) -> Iterator[Violation]:
    if env.action_pattern is not None:
        try:
            groups = re.compile(env.action_pattern).groups
        except re.error as error:
            expected = f"a regular expression; {error}"
            fix = "a backslash before a sign that shall stand for itself"
            yield Violation(f"{path}.action_pattern", expected, fix, env.action_pattern)
        else:
            if groups == 0:
                expected = "a regular expression with a group (...) around the action"
                yield Violation(f"{path}.action_pattern", expected, "<answer>(.*?)</answer>", env.action_pattern)
    tags = env.thinking_tags
    if tags is not None and (len(tags) != 2 or not all(tags) or tags[0] == tags[1]):
        expected = "two different texts that aren't empty"
        yield Violation(f"{path}.thinking_tags", expected, '["<think>", "</think>"]', list(tags))


def _stops(path: str, env: CustomEnv, config: AgenticConfig) -> Iterator[Violation]:
    """Check that what ends a response isn't cut off where the action ends with it."""
    val = config.val_env_manager
    sampling = {"actor_infer.generating_args": config.actor_infer.generating_args}
    sampling |= {} if val is None else {"val_env_manager.generating_args": val.generating_args}
    wanted = re.sub(r"\\(.)", r"\1", env.action_pattern or "")
    for where, args in sampling.items():
        for stop in args.stop_strings if not args.include_stop_str_in_output else ():
            if stop in wanted:
                expected = f"true, because {path}.action_pattern looks for {stop!r}, which ends a response"
                yield Violation(f"{where}.include_stop_str_in_output", expected, "remove it", False)


def _templates(path: str, env: CustomEnv) -> Iterator[Violation]:
    for key, text, known in (
        ("system_template", env.system_template or "", SYSTEM_NAMES),
        ("turn_template", env.turn_template, TURN_NAMES),
    ):
        for name in unknown_names(text, known):
            expected = f"one of {', '.join(f'{{{n}}}' for n in known)} (or {{{{{name}}}}}, which stands for {{{name}}})"
            other = OTHER_NAMES.get(name)
            fix = f"write {{{other}}}" if other in known else nearest(name, known) or "remove it"
            yield Violation(f"{path}.{key}", expected, fix, f"{{{name}}}")
    if "observation" not in names_in(env.turn_template):
        expected = "a text with {observation}: the policy would not see what happens"
        yield Violation(f"{path}.turn_template", expected, f'{path}.turn_template="{{observation}}"', env.turn_template)


def manager_rules(config: AgenticConfig) -> Iterator[Violation]:
    """Check groups, their sizes and tags, in training and validation."""
    train, val = config.train_env_manager, config.val_env_manager
    yield from _manager(config, "train_env_manager", train)
    yield from _sizes(
        "train_env_manager", train, "rollout_batch_size", config.rollout_batch_size, config.groups_per_step
    )
    if val is not None:
        yield from _manager(config, "val_env_manager", val)
        if val.group_filter.type != "no_filter":
            yield no_effect("val_env_manager.group_filter", ": validation counts every group", "remove it")
        if val.group_size_redundancy:
            expected = "0: validation plays what it is asked for"
            yield Violation("val_env_manager.group_size_redundancy", expected, "remove it", val.group_size_redundancy)
        size, sequences = val.group_size, val.generating_args.num_return_sequences
        if sequences not in (None, size):
            expected = f"group_size ({size}), which rules in validation"
            yield Violation("val_env_manager.generating_args.num_return_sequences", expected, "remove it", sequences)
        yield from _sizes("val_env_manager", val, "val_batch_size", config.val_batch_size, config.validation_groups)


def _sizes(path: str, manager: EnvManager, key: str, episodes: int | None, groups: int) -> Iterator[Violation]:
    """Check that `episodes`, which `key` says, are whole groups, and environments may play as many groups as are
    wanted."""
    size, most = manager.group_size, manager.num_env_groups * manager.max_traj_per_env
    if episodes is not None and episodes % size:
        below, above = episodes // size * size, -(-episodes // size) * size
        expected = f"whole groups: {episodes} episodes / {size} per group"
        yield Violation(key, expected, f"{key}={below} or {above}" if below else f"{key}={above}", episodes)
    elif manager.max_traj_per_env > 0 and most < groups:
        sums = f"{manager.num_env_groups} env groups x {manager.max_traj_per_env} = {most}"
        expected = f"enough for a {'step' if key == 'rollout_batch_size' else 'validation'} of {groups} groups; {sums}"
        fix = f"max_traj_per_env={-(-groups // manager.num_env_groups)}, or -1"
        yield Violation(f"{path}.max_traj_per_env", expected, fix, manager.max_traj_per_env)


def _manager(config: AgenticConfig, path: str, manager: EnvManager) -> Iterator[Violation]:
    for tag in manager.tags:
        if tag not in config.custom_envs:
            expected = f"tags of custom_envs: {', '.join(config.custom_envs)}"
            yield Violation(f"{path}.tags", expected, did_you_mean(tag, config.custom_envs), tag)
    for tag in sorted({tag for tag in manager.tags if manager.tags.count(tag) > 1}):
        expected = "each tag once; num_groups_partition gives one more groups than another"
        yield Violation(f"{path}.tags", expected, "remove one", tag)
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
        fix = f"{path}.num_env_groups={len(tags)}, or fewer tags"
        yield Violation(f"{path}.num_env_groups", expected, fix, manager.num_env_groups)
    own = ("world_size", "max_env_num_per_worker")
    for key in own if manager.max_env_num_per_worker is not None else ():
        value = getattr(config.env_workers, key)
        if value != EnvWorkers.__dataclass_fields__[key].default:
            why = f", because {path}.max_env_num_per_worker says how many processes there are"
            yield no_effect(f"env_workers.{key}", why, "keep one of the two", value)
    if manager.max_traj_per_env == 0:
        yield Violation(f"{path}.max_traj_per_env", "-1 for no limit, or at least 1", f"{path}.max_traj_per_env=-1", 0)
    for key in ("format_penalty", "invalid_action_penalty"):
        value = getattr(manager, key)
        if value > 0:
            yield Violation(f"{path}.{key}", "0 or less: it is added to the reward", f"{path}.{key}={-value:g}", value)
    yield from filter_rules(f"{path}.group_filter", manager.group_filter)


def turn_credit_rules(config: AgenticConfig) -> Iterator[Violation]:
    """Rewards are normalised once; keys of estimators act."""
    rule, name = config.reward_normalization, config.adv_estimator
    estimator = config.estimator
    if "greedy_rewards" in estimator.needs:
        what = f"{name} compares with the greedy response to one prompt, and episodes have several turns"
        yield problem("adv_estimator", what, "adv_estimator=reinforce", name)
    elif "group" in estimator.needs and "turns" not in estimator.needs and rule.method != "identity":
        expected = f"identity with adv_estimator {name}, which compares the members of a group itself"
        fix = "reward_normalization.method=identity, or adv_estimator=reinforce"
        yield Violation("reward_normalization.method", expected, fix, rule.method)
    if config.discount_over == "turn" and "turn" not in estimator.discounts_over:
        why = "goes by the number of tokens" if estimator.discounts_over else "doesn't discount by gamma"
        expected = f"token with adv_estimator {name}, which {why}"
        yield Violation("discount_over", expected, "adv_estimator=gae, or remove it", "turn")
    if "turns" in estimator.needs and config.reward_clip is not None:
        expected = f"null with adv_estimator {name}, which takes rewards as they are and normalises them itself"
        yield Violation("reward_clip", expected, "remove it, or see advantage_clip", config.reward_clip)
    if "turns" in estimator.needs and config.gamma != 1:
        expected = f"1 with adv_estimator {name}, which discounts turns by step_reward_gamma"
        yield Violation("gamma", expected, f"step_reward_gamma={config.gamma:g}, and remove gamma", config.gamma)
    weights = (config.episode_reward_weight, config.step_reward_weight)
    if "episode_reward_weight" in estimator.keys and not any(weights):
        expected = "more than 0, or step_reward_weight more than 0: without both every advantage is 0"
        yield Violation("episode_reward_weight", expected, "episode_reward_weight=1", 0.0)


def warm_start_rules(config: AgenticConfig) -> Iterator[Violation]:
    """Check that the run starts from the model that a warm start makes."""
    if config.warm_start is None:
        return
    names = {"pretrain": config.pretrain}
    for role in ("actor_train", "actor_infer"):
        names[f"{role}.model_args.model_name_or_path"] = config.sections[role].model_args.model_name_or_path
    for key, name in names.items():
        if name is not None:
            expected = "null: warm_start makes the model to start from, out of the pretrain of its own file"
            yield Violation(key, expected, f"remove {key}, or warm_start", name)


def warnings(config: AgenticConfig) -> Iterator[str]:
    """Yield what is allowed but probably not meant."""
    longest = max((env.max_steps for env in config.custom_envs.values()), default=0)
    if "turns" in config.estimator.needs and longest == 1:
        yield f"adv_estimator {config.adv_estimator} credits turns, but max_steps is 1: every episode is one turn"
    for key in sorted({key for entry in ESTIMATORS.values() for key in entry.keys}):
        value = getattr(config, key)
        if key not in config.estimator.keys and value != type(config).__dataclass_fields__[key].default:
            yield f"{key} {value:g} does nothing: adv_estimator {config.adv_estimator} doesn't read it"
    yield from agents.warnings(config)
    workers = config.env_processes
    for path, manager in config.managers.items():
        if workers.room is not None and workers.room < manager.episodes_at_once:
            yield (
                f"{path} wants {manager.episodes_at_once} episodes at once, and environment processes have room for "
                f"{workers.room} ({workers.world_size} x {workers.max_env_num_per_worker}): the others wait"
            )


RULES = (
    env_rules,
    agents.agent_rules,
    agents.gateway_rules,
    role_rules,
    manager_rules,
    turn_credit_rules,
    warm_start_rules,
)
