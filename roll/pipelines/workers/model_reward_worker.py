"""The reward model's cluster as the reward pipeline sees it: responses in, scores out, in futures.

Episodes whose responses ended in one round of the engines submit within one turn of the event loop. What is gathered by
the next turn is a function of the plan and not of timing; sorted by id it goes to a thread, which encodes it and makes
one call of the cluster. With `infer_batch_size: 1` (the default) a score has the same bits in any company.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import torch

from roll.configs.schema.reward_config import RewardModelConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.data.prompts import CUT
from roll.data.templates import PromptEncoder, TemplateError
from roll.distributed.cluster import Cluster
from roll.distributed.worker_errors import WorkerFailed
from roll.pipelines.workers.train_worker import ForwardWorker, resolved_model_args
from roll.rewards.base import Reward, RewardRequest, RewardResult
from roll.strategies.training.pretrained import load_config, load_tokenizer
from roll.types.batch import TokenBatch

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 10.0
_RPC_TIMEOUT_FRACTION = 0.9
"""Share of `rpc_timeout` for a call: the scheduler, which waits as long for its episodes, must not give up first,
because it can't name the rank."""


class UnscorableText(ValueError):
    """A text that the reward model can't read as configured."""


@dataclass(frozen=True)
class EncodedText:
    """What the reward model reads."""

    ids: tuple[int, ...]
    truncated: bool | None
    """Whether it was cut; None where the configuration refuses to cut."""


class RewardTexts:
    """Prompt and response in the words of the reward model: its template, its tokenizer, its limit."""

    def __init__(
        self, model: RewardModelConfig, tokenizer: Any, *, context_length: int, role: str = "reward_model"
    ) -> None:
        """Check the template against the tokenizer; raises `TemplateError`."""
        self._encoder = PromptEncoder(tokenizer, template=model.template, variables=model.chat_template_kwargs)
        self._limit = min(model.max_length or context_length, context_length)
        self._truncation = model.truncation
        self._role = role

    @classmethod
    def of(cls, config: RLVRConfig, role: str = "reward_model") -> RewardTexts:
        """Return those of a run, with the tokenizer and the context length of this reward model."""
        model = config.sections[role]
        assert isinstance(model, RewardModelConfig)
        args = resolved_model_args(config, role)
        limit = load_config(args).get_text_config().max_position_embeddings
        return cls(model, load_tokenizer(args), context_length=limit, role=role)

    def encode(self, request: RewardRequest) -> EncodedText:
        """Return token ids within the limit; raises `UnscorableText` or `TemplateError`."""
        ids = self._encoder.encode(request.task, request.response)
        if len(ids) < 2:
            raise UnscorableText("prompt and response together have a single token, too little for a score")
        if len(ids) <= self._limit:
            return EncodedText(ids, truncated=None if self._truncation == "error" else False)
        if self._truncation == "error":
            raise UnscorableText(
                f"prompt and response have {len(ids)} tokens for the reward model, more than its limit of "
                f"{self._limit}; raise {self._role}.max_length, shorten responses, or set {self._role}.truncation"
            )
        return EncodedText(CUT[self._truncation](ids, self._limit), truncated=True)


@dataclass
class _Waiting:
    request: RewardRequest
    future: Future[RewardResult]
    since: float


class RewardModelClient:
    """Scores responses on the cluster of a role such as `reward_model`. Close it, or use it in a `with` block."""

    def __init__(self, cluster: Cluster, texts: RewardTexts, *, retries: int = 0) -> None:
        """Take the model; `retries`: tries after the first of a response whose forward pass raised."""
        self._cluster = cluster
        self._texts = texts
        self._retries = retries
        self._part = cluster.role
        """Name of the score as a part."""
        self._lock = threading.Lock()
        self._gathered: list[_Waiting] = []
        self._queue: queue.SimpleQueue[list[_Waiting] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=self._part, daemon=True)
        self._thread.start()

    def submit(self, request: RewardRequest) -> Future[RewardResult]:
        """Queue one response. The future gets a result, or raises what ended the cluster (`WorkerDied`,
        `WorkerTimeout`)."""
        waiting = _Waiting(request, Future(), time.monotonic())
        with self._lock:
            first = not self._gathered
            self._gathered.append(waiting)
        if first:
            try:
                asyncio.get_running_loop().call_soon(self._flush)
            except RuntimeError:  # not called from an event loop: nobody else will come
                self._flush()
        return waiting.future

    def close(self) -> None:
        """End the thread; what is still queued is cancelled."""
        while True:
            try:
                left = self._queue.get_nowait()
            except queue.Empty:
                break
            for waiting in left or ():
                waiting.future.cancel()
        self._queue.put(None)
        self._thread.join(_CLOSE_SECONDS)  # a thread inside torch when the interpreter ends would abort the process

    def __enter__(self) -> RewardModelClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _flush(self) -> None:
        with self._lock:
            gathered, self._gathered = self._gathered, []
        self._queue.put(sorted(gathered, key=lambda waiting: waiting.request.id))

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (gathered := self._queue.get()) is not None:
            live = [waiting for waiting in gathered if waiting.future.set_running_or_notify_cancel()]
            try:
                self._score(live)
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits for a score
                for waiting in live:
                    if not waiting.future.done():
                        waiting.future.set_exception(error)

    def _score(self, waiting: Sequence[_Waiting]) -> None:
        readable: list[tuple[_Waiting, EncodedText]] = []
        for each in waiting:
            try:
                readable.append((each, self._texts.encode(each.request)))
            except (UnscorableText, TemplateError) as error:
                _answer(each, error=str(error))
        if not readable:
            return
        try:
            scores = self._forward([text for _, text in readable])
        except WorkerFailed as error:
            logger.warning("a call of %s with %d responses failed: %s", self._part, len(readable), error)
            # One that can't be scored must not take the others with it. Alone, it has already had its first try.
            tries = self._retries + (len(readable) > 1)
            for each, text in readable:
                self._score_alone(each, text, tries, str(error))
            return
        for (each, text), score in zip(readable, scores, strict=True):
            _finish(each, text, score, self._part)

    def _score_alone(self, waiting: _Waiting, text: EncodedText, tries: int, error: str) -> None:
        for attempt in range(tries):
            try:
                score = self._forward([text])[0]
            except WorkerFailed as failure:
                error = str(failure)
            else:
                _finish(waiting, text, score, self._part, attempts=attempt + 2)
                return
        _answer(waiting, tries + 1, error=error)

    def _forward(self, texts: Sequence[EncodedText]) -> list[float]:
        """Score all texts in one call of the cluster."""
        names = tuple(str(i) for i in range(len(texts)))
        last = torch.tensor([len(text.ids) for text in texts]).cumsum(0) - 1
        ids = torch.tensor([token for text in texts for token in text.ids])
        batch = TokenBatch(
            row_ids=names,
            group_ids=names,
            offsets=torch.cat([last.new_zeros(1), last + 1]),
            token_ids=ids,
            action_mask=torch.zeros(len(ids), dtype=torch.bool).index_fill(0, last, True),
        )
        limit = _RPC_TIMEOUT_FRACTION * self._cluster.rpc_timeout
        outputs = self._cluster.call(ForwardWorker.forward, batch, ("values",), timeout=limit)
        scores: list[float] = outputs.require("values")[last].tolist()
        return scores


def _finish(waiting: _Waiting, text: EncodedText, score: float, part: str, *, attempts: int = 1) -> None:
    if not math.isfinite(score):
        _answer(waiting, attempts, error=f"the reward model gave {score}, expected a finite number")
        return
    parts = {part: score}
    if text.truncated is not None:
        parts[f"{part}_truncated"] = float(text.truncated)
    _answer(waiting, attempts, reward=Reward(score, parts))


def _answer(waiting: _Waiting, attempts: int = 1, *, reward: Reward | None = None, error: str = "") -> None:
    status: Literal["ok", "error"] = "error" if reward is None else "ok"
    seconds = time.monotonic() - waiting.since
    waiting.future.set_result(
        RewardResult(
            id=waiting.request.id, status=status, reward=reward, error=error, attempts=attempts, seconds=seconds
        )
    )
