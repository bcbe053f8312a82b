"""A gateway over sessions without a model, served from a thread of its own so that synchronous clients can ask it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from roll.gateway.base import ChatAnswer, ChatCall, Choice, ContextFull, RefusedCall
from roll.gateway.bodies import GatewayLimits
from roll.gateway.registry import new_key
from roll.gateway.server import Gateway
from roll.types.chat import Message, ToolCall


class EchoSession:
    """Answers with what it was told last. Words of that change how.

    Attributes:
        calls: what was asked, as it was read.
        cancelled: calls that were ended from outside.
        full: whether there is no room for any prompt.
        address, key: where it is served, see `opened`.
    """

    address = key = ""

    models = ("policy",)

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.calls: list[ChatCall] = []
        self.cancelled = 0
        self.full = False

    async def complete(self, call: ChatCall) -> ChatAnswer:
        self.calls.append(call)
        try:
            await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.full:
            raise ContextFull(9, 5)
        said = call.messages[-1].content
        if said.startswith("refuse "):
            raise RefusedCall(int(said.split()[1]), "as you asked", code="asked_for")
        if said == "break":
            raise RuntimeError("a secret of the inside")
        choices = tuple(self._choice(call, said, number) for number in range(call.n))
        return ChatAnswer(choices=choices, prompt_tokens=sum(len(m.content) for m in call.messages))

    async def count(self, call: ChatCall) -> int:
        return sum(len(message.content) for message in call.messages)

    def _choice(self, call: ChatCall, said: str, number: int) -> Choice:
        message, reason = Message("assistant", f"{number}: {said}"), "stop"
        if said == "think":
            message = Message("assistant", "thought of it", reasoning="hm, " * 40)
        if said.startswith("call "):
            names = said.split()[1:]
            calls = tuple(ToolCall(f"call{i:05d}", name, '{"x": "' + "é" * 60 + '"}') for i, name in enumerate(names))
            message, reason = Message("assistant", "", tool_calls=calls), "tool_calls"
        if call.max_tokens is not None and call.max_tokens < 3:
            reason = "length"
        return Choice(
            message=message,
            reason=reason,
            token_ids=(7, 8, 9),
            logprobs=(-0.5, -0.25, -0.125),
            tokens=("0", ":", " ") if call.top_logprobs is not None else (),
            stop_string=call.stop[0] if call.stop and call.stop[0] in said else "",
        )


class Served:
    """A gateway that runs in a thread."""

    def __init__(self, limits: GatewayLimits | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self.gateway = Gateway(limits=limits)
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.run(self.gateway.start())

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=30)

    def open(self, session, **options) -> tuple[str, str]:
        """Address, which ends in /v1, and key."""
        key = new_key()

        async def opened() -> str:
            return self.gateway.open(session, key, **options)

        return self.run(opened()), key

    def close(self, key: str) -> None:
        async def closed() -> None:
            self.gateway.close(key)

        self.run(closed())

    def stop(self) -> None:
        self.run(self.gateway.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=10)
        self.loop.close()


@contextlib.contextmanager
def served(limits: GatewayLimits | None = None) -> Iterator[Served]:
    server = Served(limits)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def opened(server: Served) -> Iterator[EchoSession]:
    """A session of its own, which knows its address and its key."""
    session = EchoSession()
    session.address, session.key = server.open(session)
    yield session
    server.close(session.key)
