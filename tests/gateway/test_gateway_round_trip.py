"""What a client sends back of a response, as the official clients hold it, is the response: its tokens are carried."""

from __future__ import annotations

import json
import string

import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from serving import EchoSession
from test_gateway_session import END, TOOL, ids_of, make, run

from roll.gateway.protocols import wire_formats

SPEC = {"name": TOOL.name, "description": TOOL.description}
ASK = {
    "chat/completions": {
        "model": "policy",
        "tools": [{"type": "function", "function": {**SPEC, "parameters": TOOL.parameters}}],
    },
    "messages": {"model": "policy", "max_tokens": 2000, "tools": [{**SPEC, "input_schema": TOOL.parameters}]},
    "responses": {"model": "policy", "tools": [{"type": "function", **SPEC, "parameters": TOOL.parameters}]},
}
HELLO = {"role": "user", "content": "hello"}


def sent_back(route: str, answer: dict) -> list[dict]:
    """The messages or items of a response, and results of its calls, as a client adds them to a conversation."""
    if route == "chat/completions":
        message = ChatCompletion.model_validate(answer).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in message.tool_calls or ()]
        return [message.model_dump(), *(results or [{"role": "user", "content": "more"}])]
    if route == "messages":
        blocks = AnthropicMessage.model_validate(answer).content
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "fine"}
            for block in blocks
            if block.type == "tool_use"
        ]
        said = {"role": "assistant", "content": [block.model_dump() for block in blocks]}
        return [said, {"role": "user", "content": results or "more"}]
    items = Response.model_validate(answer).output
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "fine"}
        for item in items
        if item.type == "function_call"
    ]
    return [*(item.model_dump() for item in items), *(results or [{"role": "user", "content": "more"}])]


TEXT = st.text(string.ascii_letters + string.digits + ' \n\t.,"\\{}[]<>/', max_size=25)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 10**12) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda below: st.lists(below, max_size=2) | st.dictionaries(TEXT, below, max_size=2),
    max_leaves=3,
)
CALL = st.builds(
    lambda arguments, indent: (
        "<tool_call>\n" + json.dumps({"name": TOOL.name, "arguments": arguments}, indent=indent) + "\n</tool_call>"
    ),
    st.dictionaries(TEXT, VALUES, max_size=2),
    st.sampled_from([None, 1]),
)
RESPONSE = st.one_of(
    TEXT,
    st.builds(lambda said, calls: said + "\n".join(calls), TEXT, st.lists(CALL, min_size=1, max_size=2)),
    st.builds(lambda thought, said: f"<think>{thought}</think>{said}", TEXT, TEXT),
)


@pytest.mark.parametrize("route", sorted(ASK))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(said=RESPONSE)
@example(said='<tool_call>\n{"name": "weather", "arguments": {"a": 1e400, "a": 2}}\n</tool_call>')
@example(said='<tool_call>\n{"arguments": "{\\"a\\": 1}", "name": "weather"}\n</tool_call>')
@example(said="<tool_call>\n{}\n</tool_call>")
@example(said=" ")
def test_a_response_that_a_client_sends_back_is_carried(route, said):
    session, episode, engines = make(said, "yes", thinking_tags=("<think>", "</think>"), max_new_tokens=2000)
    wire, key = wire_formats()[route], "input" if route == "responses" else "messages"
    conversation = [HELLO]
    first = wire.read({**ASK[route], key: conversation}, ())
    answer = wire.answer(first, run(session.complete(first.call)))
    # As it goes over the line.
    conversation += sent_back(route, json.loads(json.dumps(answer)))
    second = wire.read(json.loads(json.dumps({**ASK[route], key: conversation})), ())
    run(session.complete(second.call))
    before, after = engines.requests
    sampled = (*ids_of(said), END)
    assert after.prompt_ids[: len(before.prompt_ids) + len(sampled)] == (*before.prompt_ids, *sampled)
    episode.finish(0.0)
    played = episode.finished()
    assert len(played.contexts) == 1
    assert not {name for name in played.counts if name in ("agent/mismatch_edited", "agent/mismatch_dropped_thinking")}


EVENTS = {
    "chat/completions": TypeAdapter(ChatCompletionChunk),
    "messages": TypeAdapter(RawMessageStreamEvent),
    "responses": TypeAdapter(ResponseStreamEvent),
}


@pytest.mark.parametrize("route", sorted(ASK))
@pytest.mark.parametrize("said", ["call weather clock", "think", "plain"])
def test_every_event_of_a_stream_is_one_of_the_clients_own(route, said):
    """The clients take what doesn't fit without a word; their types don't."""
    wire, key = wire_formats()[route], "input" if route == "responses" else "messages"
    body = {**ASK[route], key: [{"role": "user", "content": said}], "stream": True}
    body |= {"logprobs": True, "stream_options": {"include_usage": True}} if route == "chat/completions" else {}
    asked = wire.read(body, ())
    events = list(wire.events(asked, run(EchoSession().complete(asked.call))))
    assert len(events) > 4
    for event in events:
        lines = event.removesuffix("\n\n").split("\n")
        assert lines[-1].startswith("data: ") and event.endswith("\n\n")
        data = lines[-1].removeprefix("data: ")
        if data != "[DONE]":
            EVENTS[route].validate_python(json.loads(data))
            if len(lines) == 2:
                assert lines[0] == f"event: {json.loads(data)['type']}"
