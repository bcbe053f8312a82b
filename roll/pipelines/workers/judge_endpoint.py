"""A judge behind an OpenAI-compatible endpoint: retries, rate limits, deadlines. One thread with an event loop."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from roll.configs.schema.judge_config import JudgeConfig
from roll.rewards.judge_cache import JudgeVerdict
from roll.rewards.judge_score import Messages
from roll.utils.json_service import Endpoint, EndpointFailed, endpoint_url, key_in, why_unreachable
from roll.utils.loop_thread import LoopThread


class JudgeUnavailable(ValueError):
    """An endpoint that can't be asked as configured."""


class JudgeFailed(RuntimeError):
    """A request without an answer: the response has no score."""

    def __init__(self, text: str, attempts: int = 1) -> None:
        super().__init__(text)
        self.attempts = attempts


class Pace:
    """Spaces amounts evenly over time: at most `per_minute` of them in a minute."""

    def __init__(self, per_minute: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = 0.0 if per_minute is None else 60.0 / per_minute
        self._clock = clock
        self._free = -float("inf")

    def reserve(self, amount: float = 1.0) -> float:
        """Take the next free time for `amount`; return the seconds until then."""
        now = self._clock()
        start = max(now, self._free)
        self._free = start + amount * self._seconds
        return start - now

    def correct(self, amount: float) -> None:
        """Add what a reservation was too small by; negative where it was too large."""
        self._free += amount * self._seconds


class EndpointJudge:
    """Asks the endpoint. Close it."""

    special: tuple[str, ...] = ()
    """Tokens of the judge's tokenizer, which nobody here knows."""

    def __init__(self, config: JudgeConfig, environ: Mapping[str, str] = os.environ) -> None:
        """Find the key and see whether the endpoint is there; raises `JudgeUnavailable`."""
        assert config.endpoint is not None
        self._config = config
        key = key_in(environ, config.api_key_env)
        if key is None:
            raise JudgeUnavailable(
                f"judge.api_key_env: the environment variable {config.api_key_env} is not set; export it with the "
                "endpoint's key, or remove judge.api_key_env if it needs none"
            )
        why = why_unreachable(config.endpoint)
        if why is not None:
            raise JudgeUnavailable(f"judge.endpoint: {why}; start the service, or correct the address")
        self._requests, self._tokens = Pace(config.requests_per_minute), Pace(config.tokens_per_minute)
        self._endpoint = Endpoint(
            endpoint_url(config.endpoint, "/chat/completions"),
            who="the judge",
            key=key,
            timeout=config.request_timeout_s,
            retries=config.request_retries,
            delay=config.retry_delay_s,
            connections=config.max_in_flight,
        )
        self._thread = LoopThread("judge")

    @property
    def retried(self) -> int:
        """Return tries after the first, of all requests so far."""
        return self._endpoint.retried

    @property
    def identity(self) -> tuple[Any, ...]:
        """Return what answers depend on besides the messages."""
        args = self._config.generating_args
        return (self._config.endpoint, self._config.model, repr(args), self._config.request_args)

    def ask(self, key: str, messages: Messages) -> Future[JudgeVerdict]:
        """Send one request; the future raises `JudgeFailed` where there is no answer."""
        return self._thread.submit(self._ask(key, messages))

    def close(self) -> None:
        """Cancel what is under way and end the thread."""
        self._thread.cancel_all(timeout=10)
        self._thread.submit(self._endpoint.close()).result(timeout=10)
        self._thread.stop(timeout=10)

    # --- on the loop --------------------------------------------------------------------------------------------------

    async def _ask(self, key: str, messages: Messages) -> JudgeVerdict:
        body = self._body(key, messages)
        tokens = sum(len(message["content"]) for message in messages) / 4
        tokens += self._config.generating_args.max_new_tokens or 0

        async def pace() -> None:
            await asyncio.sleep(max(self._requests.reserve(), self._tokens.reserve(tokens)))

        try:
            verdict = self._verdict(await self._endpoint.ask(body, before_try=pace))
        except EndpointFailed as error:
            raise JudgeFailed(str(error), error.attempts) from None
        used = verdict.prompt_tokens + verdict.completion_tokens
        self._tokens.correct(used - tokens if used else 0.0)
        return verdict

    def _body(self, key: str, messages: Messages) -> dict[str, Any]:
        args = self._config.generating_args
        temperature = args.temperature if args.do_sample else 0.0
        body: dict[str, Any] = {
            "model": self._config.model,
            "messages": [dict(message) for message in messages],
            "temperature": temperature,
            "max_tokens": args.max_new_tokens,
        }
        if args.top_p < 1:
            body["top_p"] = args.top_p
        if args.stop_strings:
            body["stop"] = list(args.stop_strings)
        if temperature > 0:
            body["seed"] = int(key[:8], 16) >> 1
        body.update(self._config.request_args)
        return {name: value for name, value in body.items() if value is not None}

    def _verdict(self, reply: Any) -> JudgeVerdict:
        try:
            content = reply["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            what = self._endpoint.clean(f"the judge's reply isn't a chat completion: {json.dumps(reply)}")
            raise JudgeFailed(what) from None
        if not isinstance(content, str):
            raise JudgeFailed("the judge's reply has no text; raise judge.generating_args.max_new_tokens if it reasons")
        usage = reply.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        return JudgeVerdict(content, *(count if isinstance(count, int) and count >= 0 else 0 for count in counts))
