"""A judge behind an OpenAI-compatible endpoint: retries, rate limits, deadlines. One thread with an event loop."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from roll.configs.checks.judge_endpoint import why_unreachable
from roll.configs.schema.judge_config import JudgeConfig
from roll.rewards.judge import Messages
from roll.rewards.judge_cache import Verdict
from roll.strategies.loop_thread import LoopThread

_LONGEST_DELAY = 60.0
_LARGEST_REPLY = 4 << 20
_AGAIN = frozenset({408, 409, 425, 429})
"""HTTP statuses that pass; those of 500 and more do too."""
_SHOWN = 300
"""Characters of a reply that an error shows."""


class JudgeUnavailable(ValueError):
    """An endpoint that can't be asked as configured."""


class JudgeFailed(RuntimeError):
    """A request without an answer: the response has no score."""

    def __init__(self, text: str, attempts: int = 1) -> None:
        super().__init__(text)
        self.attempts = attempts


class _PassingError(RuntimeError):
    """A failure after which another try may succeed."""

    def __init__(self, text: str, wait: float = 0.0) -> None:
        super().__init__(text)
        self.wait = wait


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
        self._url = config.endpoint.rstrip("/") + "/chat/completions"
        self._key = ""
        if config.api_key_env is not None:
            self._key = environ.get(config.api_key_env, "").strip()
            if not self._key:
                raise JudgeUnavailable(
                    f"judge.api_key_env: the environment variable {config.api_key_env} is not set; export it with the "
                    "endpoint's key, or remove judge.api_key_env if it needs none"
                )
        why = why_unreachable(config.endpoint)
        if why is not None:
            raise JudgeUnavailable(f"judge.endpoint: {why}; start the service, or correct the address")
        self.retried = 0
        """Tries after the first, of all requests so far."""
        self._requests, self._tokens = Pace(config.requests_per_minute), Pace(config.tokens_per_minute)
        self._slots = asyncio.Semaphore(config.max_in_flight)
        self._session: Any = None
        self._thread = LoopThread("judge")

    @property
    def identity(self) -> tuple[Any, ...]:
        """What answers depend on besides the messages."""
        args = self._config.generating_args
        return (self._config.endpoint, self._config.model, repr(args), self._config.request_args)

    def ask(self, key: str, messages: Messages) -> Future[Verdict]:
        """Send one request; the future raises `JudgeFailed` where there is no answer."""
        return self._thread.submit(self._ask(key, messages))

    def close(self) -> None:
        """Cancel what is under way and end the thread."""
        self._thread.cancel_all(timeout=10)
        if self._session is not None:
            self._thread.submit(self._session.close()).result(timeout=10)
        self._thread.stop(timeout=10)

    # --- on the loop --------------------------------------------------------------------------------------------------

    async def _ask(self, key: str, messages: Messages) -> Verdict:
        body = self._body(key, messages)
        tokens = sum(len(message["content"]) for message in messages) / 4
        tokens += self._config.generating_args.max_new_tokens or 0
        async with self._slots:
            delay = self._config.retry_delay_s
            for attempt in range(1, self._config.request_retries + 2):
                await asyncio.sleep(max(self._requests.reserve(), self._tokens.reserve(tokens)))
                try:
                    verdict = await self._post(body)
                except _PassingError as error:
                    if attempt > self._config.request_retries:
                        raise JudgeFailed(str(error), attempt) from None
                    self.retried += 1
                    # Jitter: requests that failed together don't come back together.
                    await asyncio.sleep(max(error.wait, min(delay, _LONGEST_DELAY) * random.uniform(0.8, 1.2)))
                    delay *= 2
                else:
                    used = verdict.prompt_tokens + verdict.completion_tokens
                    self._tokens.correct(used - tokens if used else 0.0)
                    return verdict
        raise AssertionError("the last attempt returns or raises")

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

    async def _post(self, body: dict[str, Any]) -> Verdict:
        import aiohttp

        if self._session is None:
            # No redirects below: the key goes to the configured address and nowhere else.
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            timeout = aiohttp.ClientTimeout(total=self._config.request_timeout_s)
            connector = aiohttp.TCPConnector(limit=self._config.max_in_flight)
            self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)
        try:
            async with self._session.post(self._url, json=body, allow_redirects=False) as reply:
                data = await _read(reply.content)
                status, wait = reply.status, _seconds(reply.headers.get("Retry-After"))
        except asyncio.TimeoutError:
            raise _PassingError(f"the judge didn't answer within {self._config.request_timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _PassingError(self._clean(f"the judge can't be reached: {type(error).__name__}: {error}")) from None
        text = data.decode("utf-8", "replace")
        if status != 200:
            what = self._clean(f"the judge replied with HTTP {status}: {text}")
            if status in _AGAIN or status >= 500:
                raise _PassingError(what, wait)
            raise JudgeFailed(what)
        return self._verdict(text)

    def _verdict(self, text: str) -> Verdict:
        try:
            reply = json.loads(text)
            content = reply["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise JudgeFailed(self._clean(f"the judge's reply isn't a chat completion: {text}")) from None
        if not isinstance(content, str):
            raise JudgeFailed("the judge's reply has no text; raise judge.generating_args.max_new_tokens if it reasons")
        usage = reply.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        return Verdict(content, *(count if isinstance(count, int) and count >= 0 else 0 for count in counts))

    def _clean(self, text: str) -> str:
        """The text without the key, which some services repeat, and not too long."""
        text = text.replace(self._key, "***") if self._key else text
        return " ".join(text[:_SHOWN].split())


async def _read(content: Any) -> bytes:
    data = bytearray()
    async for chunk in content.iter_chunked(1 << 16):
        data += chunk
        if len(data) > _LARGEST_REPLY:
            raise JudgeFailed(f"the judge's reply is larger than {_LARGEST_REPLY >> 20} MiB")
    return bytes(data)


def _seconds(text: str | None) -> float:
    try:
        return min(max(float(text or 0), 0.0), _LONGEST_DELAY)
    except ValueError:
        return 0.0  # a date
