"""Rules about domains: their rewards, tags, filters. Each yields what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from roll.catalog.entries import OWN_PATH
from roll.catalog.rewards import REWARDS
from roll.configs.errors import NO_VALUE, Violation, nearest
from roll.configs.schema.judge_config import JUDGE
from roll.configs.schema.reward_config import REWARD_MODEL, REWARD_MODELS, QueryFilterConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.utils.importing import suggested_path


def reward_rules(config: RLVRConfig) -> Iterator[Violation]:
    """Domains, their tags, their filters."""
    if not config.rewards:
        yield Violation("rewards", "at least one domain", "e.g. rewards: {math: {name: math_rule}}", {})
    owner: dict[str, str] = {}
    for domain, reward in config.rewards.items():
        path = f"rewards.{domain}"
        yield from _reward_name(config, path, reward.name)
        if reward.rollout is not None and not OWN_PATH.match(reward.rollout):
            expected = "a class as package.module:Class or path/to/file.py:Class"
            yield Violation(f"{path}.rollout", expected, f"{path}.rollout=episodes.py:MyEpisode", reward.rollout)
        for tag in config.tags_of(domain):
            other = owner.setdefault(tag, domain)
            if other != domain:
                expected = f"tags of one domain only: {tag!r} is also in rewards.{other}"
                yield Violation(f"{path}.tag_included", expected, "remove it from one of them", tag)
        yield from filter_rules(f"{path}.query_filter_config", reward.query_filter_config)
    used = any(reward.name == "custom" for reward in config.rewards.values())
    if config.custom_reward_function is not None and not used:
        expected = "a domain that uses it"
        yield Violation("custom_reward_function", expected, "rewards.<domain>.name: custom, or remove the section")


def score_rules(config: RLVRConfig) -> Iterator[Violation]:
    """What becomes of scores before the estimator."""
    for key in ("reward_norm", "use_reward_scaling"):
        if config.estimator.needs_greedy and getattr(config, key):
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


def filter_rules(path: str, rule: QueryFilterConfig) -> Iterator[Violation]:
    """A filter lets something through."""
    args = rule.filter_args
    if rule.type == "mean_filter" and args.threshold_down >= args.threshold_up:
        expected = f"less than threshold_up ({args.threshold_up}), or every group is dropped"
        fix = "the lower bound first, or type: no_filter"
        yield Violation(f"{path}.filter_args.threshold_down", expected, fix, args.threshold_down)
