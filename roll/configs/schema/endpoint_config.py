"""Options of `endpoint`: a frozen model behind a service that tells log-probs of given tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from roll.configs.schema.fields import number
from roll.configs.schema.strategy_options import StrategyConfig


@dataclass(frozen=True, kw_only=True)
class EndpointConfig(StrategyConfig):
    """A teacher behind a service, such as vLLM's or SGLang's server: it gets the student's token ids as a prompt and
    says how likely each was."""

    endpoint: str | None = None
    """Its address, such as `http://localhost:8000/v1`."""
    model: str | None = None
    """The model's name there."""
    api: Literal["prompt_logprobs", "sglang", "echo"] = "prompt_logprobs"
    """How log-probs of a prompt are asked for: completions with `prompt_logprobs` (vLLM); SGLang's own `/generate`; or
    completions with `echo` and `logprobs`, which others have, too. Where such a service writes tokens as texts and not
    as `token_id:7`, only `distill.use_as: advantage` works."""
    api_key_env: str | None = None
    """Environment variable that holds the service's key. The key itself never stands in a file, a log or an error.
    null: no key is sent."""
    request_args: dict[str, Any] = field(default_factory=dict)
    """Further fields of a request's body; a null takes a field out."""
    max_in_flight: int = number(32, ge=1)
    """Requests at once, each with one response."""
    request_timeout_s: float = number(120.0, gt=0)
    """Seconds for one request, from its first byte to its last."""
    request_retries: int = number(3, ge=0)
    """Further tries after a refused connection, a timeout, HTTP 408, 409, 429 or 5xx; then the run ends."""
    retry_delay_s: float = number(1.0, ge=0)
    """Seconds before the first of them; doubled each time, at most 60, and at least what `Retry-After` asks for."""
