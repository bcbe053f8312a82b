"""The judge as the reward pipeline sees it: responses in, scores out, in futures."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, Protocol

from roll.configs.schema.judge_config import JUDGE, JudgeConfig
from roll.configs.schema.reward_config import RewardConfig
from roll.pipelines.workers.judge_endpoint import JudgeFailed
from roll.rewards.base import Reward, RewardRequest, RewardResult
from roll.rewards.judge_cache import JudgeCache, JudgeVerdict, cache_key
from roll.rewards.judge_score import Messages, Rubric, UnjudgeableRow
from roll.types.metrics import Metrics

logger = logging.getLogger(__name__)

_SHOWN = 200
"""Characters of a judge's answer that an error shows."""


class JudgeBackend(Protocol):
    """What answers: an endpoint, or engines of the run."""

    special: tuple[str, ...]

    @property
    def retried(self) -> int:
        """Return tries after the first, of all requests so far."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """Return what answers depend on besides the messages."""

    def ask(self, key: str, messages: Messages) -> Future[JudgeVerdict]:
        """Queue one request."""

    def close(self) -> None:
        """End it."""


class JudgeClient:
    """Grades responses. Close it, or use it in a `with` block; it closes its backend."""

    def __init__(self, config: JudgeConfig, backend: JudgeBackend, rewards: dict[str, RewardConfig]) -> None:
        self._config = config
        self._backend = backend
        self._rubrics = {
            domain: Rubric.of(config, reward.reward_kwargs if reward.name == JUDGE else {})
            for domain, reward in rewards.items()
        }
        try:
            self._cache = JudgeCache(config.cache_size, config.cache_file)
        except ValueError:
            backend.close()
            raise
        self._lock = threading.Lock()
        self._asked: dict[str, Future[JudgeVerdict]] = {}
        self._metrics = Metrics()
        self._retries_reported = 0

    def submit(self, request: RewardRequest) -> Future[RewardResult]:
        """Queue one response. The future gets a result, or raises what ended the judge's cluster."""
        result: Future[RewardResult] = Future()
        rubric, since = self._rubrics[request.domain], time.monotonic()
        try:
            messages = rubric.messages(request.task, request.response, self._backend.special)
        except (UnjudgeableRow, KeyError, TypeError) as error:
            result.set_result(RewardResult(id=request.id, status="error", reward=None, error=f"judge: {error}"))
            return result
        key = cache_key(self._backend.identity, messages)
        self._count("judge/responses")
        cached = self._cache.get(key)
        if cached is not None:
            self._count("judge/cache_hits")
            asked: Future[JudgeVerdict] = Future()
            asked.set_result(cached)
        else:
            asked = self._ask(key, messages)
        asked.add_done_callback(partial(self._settle, result, request.id, rubric, since))
        return result

    def take_metrics(self) -> Metrics:
        """Return what was counted since the last call."""
        with self._lock:
            metrics, self._metrics = self._metrics, Metrics()
            retried = self._backend.retried
            metrics.add_sum("judge/retries", retried - self._retries_reported)
            self._retries_reported = retried
            return metrics

    def close(self) -> None:
        """End the backend; who still waits is cancelled."""
        self._backend.close()
        self._cache.__exit__()

    def __enter__(self) -> JudgeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, key: str, messages: Messages) -> Future[JudgeVerdict]:
        if self._config.cache_size == 0:
            asked = self._backend.ask(key, messages)
            asked.add_done_callback(partial(self._answered, key))
            self._count("judge/requests")
            return asked
        with self._lock:
            under_way = self._asked.get(key)
            if under_way is None:
                under_way = self._asked[key] = self._backend.ask(key, messages)
                new = True
            else:
                new = False
        if new:
            self._count("judge/requests")
            under_way.add_done_callback(partial(self._answered, key))
        else:
            self._count("judge/cache_hits")
        return under_way

    def _answered(self, key: str, asked: Future[JudgeVerdict]) -> None:
        if not asked.cancelled() and asked.exception() is None:
            verdict, config = asked.result(), self._config
            self._cache.put(key, verdict)
            self._count("judge/prompt_tokens", verdict.prompt_tokens)
            self._count("judge/completion_tokens", verdict.completion_tokens)
            cost = verdict.prompt_tokens * config.input_cost + verdict.completion_tokens * config.output_cost
            self._count("judge/cost", cost / 1e6)
        with self._lock:
            self._asked.pop(key, None)

    def _settle(
        self, result: Future[RewardResult], name: str, rubric: Rubric, since: float, asked: Future[JudgeVerdict]
    ) -> None:
        if not result.set_running_or_notify_cancel():
            return
        seconds = time.monotonic() - since
        try:
            verdict = asked.result()
            score = rubric.score(verdict.text)
            if score is None:
                self._count("judge/unparsed")
                score = rubric.config.unparsed_score
            if score is None:
                self._count("judge/failures")
                shown = " ".join(verdict.text[-_SHOWN:].split())
                error = f"judge: its answer states no score from {rubric.config.score_min:g} to "
                error += f"{rubric.config.score_max:g}: ...{shown!r}"
                result.set_result(RewardResult(id=name, status="error", reward=None, error=error, seconds=seconds))
            else:
                reward = Reward(score, {JUDGE: score}, explanation=verdict.text)
                result.set_result(RewardResult(id=name, status="ok", reward=reward, seconds=seconds))
        except JudgeFailed as error:
            self._count("judge/failures")
            result.set_result(
                RewardResult(
                    id=name, status="error", reward=None, error=str(error), attempts=error.attempts, seconds=seconds
                )
            )
        except CancelledError as error:
            result.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - the cluster's end, handed to whoever waits for a score
            result.set_exception(error)

    def _count(self, name: str, amount: float = 1.0) -> None:
        with self._lock:
            self._metrics.add_sum(name, amount)
