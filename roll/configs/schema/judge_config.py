"""The section `judge`: a language model that grades responses, behind an endpoint or on an engine of the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from roll.configs.schema.acts_if import needs, unless
from roll.configs.schema.fields import number
from roll.configs.schema.strategy_config import StrategyArgs
from roll.configs.schema.worker_config import GeneratingArgs, WorkerConfig

JUDGE = "judge"
"""The value of `rewards.<domain>.name` that means the judge of the section of this name."""

RUBRIC_KEYS = ("prompt", "score_format", "score_pattern", "score_min", "score_max", "normalize", "unparsed_score")
"""Keys of the section that a domain may set for itself, in `reward_kwargs`."""

_REMOTE = needs("endpoint", why="an engine of the run has none of these", fix="judge.endpoint=http://..., or remove it")
_OWN = unless("endpoint", why="the model runs behind the endpoint", fix="remove it, or judge.endpoint=null")


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(WorkerConfig):
    """A language model that grades responses, used by domains with `name: judge` or a `judge_weight`. Behind an
    OpenAI-compatible `endpoint`, or on engines of the run with devices of their own."""

    strategy_args: StrategyArgs = field(default_factory=lambda: StrategyArgs(strategy_name="hf_infer"))
    endpoint: str | None = None
    """Address of an OpenAI-compatible service, such as `http://localhost:8000/v1`: requests go to its
    `/chat/completions`. null: an engine of the run with this section's model, backend and `device_mapping`."""
    model: str | None = field(default=None, metadata={"acts_if": (_REMOTE,), "idle": ()})
    """The model's name at the endpoint."""
    api_key_env: str | None = field(default=None, metadata={"acts_if": (_REMOTE,), "idle": ()})
    """Environment variable that holds the endpoint's key. The key itself never stands in a file, a log or an error.
    null: no key is sent."""
    request_args: dict[str, Any] = field(default_factory=dict, metadata={"acts_if": (_REMOTE,), "idle": ()})
    """Further fields of a request's body, e.g. `{reasoning_effort: low}`; a null takes a field out."""
    prompt: str = "quality"
    """What the judge reads: `quality` (grade the answer), `reference` (compare it with the row's ground truth), or a
    text with `{response}`, in which `{prompt}`, `{ground_truth}`, `{format}` and columns of the row are filled in."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict, metadata={"acts_if": (_OWN,), "idle": ()})
    """Variables that the judge's chat template reads, e.g. `{enable_thinking: false}`, on an engine of the run. An
    endpoint gets them by `request_args`."""
    system_prompt: str | None = None
    """System message before it. null: none."""
    score_format: Literal["score", "json", "brackets", "yes_no"] = "score"
    """How the judge states its score: a line `Score: 7`, a JSON object with `score`, `[[7]]`, or a last line with yes
    or no. The last one in its answer counts; `{format}` in the prompt asks for it."""
    score_pattern: str | None = None
    """A regular expression whose only group is the score, in place of `score_format`. The last match counts."""
    score_min: float = 0.0
    """Lowest score. One outside the range is no score."""
    score_max: float = 10.0
    """Highest score."""
    normalize: bool = True
    """Map the range onto 0 to 1. false: the reward is the score as stated."""
    unparsed_score: float | None = None
    """Reward of a response where the judge's answer states no score. null: status `reward_error`, no reward."""
    generating_args: GeneratingArgs = field(default_factory=lambda: GeneratingArgs(temperature=0.0, max_new_tokens=512))
    """How the judge's answer is sampled; default greedy, at most 512 tokens."""
    max_length: int = number(4096, ge=2, acts_if=(_OWN,))
    """Tokens of the judge's prompt and answer together, on an engine of the run. A longer one: status
    `reward_error`."""
    max_in_flight: int = number(32, ge=1)
    """Requests at once, for an engine of the run those that one engine decodes at once."""
    requests_per_minute: float | None = number(None, gt=0, acts_if=(_REMOTE,))
    """Limit of the endpoint, kept by spacing requests evenly. null: none."""
    tokens_per_minute: float | None = number(None, gt=0, acts_if=(_REMOTE,))
    """Likewise for tokens of prompts and answers, estimated first and corrected by what the endpoint reports."""
    request_timeout_s: float = number(60.0, gt=0)
    """Seconds for one request to the endpoint, from its first byte to its last."""
    request_retries: int = number(3, ge=0)
    """Further tries after a refused connection, a timeout, HTTP 408, 409, 429 or 5xx; then status `reward_error`."""
    retry_delay_s: float = number(1.0, ge=0)
    """Seconds before the first of them; doubled each time, at most 60, and at least what `Retry-After` asks for."""
    input_cost: float = number(0.0, ge=0)
    """Price of a million prompt tokens, for the metric `judge/cost`."""
    output_cost: float = number(0.0, ge=0)
    """Price of a million answer tokens."""
    cache_size: int = number(100_000, ge=0)
    """Answers kept in memory by model, prompt and sampling: the same request isn't made twice. 0: none."""
    cache_file: str | None = field(
        default=None, metadata={"acts_if": (needs("cache_size", fix="judge.cache_size=100000"),), "idle": ()}
    )
    """A jsonl file that keeps them for later runs. Relative to the working directory. null: none."""
