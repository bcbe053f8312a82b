"""RLVR's own sections: how a domain is scored, what validation does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from roll.configs.schema.acts_if import ActsIf, acting, unless
from roll.configs.schema.fields import number, one_or_many
from roll.configs.schema.judge_config import JUDGE
from roll.configs.schema.strategy_config import StrategyArgs
from roll.configs.schema.worker_config import DataArgs, ForwardConfig, GeneratingArgs

REWARD_MODEL = "reward_model"
"""The value of `rewards.<domain>.name` that means the model of the section of this name."""

WEIGHTED = "weighted"
"""The value of `rewards.<domain>.name` that means the sum of its `parts`."""


REWARD_MODELS = "reward_models"
"""`reward_models.<name>` as `rewards.<domain>.name` means that model of the section of this name."""


def _without(*names: str, why: str, fix: str) -> tuple[ActsIf, ...]:
    words = " and ".join(f"`name: {name}`" for name in names)
    return (unless("scorer", *names, words=f"without {words}", why=why, fix=fix),)


def _of_function(why: str, fix: str, *but: str) -> tuple[ActsIf, ...]:
    names = (name for name in (REWARD_MODEL, REWARD_MODELS, JUDGE) if name not in but)
    return _without(*names, why=why, fix=fix)


_NOTHING_TO_COMBINE = {
    "why": "there is nothing to combine it with",
    "fix": "{section}.weight scales a domain's scores; or name a rule",
}


@dataclass(frozen=True, kw_only=True)
class FilterArgs:
    """Thresholds of a query filter."""

    threshold_down: float = 0.0
    """`mean_filter`: keep groups with a mean score above this."""
    threshold_up: float = 1.0
    """`mean_filter`: keep groups with a mean score below this."""
    std_threshold: float = number(0.0, ge=0)
    """`std_filter`: keep groups whose scores have a standard deviation above this; 0 drops groups of equal scores."""


@dataclass(frozen=True, kw_only=True)
class QueryFilterConfig:
    """Which groups are worth training on; dropped ones are counted and replaced by other prompts."""

    type: Literal["no_filter", "mean_filter", "std_filter"] = "no_filter"
    """By nothing, by mean score, by standard deviation of scores."""
    filter_args: FilterArgs = field(default_factory=FilterArgs)
    """Its thresholds."""


@dataclass(frozen=True, kw_only=True)
class ResponseFilterArgs:
    """Bounds of a response filter."""

    threshold_down: float | None = None
    """Keep responses with a score, or a number of tokens, above this. null: no bound."""
    threshold_up: float | None = None
    """Keep responses with one below this. null: no bound."""


@dataclass(frozen=True, kw_only=True)
class ResponseFilterConfig:
    """Which single responses are worth training on. Others leave their group before it is compared, counted and listed
    in `dropped.jsonl`; a group with fewer than two left is replaced by another prompt."""

    type: Literal["no_filter", "score_filter", "length_filter"] = "no_filter"
    """By nothing, by score, by response tokens."""
    filter_args: ResponseFilterArgs = field(default_factory=ResponseFilterArgs)
    """Its bounds."""


@dataclass(frozen=True, kw_only=True)
class RewardPart:
    """One term of a weighted sum."""

    name: str
    """What scores it, as `rewards.<domain>.name`: a built-in reward, or a function of your own by its path."""
    weight: float = 1.0
    """Factor of its score in the sum."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of that reward; an unknown one is refused."""


ANY_TAG = "*"


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How one domain is scored."""

    name: str
    """A built-in reward: math_rule, gsm8k, reasoning_gym, code, ifeval, choice, exact, regex, format, length,
    repetition, http; `none`, no score; `weighted`, a sum of `parts`; `custom`, see `custom_reward_function`;
    `reward_model`, `reward_models.<name>` or `judge`, see there; or a function of your own as
    `package.module:function` or `path/to/file.py:function`."""
    parts: dict[str, RewardPart] = field(default_factory=dict)
    """Of `name: weighted`: its terms by the name that they are logged under, `{name, weight, reward_kwargs}` each."""
    rule_weight: float | None = None
    """Score = rule_weight * what `name` gives + reward_model_weight * what the reward model gives + likewise for
    `reward_models_weights` and `judge_weight`. This one and another, or none. null: `name` alone."""
    reward_model_weight: float | None = acting(None, *_without(REWARD_MODEL, **_NOTHING_TO_COMBINE))
    """That factor of the reward model's score. Needs the section `reward_model`."""
    reward_models_weights: dict[str, float] = field(default_factory=dict)
    """Those factors of the scores of `reward_models`, by their names, e.g. `{quality: 0.7, safety: 0.3}`."""
    judge_weight: float | None = acting(None, *_without(JUDGE, **_NOTHING_TO_COMBINE))
    """That factor of the judge's score. Needs the section `judge`."""
    tag_included: tuple[str, ...] = one_or_many()
    """Tags of the rows that belong to this domain; `"*"`: all that belong to no other. Empty: the domain's own name."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template in this domain's prompts, over the run's `chat_template_kwargs`."""
    rollout: str | None = None
    """A class of your own that plays this domain's episodes, as `package.module:Class` or `path/to/file.py:Class`.
    null: one prompt, one response."""
    tools: tuple[str, ...] = one_or_many()
    """Names in `tools` that the policy can call in this domain's episodes, over several turns (`tool_use.max_turns`).
    The reward function is given the last response, one of TRL's or verl's kind all of them. Empty: none."""
    interaction: str | None = None
    """Name in `interactions` of the simulated user who answers this domain's responses; a row's `interaction_kwargs`
    may name another. null: nobody, unless the row says so."""
    weight: float = number(1.0, ge=0, le=1e6)
    """Factor on the domain's scores in training; validation reports unweighted scores."""
    query_filter_config: QueryFilterConfig = field(default_factory=QueryFilterConfig)
    """Dynamic filtering of groups. Not in validation."""
    response_filter_config: ResponseFilterConfig = field(default_factory=ResponseFilterConfig)
    """Dynamic filtering of single responses, before groups are filtered and normalised. Not in validation."""
    world_size: int = number(
        1, ge=1, acts_if=_of_function("it has no processes of its own", "reward_model.device_mapping=... for a model's")
    )
    """Processes that score this domain's responses."""
    timeout_s: float = number(
        30.0,
        gt=0,
        acts_if=_of_function(
            "rpc_timeout limits the model's calls", "rpc_timeout=..., for a judge judge.request_timeout_s"
        ),
    )
    """Seconds for one response (one call of a function that takes lists); beyond, the sample has status `reward_error`,
    never a score, and isn't tried again: it had its whole time. A reward model has `rpc_timeout` instead."""
    concurrency: int = number(
        16, ge=1, acts_if=_of_function("it scores responses in batches of its own", "reward_model.infer_batch_size=...")
    )
    """Responses that one process scores at once with an `async` function (awaited side by side) or one that takes
    lists (at most so many in a call). A plain function scores one after the other."""
    memory_limit_mb: int = number(8192, ge=256, acts_if=_of_function("it has no processes of its own", "remove it"))
    """What one of these processes may allocate; a function that wants more raises `MemoryError`."""
    reward_kwargs: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "acts_if": _of_function("its options stand in the section reward_model", "remove it", JUDGE),
            "idle": (),
        },
    )
    """Options of that reward; an unknown one is refused. With `name: judge`: this domain's own `prompt`, `score_format`
    and the other keys of `judge` about its score."""

    @property
    def scorer(self) -> str:
        """Return `name`, or `reward_models` for one of those."""
        return REWARD_MODELS if self.name.startswith(f"{REWARD_MODELS}.") else self.name

    @property
    def is_function(self) -> bool:
        """Return whether `name` is a function, which runs in processes of its own."""
        return self.scorer not in (REWARD_MODEL, REWARD_MODELS, JUDGE)

    @property
    def added(self) -> dict[str, float]:
        """Return what is added to the score of `name`, by role, with its weight."""
        named = {REWARD_MODEL: self.reward_model_weight, JUDGE: self.judge_weight}
        weights = {role: weight for role, weight in named.items() if weight is not None}
        return {**weights, **{f"{REWARD_MODELS}.{name}": w for name, w in self.reward_models_weights.items()}}

    @property
    def models(self) -> tuple[str, ...]:
        """Roles that have a say in the score."""
        return (*(() if self.is_function else (self.name,)), *self.added)

    @property
    def uses_reward_model(self) -> bool:
        """Return whether the reward model has a say."""
        return REWARD_MODEL in self.models


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
class RewardModelConfig(ForwardConfig):
    """A sequence classifier that scores responses, used by domains with `name: reward_model` or a
    `reward_model_weight`. Its model: `model_args.model_name_or_path`, else `reward_pretrain`."""

    strategy_args: StrategyArgs = field(default_factory=lambda: StrategyArgs(strategy_name="fsdp2_infer"))
    infer_batch_size: int = number(1, ge=1)
    """Responses per forward pass on one rank. 1: a score depends on its own response alone, to the last bit. More is
    faster for short responses; passes are then filled with what one decoding round finished."""
    template: str = "native"
    """How prompt and response become the text that this model reads, in the words of `data_args.template`, with this
    model's own tokenizer: `native` is its chat template. After a text with `{prompt}` the response follows."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables that this model's chat template reads; the run's are the policy's."""
    label: int | None = number(None, ge=0)
    """Which output is the score. null: the only one; required where the model has several."""
    max_length: int | None = number(None, ge=2)
    """Tokens of prompt and response together. null: what the model can hold."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """A longer text: no score (status `reward_error`), or cut there and counted as the part
    `reward_model_truncated`. The score is read at the last token that is left."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Held-out prompts, with their own sampling."""

    data_args: DataArgs = field(default_factory=DataArgs)
    """Validation prompts. Without any, `validation_share` holds some of the training prompts out."""
    generating_args: GeneratingArgs = field(default_factory=lambda: GeneratingArgs(temperature=0.0))
    """Sampling in validation; default greedy, one response per prompt."""
    shuffle: bool = False
    """Play the prompts in an order that the run's seed draws, the same in every validation, so that the samples shown
    (`log_val_generations`) come from all files. Accuracies stay as they are. false: in the order of the files."""
    pass_at_k: tuple[int, ...] = one_or_many()
    """Report the unbiased pass@k for these k <= `generating_args.num_return_sequences`. Empty: mean accuracy only."""
    maj_at_k: tuple[int, ...] = one_or_many()
    """Report how often the answer that most of k responses state is right, for these k <=
    `generating_args.num_return_sequences`. What a response states says its reward (docs/rewards.md). Empty: no vote."""
    pass_threshold: float = 1.0
    """A response counts as right from this score on."""
    bootstrap: int | None = number(None, ge=2)
    """Report the standard error of each accuracy (`accuracy_spread`) and majority vote, by so many draws of the tasks;
    1000 is usual."""
