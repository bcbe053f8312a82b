"""A frozen model behind another service: calls go there and back as they are, and its key stays here."""

from __future__ import annotations

import asyncio

import pytest
from serving import EchoSession, served

from roll.gateway.base import ChatCall, RefusedCall
from roll.gateway.protocols import wire_formats
from roll.gateway.proxied import ProxiedModel, _answer, _NoAnswer
from roll.types.chat import Message, ToolCall, ToolSpec

TOOL = ToolSpec("weather", "of a city", {"type": "object", "properties": {}})
CALL = ToolCall("a", "weather", '{"x": 1}')


@pytest.fixture(scope="module")
def server():
    with served() as running:
        yield running


def complete(address: str, key: str, call: ChatCall):
    async def one():
        model = ProxiedModel("judge", address, "policy", key=key, retries=0)
        try:
            return await model.complete(call)
        finally:
            await model.close()

    return asyncio.run(one())


def test_a_call_arrives_as_it_was_and_its_answer_comes_back(server):
    there = EchoSession()
    address, key = server.open(there)
    messages = (
        Message("system", "be brief"),
        Message("user", "hello", name="me"),
        Message("assistant", "hm", tool_calls=(CALL,)),
        Message("tool", "call weather", tool_call_id="a", name="weather"),
    )
    call = ChatCall(
        model="judge", messages=messages, tools=(TOOL,), n=2, max_tokens=9, temperature=0.5, top_p=0.9, stop=("!",),
        seed=4, parallel_tool_calls=False,
    )  # fmt: skip
    answer = complete(address, key, call)
    (arrived,) = there.calls
    assert arrived == ChatCall(**{**{name: getattr(call, name) for name in ChatCall.__slots__}, "model": "policy"})
    assert [choice.message.tool_calls[0].name for choice in answer.choices] == ["weather", "weather"]
    assert (answer.prompt_tokens, answer.sampled, answer.choices[0].reason) == (27, 6, "tool_calls")


def test_a_full_context_of_another_service_is_one_here_too(server):
    there = EchoSession()
    there.full = True
    address, key = server.open(there)
    call = ChatCall(model="judge", messages=(Message("user", "hello"),))
    with pytest.raises(RefusedCall, match="This model's maximum context length is 5 tokens") as caught:
        complete(address, key, call)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    told = {route: wire.error(caught.value)["error"]["message"] for route, wire in wire_formats().items()}
    assert told["messages"].startswith("prompt is too long: ") and "maximum context length" in told["responses"]


def test_a_service_that_fails_is_named_and_its_key_is_not(server):
    there = EchoSession()
    address, key = server.open(there)
    call = ChatCall(model="judge", messages=(Message("user", "refuse 400"),))
    with pytest.raises(RefusedCall, match="the model judge replied with HTTP 400") as caught:
        complete(address, key, call)
    assert caught.value.status == 503 and key not in str(caught.value)
    with pytest.raises(RefusedCall, match="HTTP 401"):
        complete(address, "sk-wrong", call)
    with pytest.raises(RefusedCall, match="logprobs"):
        complete(address, key, ChatCall(model="judge", messages=call.messages, top_logprobs=0))


@pytest.mark.parametrize(
    "reply",
    [None, [], {}, {"choices": []}, {"choices": [1]}, {"choices": [{"message": {"content": 3}}]},
     {"choices": [{"message": {"tool_calls": [{"id": 1}]}}]}, {"choices": [], "usage": {"prompt_tokens": "x"}}],
)  # fmt: skip
def test_a_reply_that_is_no_completion_is_a_failure_of_the_service(reply):
    with pytest.raises(_NoAnswer):
        _answer(reply)
