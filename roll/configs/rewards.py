"""RLVR's own sections: how a domain is scored, what validation does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from roll.configs.base import DataArgs, GeneratingArgs
from roll.configs.fields import number, one_or_many

REWARDS = ("math_rule", "gsm8k", "reasoning_gym", "custom")
"""Built-in values of `rewards.<domain>.name`; `custom` is the one in `custom_reward_function`."""


@dataclass(frozen=True, kw_only=True)
class FilterArgs:
    """Thresholds of a query filter."""

    threshold_down: float = 0.0
    """`mean_filter`: keep groups with a mean score above this."""

    threshold_up: float = 1.0
    """`mean_filter`: keep groups with a mean score below this."""

    std_threshold: float = number(0.0, ge=0)
    """`std_filter`: keep groups whose scores have a standard deviation above this; 0 drops groups of equal
    scores."""


@dataclass(frozen=True, kw_only=True)
class QueryFilterConfig:
    """Which groups are worth training on; dropped ones are counted and replaced by other prompts."""

    type: Literal["no_filter", "mean_filter", "std_filter"] = "no_filter"
    """By nothing, by mean score, by standard deviation of scores."""

    filter_args: FilterArgs = field(default_factory=FilterArgs)
    """Its thresholds."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How one domain is scored."""

    name: str
    """A built-in reward: math_rule, gsm8k, reasoning_gym; `custom`, see `custom_reward_function`; or a
    function of your own as `package.module.function`."""

    tag_included: tuple[str, ...] = one_or_many()
    """Tags of the rows that belong to this domain. Empty: the domain's own name."""

    weight: float = 1.0
    """Factor on the domain's scores in training; validation reports unweighted scores."""

    query_filter_config: QueryFilterConfig = field(default_factory=QueryFilterConfig)
    """Dynamic filtering of groups. Not in validation."""

    world_size: int = number(1, ge=1)
    """Processes that score this domain's responses."""

    timeout_s: float = number(30.0, gt=0)
    """Seconds for one response; beyond, the sample has status `reward_error` and is retried, never a
    score."""

    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of that reward; an unknown one is refused."""


@dataclass(frozen=True, kw_only=True)
class CustomRewardFunction:
    """A function of your own, used by domains with `name: custom`."""

    path: str
    """Python file. Relative to the working directory."""

    name: str
    """Function in it."""

    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to it as keyword arguments; `rewards.<domain>.reward_kwargs` wins."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Held-out prompts, with their own sampling."""

    data_args: DataArgs
    """Validation prompts."""

    generating_args: GeneratingArgs = field(default_factory=lambda: GeneratingArgs(temperature=0.0))
    """Sampling in validation; default greedy, one response per prompt."""

    pass_at_k: tuple[int, ...] = one_or_many()
    """Report the unbiased pass@k for these k <= `generating_args.num_return_sequences`. Empty: mean accuracy
    only."""

    pass_threshold: float = 1.0
    """A response counts as right from this score on."""
