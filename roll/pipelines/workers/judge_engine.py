"""A judge on engines of the run: the role `judge`, a cluster like `actor_infer` whose weights never change.

A lockstep engine (`hf_infer`) gets what one turn of the scheduler's event loop submitted as one batch, in the order of
the responses' ids, and the next batch when that is done, so what shares a pass is a function of the plan and never of
timing. The others get requests as they come.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any

from roll.configs.catalog.strategy_table import is_lockstep
from roll.configs.schema.judge_config import JudgeConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.data.templates import render_chat
from roll.distributed.cluster import Cluster
from roll.distributed.worker import WorkerInfo
from roll.pipelines.workers.infer_worker import InferWorker
from roll.pipelines.workers.judge_endpoint import JudgeFailed
from roll.pipelines.workers.train_worker import resolved_model_args
from roll.rewards.judge_cache import JudgeVerdict
from roll.rewards.judge_score import Messages
from roll.strategies import build_engine
from roll.strategies.base import Completion, EngineSettings, InferEngine, Request, SamplingParams
from roll.strategies.training.pretrained import load_tokenizer
from roll.utils.loop_thread import LoopThread, settle
from roll.utils.seeding import stable_hash

_DECODE_STEPS = 64
_POLL_SECONDS = 0.5


class JudgeWorker(InferWorker):
    """One engine with the judge's model."""

    def __init__(self, info: WorkerInfo, config: RLVRConfig) -> None:
        super().__init__(info, config)

    def _build(self) -> InferEngine:
        config = self._config
        judge = config.sections["judge"]
        assert isinstance(judge, JudgeConfig)
        settings = EngineSettings(
            max_running_requests=judge.max_in_flight,
            max_sequence_length=judge.max_length,
            seed=config.seed,
            slots=self.info.slots,
        )
        return build_engine(judge, resolved_model_args(config, "judge"), settings)


@dataclass
class _EngineCall:
    """A request on its way."""

    request: Request
    future: asyncio.Future[Completion]


class EngineJudge:
    """Asks the cluster. Close it before the cluster ends."""

    retried = 0

    def __init__(self, cluster: Cluster, config: RLVRConfig, tokenizer: Any = None) -> None:
        judge = config.judge
        assert judge is not None
        self._cluster = cluster
        self._judge = judge
        self._args = resolved_model_args(config, "judge")
        self._tokenizer = tokenizer if tokenizer is not None else load_tokenizer(self._args)
        if not getattr(self._tokenizer, "chat_template", None):
            raise ValueError(
                f"judge.model_args.model_name_or_path: {self._args.model_name_or_path} has no chat template, which a "
                "judge needs; name a model that was tuned for instructions"
            )
        added = map(str, self._tokenizer.get_added_vocab())
        self.special = tuple(sorted({*added, *self._tokenizer.all_special_tokens}, key=len, reverse=True))
        """Tokens that a response must not contain as such."""
        sampling = judge.generating_args
        self._params = SamplingParams(
            max_new_tokens=sampling.max_new_tokens or 1,
            temperature=sampling.temperature if sampling.do_sample else 0.0,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            repetition_penalty=sampling.repetition_penalty,
            stop_strings=sampling.stop_strings,
        )
        self._lockstep = is_lockstep(judge.strategy_args.strategy_name)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._gathered: list[tuple[str, Messages, Future[JudgeVerdict]]] = []
        self._batches: queue.SimpleQueue[list[tuple[str, Messages, Future[JudgeVerdict]]]] = queue.SimpleQueue()
        self._turn = asyncio.Lock()
        self._running: list[dict[str, _EngineCall]] = [{} for _ in range(cluster.world_size)]
        self._pollers: dict[int, asyncio.Task[None]] = {}
        self._thread = LoopThread("judge")

    @property
    def identity(self) -> tuple[Any, ...]:
        """Return what answers depend on besides the messages."""
        strategy = self._judge.strategy_args.strategy_name
        variables = json.dumps(self._judge.chat_template_kwargs, sort_keys=True)
        return (
            self._args.model_name_or_path,
            self._args.dtype,
            strategy,
            repr(self._params),
            self._judge.max_length,
            variables,
        )

    def ask(self, key: str, messages: Messages) -> Future[JudgeVerdict]:
        """Queue one request. The future raises `JudgeFailed` where there is no answer, and what ended the cluster."""
        future: Future[JudgeVerdict] = Future()
        with self._lock:
            first = not self._gathered
            self._gathered.append((key, messages, future))
        if first:
            try:
                asyncio.get_running_loop().call_soon(self._flush)
            except RuntimeError:  # not called from an event loop: nobody else will come
                self._flush()
        return future

    def close(self) -> None:
        """End the thread; what is under way is cancelled."""
        self._thread.cancel_all(timeout=10)
        self._thread.stop(timeout=10)

    def _flush(self) -> None:
        with self._lock:
            gathered, self._gathered = self._gathered, []
        self._thread.submit(self._batch(gathered))

    # --- on the loop --------------------------------------------------------------------------------------------------

    async def _batch(self, gathered: Sequence[tuple[str, Messages, Future[JudgeVerdict]]]) -> None:
        if self._lockstep:
            async with self._turn:
                await self._answer_all(gathered)
        else:
            await self._answer_all(gathered)

    async def _answer_all(self, gathered: Sequence[tuple[str, Messages, Future[JudgeVerdict]]]) -> None:
        """Answer all of them, whatever happens: a future that stays open would hold its response for ever."""
        try:
            await self._place_and_wait(gathered)
        except BaseException as error:
            for _, _, future in gathered:
                _end(future, error=JudgeFailed(f"the judge was ended: {type(error).__name__}"))
            raise

    async def _place_and_wait(self, gathered: Sequence[tuple[str, Messages, Future[JudgeVerdict]]]) -> None:
        waiting: list[tuple[Future[JudgeVerdict], Request, asyncio.Future[Completion]]] = []
        by_rank: dict[int, list[_EngineCall]] = {}
        for index, (key, messages, future) in enumerate(gathered):
            try:
                request = self._request(key, messages)
            except Exception as error:  # noqa: BLE001 - of this response alone
                _end(future, error=error if isinstance(error, JudgeFailed) else JudgeFailed(str(error)))
                continue
            rank = index % self._cluster.world_size
            if not self._lockstep:
                rank = min(range(self._cluster.world_size), key=lambda r: (len(self._running[r]), r))
            call = _EngineCall(request, asyncio.get_running_loop().create_future())
            self._running[rank][request.id] = call
            by_rank.setdefault(rank, []).append(call)
            waiting.append((future, request, call.future))
        for rank, batch in by_rank.items():
            try:
                requests = [call.request for call in batch]
                await self._cluster.call_rank_async(rank, InferWorker.submit, requests)
            except Exception as error:  # noqa: BLE001 - handed to whoever waits
                self._fail(rank, error)
            else:
                if rank not in self._pollers or self._pollers[rank].done():
                    self._pollers[rank] = asyncio.get_running_loop().create_task(self._poll(rank))
        for future, request, completion in waiting:
            try:
                verdict = self._verdict(request, await completion)
            except Exception as error:  # noqa: BLE001 - handed to whoever waits for the score
                _end(future, error=error)
            else:
                _end(future, verdict)

    async def _poll(self, rank: int) -> None:
        running = self._running[rank]
        try:
            while running:
                budget = _DECODE_STEPS if self._lockstep else _POLL_SECONDS
                for completion in await self._cluster.call_rank_async(rank, InferWorker.poll, budget):
                    call = running.pop(completion.id, None)
                    if call is not None:
                        settle(call.future, completion)
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            self._fail(rank, error)

    def _fail(self, rank: int, error: Exception) -> None:
        running, self._running[rank] = self._running[rank], {}
        for call in running.values():
            if not call.future.done():
                call.future.set_exception(error)

    def _request(self, key: str, messages: Messages) -> Request:
        text = render_chat(self._tokenizer, messages, opens_answer=True, variables=self._judge.chat_template_kwargs)
        ids = tuple(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        room = self._judge.max_length - self._params.max_new_tokens
        if len(ids) > room:
            raise JudgeFailed(
                f"the judge's prompt has {len(ids)} tokens, more than the {room} that judge.max_length leaves it; "
                "raise that, or shorten responses"
            )
        number = next(self._numbers)
        seed = stable_hash("judge", key, bits=128)
        return Request(id=f"judge-{number}", prompt_ids=ids, params=self._params, seed=seed, order=(number,))

    def _verdict(self, request: Request, completion: Completion) -> JudgeVerdict:
        text = self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        return JudgeVerdict(text, len(request.prompt_ids), completion.num_tokens)


def _end(future: Future[JudgeVerdict], verdict: JudgeVerdict | None = None, error: Exception | None = None) -> None:
    """Give a future its end, unless whoever waited has cancelled it."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error) if verdict is None else future.set_result(verdict)
