"""The responses that an engine has in flight: each is a task on the engine's loop that draws from streams.

A stream begins only while the gate is open. One that is interrupted ends with what it sampled, and the next one goes on
with prompt + tokens so far as its prompt. So a token's version is that of its stream.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence

from roll.strategies.base import Completion, EngineDied, Request, RequestRefused
from roll.strategies.engines.engine_backend import EngineBackend
from roll.strategies.engines.engine_loop import EngineLoop
from roll.strategies.engines.responses import InFlightResponse, ResponseRules, refused_completion
from roll.types.trajectory import FinishReason
from roll.utils.seeding import stable_hash

logger = logging.getLogger(__name__)

_ABORT_AGAIN = 0.25
"""Seconds after which an abort is repeated: one that overtakes the start of its request is lost inside engines."""
_BATCH_WAIT_S = 0.03  # seconds that `poll` waits for more responses where only a batch waits: each call is costly
_BATCH = 64  # responses that `poll` hands out without waiting for more


class ResponseStreams:
    """Responses from `add` to `poll` or `abort`, and the streams that sample them."""

    def __init__(self, backend: EngineBackend, rules: ResponseRules, loop: EngineLoop) -> None:
        self._backend = backend
        self._rules = rules
        self._loop = loop
        loop.on_death = self.cancel_all
        self.responses: dict[str, InFlightResponse] = {}  # by request id
        self.finished: list[Completion] = []
        self._urgent = False  # somebody waits for one of them
        self.version = 0
        """Of the weights that streams sample from."""
        self.gate = asyncio.Event()
        self._numbers = itertools.count(1)

    # From any thread.

    def add(self, requests: Sequence[Request]) -> None:
        """Start responses; a malformed request raises `ValueError` before any. The caller holds `changed`."""
        known = set(self.responses)
        for request in requests:
            self._rules.check(request, known)
            self._backend.check(request)
            known.add(request.id)
        responses = [InFlightResponse(request) for request in requests]
        self.responses.update((response.request.id, response) for response in responses)
        self._loop.thread.loop.call_soon_threadsafe(self._start, responses)

    def poll(self, budget: float) -> list[Completion]:
        """Return what has finished; raise `EngineDied` where that is nothing and the engine is gone."""
        loop, budget = self._loop, max(0.0, budget)
        with loop.changed:
            loop.changed.wait_for(lambda: self.finished or loop.cause or loop.closed, timeout=budget)
            if self.finished:
                loop.changed.wait_for(self._has_enough, timeout=min(_BATCH_WAIT_S, budget))
            finished, self.finished, self._urgent = self.finished, [], False
            if not finished:
                loop.require_alive()
            return finished

    def _has_enough(self) -> bool:
        loop = self._loop
        return bool(self._urgent or len(self.finished) >= _BATCH or not self.responses or loop.cause or loop.closed)

    # On the loop.

    def cancel_all(self) -> None:
        """Close the gate for good and end all responses."""
        self.gate.clear()
        self._loop.dead.set()
        for response in self.all():
            if response.task is not None:
                response.task.cancel()

    def all(self) -> list[InFlightResponse]:
        """Return the responses in flight."""
        with self._loop.changed:
            return list(self.responses.values())

    def _start(self, responses: Sequence[InFlightResponse]) -> None:
        """Give each response that wasn't aborted meanwhile a task of its own."""
        for response in responses:
            if response.request.id in self.responses and not self._loop.dead.is_set():
                response.task = asyncio.create_task(self._run(response))

    async def _run(self, response: InFlightResponse) -> None:
        """Draw tokens, stream by stream, until the response is over."""
        try:
            reason: FinishReason | None = None
            while reason is None:
                while not self.gate.is_set():
                    await self.gate.wait()
                if response.aborted:
                    return
                reason = await self._run_stream(response)
            self._finish(response, response.completion(reason))
        except RequestRefused as error:
            self._finish(response, refused_completion(response.request.id, str(error)))
        except Exception as error:  # noqa: BLE001 - reported by `poll`
            self._loop.die(error)

    async def _run_stream(self, response: InFlightResponse) -> FinishReason | None:
        """Sample from the tokens so far; why the response is over, or None when the stream was interrupted."""
        request, version = response.request, self.version
        response.stream_id = f"{request.id}/{next(self._numbers)}"  # never twice: engines remember aborted ids
        response.idle.clear()
        params = self._rules.stream_params(request, len(response.tokens))
        seed = stable_hash(request.seed, len(response.tokens)) >> 1
        prompt = (*request.prompt_ids, *response.tokens)
        # Stop strings are looked for here, token by token; everything else ends a response inside the engine.
        final_only = not request.params.stop_strings
        stream = self._backend.stream(response.stream_id, prompt, params, seed, final_only=final_only)
        reason: FinishReason | None = None
        ended: FinishReason | None = None
        try:
            async for tokens, logprobs, ended, experts in stream:
                reason = response.record(tokens, logprobs, version, self._rules)
                if experts is not None:
                    response.route(experts)
                if reason is not None and ended is None:
                    await self._backend.abort_running([response.stream_id])
                if reason is not None or ended is not None:
                    break
        finally:
            await stream.aclose()
            response.stream_id = None
            response.idle.set()
        if reason is not None:
            return reason
        if response.aborted or not self.gate.is_set():
            return "abort" if response.aborted else None
        if ended == "length":
            return "length"
        name, count = self._loop.name, len(response.tokens)
        raise RuntimeError(f"{name} ended request {request.id!r} after {count} tokens ({ended})")

    def _finish(self, response: InFlightResponse, completion: Completion) -> None:
        aborted = completion.finish_reason == "abort" and not completion.refused
        with self._loop.changed:
            if self.responses.get(response.request.id) is not response or aborted:
                return  # `abort` hands it out
            del self.responses[response.request.id]
            self.finished.append(completion)
            self._urgent = self._urgent or not response.request.patient
            self._loop.changed.notify_all()

    async def interrupt(self, responses: Sequence[InFlightResponse]) -> None:
        """End the streams of these; returns when the last one has ended."""
        clock, timeout = asyncio.get_running_loop().time, self._loop.timeout
        deadline = clock() + timeout
        waiting = [response for response in responses if response.stream_id is not None]
        while waiting and not self._loop.dead.is_set():
            if clock() > deadline:
                raise TimeoutError(f"{len(waiting)} requests didn't end {timeout:g} s after they were aborted")
            await self._backend.abort_running([r.stream_id for r in waiting if r.stream_id is not None])
            ends = [asyncio.ensure_future(response.idle.wait()) for response in waiting]
            await asyncio.wait(ends, timeout=_ABORT_AGAIN)
            for end in ends:
                end.cancel()
            waiting = [response for response in waiting if not response.idle.is_set()]

    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        """Interrupt these responses and return what they have; also on a dead engine."""
        with self._loop.changed:
            responses = [self.responses[i] for i in ids if i in self.responses]
        for response in responses:
            response.aborted = True
        try:
            await self._loop.exclusive(self.interrupt(responses), "its requests to be aborted")
        except EngineDied:
            logger.debug("%s is dead; handing out what it sampled before", self._loop.name)
        except Exception as error:  # noqa: BLE001 - reported by `poll`
            self._loop.die(error)
        stopped: list[Completion] = []
        with self._loop.changed:
            for response in responses:
                if self.responses.get(response.request.id) is response:
                    del self.responses[response.request.id]
                    if response.task is not None:  # else the engine died before it could begin
                        response.task.cancel()
                    stopped.append(response.completion("abort"))
        return stopped
