"""A model behind another OpenAI-compatible service, that agents may ask by its name: frozen, never trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roll.gateway.base import AnswerReason, ChatAnswer, ChatCall, Choice, RefusedCall, Session
from roll.types.chat import Message, ToolCall
from roll.utils.json_service import Endpoint, EndpointFailed, endpoint_url

_REASONS: Mapping[Any, AnswerReason] = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}

_FULL = ("context_length_exceeded", "maximum context length", "prompt is too long")
"""How services say that a prompt is too long."""


class ProxiedModel(Session):
    """Passes calls on. All methods belong to one event loop. Close it.

    Args:
        name: how agents call it.
        base_url: of the service, such as `http://localhost:8000/v1`.
        model: its name there.
        key: of the service, which agents never see; empty: none.
        timeout: seconds for one try.
        retries: further tries after a failure that may pass.
        connections: requests at once.
    """

    def __init__(
        self,
        name: str,
        base_url: str,
        model: str,
        *,
        key: str = "",
        timeout: float = 600.0,
        retries: int = 2,
        connections: int = 64,
    ) -> None:
        self._name, self._model = name, model
        url = endpoint_url(base_url, "/chat/completions")
        self._endpoint = Endpoint(
            url, who=f"the model {name}", key=key, timeout=timeout, retries=retries, delay=1.0, connections=connections
        )

    @property
    def models(self) -> Sequence[str]:
        """See `Session`."""
        return (self._name,)

    async def complete(self, call: ChatCall) -> ChatAnswer:
        """See `Session`."""
        if call.top_logprobs is not None:
            raise RefusedCall(400, f"logprobs: {self._name} isn't trained; its log-probs aren't passed on", "logprobs")
        try:
            reply = await self._endpoint.ask(_request(call, self._model))
            return _answer(reply)
        except (EndpointFailed, _NoAnswer) as error:
            if any(words in str(error) for words in _FULL):
                raise RefusedCall(400, str(error), "messages", code="context_length_exceeded") from None
            raise RefusedCall(503, str(error)) from None

    async def count(self, call: ChatCall) -> int:
        """Refuse: the protocol has no route for it."""
        del call
        raise RefusedCall(400, f"tokens of {self._name} can't be counted: it is another service's", "model")

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()


class _NoAnswer(ValueError):
    """A reply that isn't what the protocol says."""


def _request(call: ChatCall, model: str) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed")
    body: dict[str, Any] = {name: getattr(call, name) for name in names if getattr(call, name) is not None}
    body |= {"model": model, "messages": [_sent(message) for message in call.messages]}
    if call.n > 1:
        body["n"] = call.n
    if call.effort is not None:
        body["reasoning_effort"] = call.effort
    if call.stop:
        body["stop"] = list(call.stop)
    if call.tools:
        body["tools"] = [tool.for_template() for tool in call.tools]
        if not call.parallel_tool_calls:
            body["parallel_tool_calls"] = False
    return body


def _sent(message: Message) -> dict[str, Any]:
    sent: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        sent["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        sent["tool_call_id"] = message.tool_call_id
    elif message.name:
        sent["name"] = message.name
    return sent


def _answer(reply: Any) -> ChatAnswer:
    try:
        usage = reply.get("usage") or {}
        prompt, completion_tokens = int(usage.get("prompt_tokens", 0)), int(usage.get("completion_tokens", 0))
        choices = tuple(_choice(choice) for choice in reply["choices"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _NoAnswer(
            f"the service's reply isn't a chat completion: {type(error).__name__}: {error!s:.100}"
        ) from None
    if not choices:
        raise _NoAnswer("the service's reply has no choices")
    return ChatAnswer(choices=choices, prompt_tokens=prompt, completion_tokens=completion_tokens)


def _choice(choice: Any) -> Choice:
    message = choice["message"]
    calls = tuple(
        ToolCall(_text(call["id"]), _text(call["function"]["name"]), _text(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    )
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    reply = Message("assistant", _text(message.get("content") or ""), tool_calls=calls, reasoning=_text(reasoning))
    return Choice(message=reply, reason=_REASONS.get(choice.get("finish_reason"), "stop"), token_ids=(), logprobs=())


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"got {value!r:.40}, expected a text")
    return value
