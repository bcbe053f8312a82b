"""Rules about domains: their rewards, tags, filters. Each yields what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from roll.configs.catalog.entries import OWN_PATH
from roll.configs.catalog.reward_table import REWARDS
from roll.configs.errors import NO_VALUE, Violation, nearest, no_effect, problem
from roll.configs.schema.judge_config import JUDGE
from roll.configs.schema.reward_config import (
    REWARD_MODEL,
    REWARD_MODELS,
    WEIGHTED,
    QueryFilterConfig,
    ResponseFilterConfig,
    RewardConfig,
)
from roll.configs.schema.rl_config import UNCONFINED, RLConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.utils.importing import suggested_path
from roll.utils.patterns import compile_pattern

MAX_NAME = 100
COMBINED_PARTS = ("rule", "reward_model", "reward_model_truncated")
"""Parts that the sum of a reward function and a reward model has itself."""


def reward_rules(config: RLVRConfig) -> Iterator[Violation]:
    """Domains, their tags, their filters."""
    if not config.rewards:
        yield Violation("rewards", "at least one domain", "e.g. rewards: {math: {name: math_rule}}", {})
    owner: dict[str, str] = {}
    for domain, reward in config.rewards.items():
        path = f"rewards.{domain}"
        yield from printable_rules("rewards", domain, "domain")
        yield from _reward_name(config, path, reward.name)
        yield from _options(f"{path}.reward_kwargs", reward.name, reward.reward_kwargs)
        yield from _parts(path, reward)
        if reward.rollout is not None and not OWN_PATH.match(reward.rollout):
            expected = "a class as package.module:Class or path/to/file.py:Class"
            yield Violation(f"{path}.rollout", expected, f"{path}.rollout=episodes.py:MyEpisode", reward.rollout)
        for tag in config.tags_of(domain):
            other = owner.setdefault(tag, domain)
            if other != domain:
                expected = f"tags of one domain only: {tag!r} is also in rewards.{other}"
                yield Violation(f"{path}.tag_included", expected, "remove it from one of them", tag)
        yield from filter_rules(f"{path}.query_filter_config", reward.query_filter_config)
        yield from response_filter_rules(f"{path}.response_filter_config", reward.response_filter_config)
    used = any(reward.name == "custom" for reward in config.rewards.values())
    if config.custom_reward_function is not None and not used:
        expected = "a domain that uses it"
        yield Violation("custom_reward_function", expected, "rewards.<domain>.name: custom, or remove the section")


SANDBOXES = ("auto", "sandlock", "bwrap", UNCONFINED)
_ADDRESS = re.compile(r"^https?://[^\s/@]+(/\S*)?$")


def sandbox_rules(config: RLConfig) -> Iterator[Violation]:
    """Check that the sandbox is a known one, or the address of one."""
    if config.sandbox not in SANDBOXES and not _ADDRESS.match(config.sandbox):
        expected = f"one of {', '.join(SANDBOXES)}, or the address of a sandbox server, http://host:port"
        yield Violation("sandbox", expected, nearest(config.sandbox, SANDBOXES), config.sandbox)


def score_rules(config: RLVRConfig) -> Iterator[Violation]:
    """Check what becomes of scores before the estimator."""
    for key in ("reward_norm", "use_reward_scaling"):
        if "greedy_rewards" in config.estimator.needs and getattr(config, key):
            off = "null" if key == "reward_norm" else "false"
            why = f"{config.adv_estimator} subtracts the greedy response's score, which stays as it is"
            expected = f"{off}, because {why}"
            yield Violation(key, expected, f"{key}={off}, or another adv_estimator", getattr(config, key))
    shaping = config.overlong_shaping
    limit = config.actor_infer.generating_args.max_new_tokens or config.response_length
    if shaping is not None and shaping.buffer > limit:
        expected = f"at most {limit}, the longest response (max_new_tokens, else response_length)"
        yield Violation("overlong_shaping.buffer", expected, "", shaping.buffer)


def _reward_name(config: RLVRConfig, path: str, name: str) -> Iterator[Violation]:
    known = (*REWARDS, "custom", REWARD_MODEL, JUDGE, *(f"{REWARD_MODELS}.{name}" for name in config.reward_models))
    if name == "custom" and config.custom_reward_function is None:
        expected = "a path and a name, because a domain has name: custom"
        fix = "custom_reward_function: {path: my.py, name: score}"
        yield Violation("custom_reward_function", expected, fix, NO_VALUE)
    if name in known or name.startswith(f"{REWARD_MODELS}.") or OWN_PATH.match(name):
        return
    expected = f"one of {', '.join(known)}; or package.module:function or path/to/file.py:function"
    yield Violation(f"{path}.name", expected, nearest(name, known) or suggested_path(name), name)


def printable_rules(path: str, name: str, what: str) -> Iterator[Violation]:
    """Check that a name that metrics carry is a line of readable text."""
    if not name.strip() or not name.isprintable() or name != name.strip() or len(name) > MAX_NAME:
        expected = f"a {what}'s name of printable characters, at most {MAX_NAME}, without white space around it"
        yield Violation(path, expected, "rename it", name)


def _parts(path: str, reward: RewardConfig) -> Iterator[Violation]:
    """Check that a weighted sum has terms, each scored by a function."""
    if reward.name != WEIGHTED:
        if reward.parts:
            yield no_effect(f"{path}.parts", f" unless name is {WEIGHTED}", f"{path}.name={WEIGHTED}, or remove it")
        return
    if not reward.parts:
        fix = f"{path}.parts: {{right: {{name: math_rule}}, short: {{name: length, weight: 0.1, reward_kwargs: ...}}}}"
        yield Violation(f"{path}.parts", "the terms of the sum, by name", fix, NO_VALUE)
    known = [name for name in REWARDS if name != WEIGHTED]
    for part, term in reward.parts.items():
        where = f"{path}.parts.{part}"
        yield from printable_rules(f"{path}.parts", part, "part")
        if reward.reward_model_weight is not None and part in COMBINED_PARTS:
            taken = ", ".join(COMBINED_PARTS)
            message = f"a part is called {part}, a name that the sum with a reward model uses ({taken})"
            yield problem(f"{path}.parts", message, "rename it")
        if term.name not in known and not OWN_PATH.match(term.name):
            expected = f"one of {', '.join(known)}; or package.module:function or path/to/file.py:function"
            yield Violation(
                f"{where}.name", expected, nearest(term.name, known) or suggested_path(term.name), term.name
            )
        yield from _options(f"{where}.reward_kwargs", term.name, term.reward_kwargs)


def _options(path: str, name: str, kwargs: Mapping[str, Any]) -> Iterator[Violation]:
    """Check patterns and addresses; a function's other options are compared with its signature."""
    if name in ("regex", "format") and kwargs.get("pattern") is not None:
        try:
            compile_pattern(kwargs["pattern"])
        except ValueError as error:
            yield problem(f"{path}.pattern", str(error), "in YAML, put patterns into single quotes")
    if name == "http" and "url" in kwargs and not re.match(r"https?://[^\s/]+", str(kwargs["url"])):
        yield Violation(f"{path}.url", "the address of a reward server, http://host:port/path", "", kwargs["url"])


def response_filter_rules(path: str, rule: ResponseFilterConfig) -> Iterator[Violation]:
    """Check that a filter of responses has a bound, and lets something through."""
    low, high = rule.filter_args.threshold_down, rule.filter_args.threshold_up
    args_path = f"{path}.filter_args"
    if rule.type == "no_filter":
        for key, bound in (("threshold_down", low), ("threshold_up", high)):
            if bound is not None:
                fix = f"{path}.type=score_filter (or length_filter), or remove it"
                yield no_effect(f"{args_path}.{key}", " with type: no_filter", fix, bound)
    elif low is None and high is None:
        yield Violation(args_path, "threshold_down or threshold_up", f"{args_path}.threshold_down=0", NO_VALUE)
    elif low is not None and high is not None and low >= high:
        expected = f"less than threshold_up ({high}), or every response is dropped"
        yield Violation(f"{args_path}.threshold_down", expected, "the lower bound first, or type: no_filter", low)


def filter_rules(path: str, rule: QueryFilterConfig) -> Iterator[Violation]:
    """Check that a filter lets something through."""
    args = rule.filter_args
    if rule.type == "mean_filter" and args.threshold_down >= args.threshold_up:
        expected = f"less than threshold_up ({args.threshold_up}), or every group is dropped"
        fix = "the lower bound first, or type: no_filter"
        yield Violation(f"{path}.filter_args.threshold_down", expected, fix, args.threshold_down)
