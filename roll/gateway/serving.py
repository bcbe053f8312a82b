"""What answers the calls of `roll serve`: engines alone, no episode and nothing trained."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from roll.data.templates import TemplateError
from roll.gateway.base import ChatAnswer, ChatCall, Choice, ContextFull, RefusedCall, Session
from roll.gateway.reading import ResponseReader
from roll.gateway.session import all_of
from roll.rollout.engine_driver import EngineDriver
from roll.rollout.plain_text import PlainText
from roll.strategies.base import Completion, Request, RequestRefused, SamplingParams
from roll.utils.seeding import stable_hash

_RANGES = {"temperature": (0.01, 2.0), "top_p": (0.001, 1.0), "repetition_penalty": (0.1, 10.0)}
"""What every engine can do in numbers. One that is asked for more fails as a whole, not for that request alone."""

_ANY_VOCABULARY = 1 << 24
"""More tokens than any model knows."""


class ServedModel(Session):
    """Answers each call by itself. All methods belong to the engines' event loop.

    Args:
        name: of the model.
        params: what a call that says nothing is sampled with.
        max_length: tokens of a prompt and its response.
        penalises: whether the engines take a `repetition_penalty`.
    """

    def __init__(
        self,
        engines: EngineDriver,
        chat: PlainText,
        reading: ResponseReader,
        params: SamplingParams,
        *,
        name: str,
        max_length: int,
        penalises: bool = True,
    ) -> None:
        self._engines, self._chat, self._reading, self._penalises = engines, chat, reading, penalises
        self._params, self._name, self._max_length = params, name, max_length
        self._numbers = itertools.count()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def models(self) -> Sequence[str]:
        """See `Session`."""
        return (self._name,)

    async def until_failed(self) -> None:
        """Wait; raises what makes it impossible to go on."""
        await asyncio.shield(self._failed)

    async def complete(self, call: ChatCall) -> ChatAnswer:
        """See `Session`."""
        call = self._reading.with_effort(call)
        prompt = self._prompt(call)
        room = self._max_length - len(prompt)
        if room < 1:
            raise ContextFull(len(prompt), self._max_length)
        params = self._sampling(call, room)
        choices = await all_of([self._choice(call, prompt, params, number) for number in range(call.n)])
        return ChatAnswer(choices=tuple(choices), prompt_tokens=len(prompt))

    async def count(self, call: ChatCall) -> int:
        """See `Session`."""
        return len(self._prompt(self._reading.with_effort(call)))

    def _prompt(self, call: ChatCall) -> tuple[int, ...]:
        if call.model != self._name:
            raise RefusedCall(
                404, f"there is no model {call.model[:80]!r}; there is {self._name}", "model", code="model_not_found"
            )
        try:
            chat = self._chat.with_variables(call.template_variables)
        except TemplateError as error:
            raise RefusedCall(400, str(error), "chat_template_kwargs") from None
        try:
            chat.check_history(call.messages, call.tools)
            if call.continues:
                prompt = chat.encode_prompt(chat.begun_text(call.messages, call.tools))
            else:
                prompt = chat.prompt(call.messages, call.tools)
        except TemplateError as error:
            raise RefusedCall(400, f"messages: {error}", "messages") from None
        if not prompt:
            raise RefusedCall(400, "messages: say nothing, so that the prompt has no tokens", "messages")
        return prompt

    def _sampling(self, call: ChatCall, room: int) -> SamplingParams:
        changes: Mapping[str, Any] = {
            name: value
            for name in ("temperature", "top_p", "repetition_penalty")
            if (value := getattr(call, name)) is not None
        }
        for field, (low, high) in _RANGES.items():
            if not low <= changes.get(field, low) <= high and (field, changes[field]) != ("temperature", 0):
                raise RefusedCall(400, f"{field}: got {changes[field]:g}, and engines take {low} to {high}", field)
        if changes.get("repetition_penalty", 1) != 1 and not self._penalises:
            raise RefusedCall(400, "repetition_penalty: this engine has none as others do", "repetition_penalty")
        params = replace(self._params, **changes, stop_strings=call.stop or self._params.stop_strings)
        if call.top_k is not None:
            params = replace(params, top_k=call.top_k if 0 < call.top_k < _ANY_VOCABULARY else -1)
        return replace(params, max_new_tokens=min(call.max_tokens or params.max_new_tokens, room))

    async def _choice(self, call: ChatCall, prompt: tuple[int, ...], params: SamplingParams, number: int) -> Choice:
        count = next(self._numbers)
        name = f"serve/{count}"
        seed = secrets.randbits(128) if call.seed is None else stable_hash("serve", call.seed, number, bits=128)
        request = Request(id=name, prompt_ids=prompt, params=params, seed=seed, order=(count,), affinity=_begin(call))
        try:
            completion: Completion = await self._engines.generate(name, request)
        except RequestRefused as refused:
            raise RefusedCall(400, str(refused)) from None
        except Exception as error:  # noqa: BLE001 - handed to whoever runs the server
            if not self._failed.done():
                self._failed.set_exception(error)
            raise RefusedCall(503, "the engine can't go on; the server's output says why") from None
        finally:
            self._engines.mark_ended(name)
        return self._reading.choice(call, completion)


def _begin(call: ChatCall) -> str:
    """Return a name for how a conversation begins: its calls go to the engine that has that in its cache."""
    first = next((message.content for message in call.messages if message.role != "system"), "")
    return f"{stable_hash('serve', call.messages[0].content, first):016x}"
