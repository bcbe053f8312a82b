"""The official clients, unmodified, against the endpoint: what they send is read, what they get is what they expect."""

from __future__ import annotations

import asyncio

import anthropic
import openai
import pytest
from serving import EchoSession, opened, served

from roll.gateway.bodies import GatewayLimits
from roll.types.chat import Message, ToolCall

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}}
ASK = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server():
    with served(GatewayLimits(keep_alive_seconds=0.05)) as running:
        yield running


@pytest.fixture
def session(server):
    with opened(server) as session:
        yield session


@pytest.fixture
def client(session):
    with openai.OpenAI(base_url=session.address, api_key=session.key, timeout=20) as client:
        yield client


@pytest.fixture
def claude(session):
    # Anthropic's client adds /v1 itself.
    with anthropic.Anthropic(base_url=session.address.removesuffix("/v1"), api_key=session.key, timeout=20) as client:
        yield client


def asked(content: str) -> list[dict]:
    return [{"role": "user", "content": content}]


# --- Chat Completions ------------------------------------------------------------------------------------------------


def test_chat_answers_with_n_choices_their_usage_and_log_probs(client, session):
    response = client.chat.completions.create(model="policy", messages=ASK, n=2, logprobs=True, seed=3, stop="!")
    assert [choice.message.content for choice in response.choices] == ["0: hello", "1: hello"]
    assert [choice.index for choice in response.choices] == [0, 1]
    assert response.choices[0].finish_reason == "stop"
    assert (response.usage.prompt_tokens, response.usage.completion_tokens, response.usage.total_tokens) == (5, 6, 11)
    assert [(t.token, t.logprob, t.bytes) for t in response.choices[1].logprobs.content] == [
        ("0", -0.5, [48]), (":", -0.25, [58]), (" ", -0.125, [32]),
    ]  # fmt: skip
    call = session.calls[-1]
    assert (call.n, call.seed, call.stop, call.top_logprobs) == (2, 3, ("!",), 0)
    assert call.temperature is None and call.max_tokens is None


def test_chat_carries_tools_calls_and_their_results(client, session):
    first = client.chat.completions.create(model="policy", messages=asked("call weather clock"), tools=[CHAT_TOOL])
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls" and message.content is None
    assert [call.function.name for call in message.tool_calls] == ["weather", "clock"]
    results = [{"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "fine"}]}
               for call in message.tool_calls]  # fmt: skip
    history = [{"role": "developer", "content": "be brief"}, *ASK, message, *results]
    client.chat.completions.create(model="policy", messages=history, tools=[CHAT_TOOL], parallel_tool_calls=False)
    call = session.calls[-1]
    assert call.messages == (
        Message("system", "be brief"),
        Message("user", "hello"),
        Message("assistant", "", tool_calls=tuple(
            ToolCall(f"call0000{i}", name, '{"x": "' + "é" * 60 + '"}') for i, name in enumerate(["weather", "clock"])
        )),
        Message("tool", "fine", tool_call_id="call00000", name="weather"),
        Message("tool", "fine", tool_call_id="call00001", name="clock"),
    )  # fmt: skip
    assert [(tool.name, tool.description, tool.parameters) for tool in call.tools] == [
        ("weather", "of a city", WEATHER)
    ]
    assert not call.parallel_tool_calls


def test_a_repeated_request_is_known_by_what_the_official_clients_say(client, claude, session):
    again = {"x-stainless-retry-count": "2"}
    for headers in ({}, again):
        client.chat.completions.create(model="policy", messages=ASK, extra_headers=headers)
    client.chat.completions.create(model="policy", messages=ASK, seed=1)
    client.responses.create(model="policy", input="hello", extra_headers=again)
    claude.messages.create(model="policy", messages=ASK, max_tokens=9)
    first, second, _, _, messages = session.calls
    assert [call.repeated for call in session.calls] == [False, True, False, True, False]
    assert first.body_hash == second.body_hash and first.body_hash
    assert len({call.body_hash for call in session.calls}) == 4 and messages.body_hash


def test_a_streamed_chat_adds_up_to_the_response(client):
    with client.chat.completions.stream(model="policy", messages=asked("call weather clock"), tools=[CHAT_TOOL]) as s:
        whole = s.get_final_completion()
    assert [call.function.name for call in whole.choices[0].message.tool_calls] == ["weather", "clock"]
    assert whole.choices[0].message.tool_calls[1].function.arguments == '{"x": "' + "é" * 60 + '"}'
    stream = client.chat.completions.create(
        model="policy", messages=asked("word " * 100), n=2, stream=True, stream_options={"include_usage": True}
    )
    said, usage, reasons = ["", ""], None, []
    for chunk in stream:
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
        usage = chunk.usage or usage
    assert said == ["0: " + "word " * 100, "1: " + "word " * 100]
    assert reasons == ["stop", "stop"] and usage.completion_tokens == 6


def test_tools_are_not_shown_where_none_is_to_be_called(client, session):
    client.chat.completions.create(model="policy", messages=ASK, tools=[CHAT_TOOL], tool_choice="none")
    assert session.calls[-1].tools == ()


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("tool_choice", {"tools": [CHAT_TOOL], "tool_choice": "required"}),
        ("tool_choice", {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 5}),
        ("presence_penalty", {"presence_penalty": 0.5}),
        ("logit_bias", {"logit_bias": {"50": 10}}),
        ("reasoning_effort", {"reasoning_effort": "as long as you can"}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}),
        ("max_tokens", {"max_tokens": 0}),
        ("n", {"n": 0}),
        ("guided_regex", {"extra_body": {"guided_regex": "a+"}}),
        ("continue_final_message", {"extra_body": {"continue_final_message": True}}),
        ("add_generation_prompt", {"extra_body": {"add_generation_prompt": False}}),
        ("add_generation_prompt", {"messages": [{"role": "assistant", "content": "x"}], "extra_body": {
            "continue_final_message": True, "add_generation_prompt": True}}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:"}}]}]}),
        ("tools[0].function.strict", {"tools": [{"type": "function", "function": {
            "name": "weather", "parameters": WEATHER, "strict": "yes"}}]}),
    ],
)  # fmt: skip
def test_a_field_whose_meaning_would_be_lost_is_refused_by_its_name(client, session, field, options):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "policy", "messages": ASK, **options})
    assert caught.value.param == field
    assert field in caught.value.message
    assert not session.calls


def test_neutral_values_and_harmless_fields_change_nothing(client, session):
    client.chat.completions.create(
        model="policy", messages=ASK, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, top_logprobs=0,
        response_format={"type": "text"}, user="me", metadata={"a": "b"}, store=False, service_tier="auto",
        tool_choice="auto", modalities=["text"], reasoning_effort="high", verbosity="low",
    )  # fmt: skip
    assert session.calls[-1].messages == (Message("user", "hello"),)


def test_the_owner_may_have_fields_ignored(server):
    session = EchoSession()
    fields = ["response_format", "tool_choice", "messages.mood", "tools.web_search", "tools.output_schema"]
    address, key = server.open(session, ignore_fields=fields)
    tool = {"type": "function", "function": {**CHAT_TOOL["function"], "strict": True, "output_schema": WEATHER}}
    with openai.OpenAI(base_url=address, api_key=key) as client:
        client.chat.completions.create(
            model="policy", messages=[{**ASK[0], "mood": "fine"}], tools=[{"type": "web_search"}, tool],
            tool_choice="required",
            response_format={"type": "json_object"},
        )  # fmt: skip
    assert [tool.name for tool in session.calls[-1].tools] == ["weather"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_context_is_said_in_the_words_that_agents_look_for(client, claude, session, stream):
    session.full = True
    openai_says = r"This model's maximum context length is 5 tokens, .* 9, .*\(context_length_exceeded\)"
    for ask in (
        lambda: client.chat.completions.create(model="policy", messages=ASK, stream=stream),
        lambda: client.responses.create(model="policy", input="hello", stream=stream),
    ):
        with pytest.raises(openai.BadRequestError, match=openai_says) as caught:
            ask()
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 9 tokens > 4 maximum"):
        claude.messages.create(model="policy", messages=ASK, max_tokens=1, stream=stream)


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, openai.BadRequestError), (404, openai.NotFoundError), (409, openai.ConflictError),
     (429, openai.RateLimitError), (503, openai.InternalServerError)],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_final_is_a_typed_error_and_is_not_asked_again(client, session, status, error, stream):
    with pytest.raises(error) as caught:
        client.chat.completions.create(model="policy", messages=asked(f"refuse {status}"), stream=stream)
    assert (caught.value.status_code, caught.value.code) == (status, "asked_for")
    assert len(session.calls) == 1


def test_a_failure_after_the_stream_has_begun_is_an_error_of_the_client_too(server):
    session = EchoSession(delay=0.3)
    address, key = server.open(session)
    with openai.OpenAI(base_url=address, api_key=key) as client:
        stream = client.chat.completions.create(model="policy", messages=asked("refuse 409"), stream=True)
        with pytest.raises(openai.APIError, match="as you asked"):
            list(stream)
    with anthropic.Anthropic(base_url=address, api_key=key) as claude:
        stream = claude.messages.create(model="policy", max_tokens=9, messages=asked("refuse 429"), stream=True)
        with pytest.raises(anthropic.APIStatusError, match="as you asked"):
            list(stream)


def test_our_own_failure_says_nothing_of_the_inside(client, caplog):
    client = client.with_options(max_retries=0)
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="policy", messages=asked("break"))
    assert "secret" not in caught.value.message
    assert "a secret of the inside" in caplog.text


def test_models_are_listed_and_found(client, claude):
    assert [model.id for model in client.models.list()] == ["policy"]
    assert client.models.retrieve("policy").owned_by == "roll"
    assert [model.id for model in claude.models.list()] == ["policy"]
    with pytest.raises(openai.NotFoundError, match="there are policy"):
        client.models.retrieve("gpt-4o")


def test_a_hundred_calls_of_the_asynchronous_client_are_all_answered(session):
    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=session.address, api_key=session.key) as client:
            calls = [client.chat.completions.create(model="policy", messages=asked(str(i))) for i in range(100)]
            return [response.choices[0].message.content for response in await asyncio.gather(*calls)]

    assert asyncio.run(all_of_them()) == [f"0: {i}" for i in range(100)]


# --- Anthropic Messages ----------------------------------------------------------------------------------------------


CLAUDE_TOOL = {"name": "weather", "description": "of a city", "input_schema": WEATHER}


def test_messages_answers_with_blocks_and_usage(claude, session):
    response = claude.messages.create(
        model="policy", max_tokens=50, messages=asked("think"), system=[{"type": "text", "text": "be brief"}],
        stop_sequences=["!"], metadata={"user_id": "me"},
    )  # fmt: skip
    assert [block.type for block in response.content] == ["thinking", "text"]
    assert response.content[0].thinking == "hm, " * 40 and response.content[1].text == "thought of it"
    assert (response.stop_reason, response.stop_sequence) == ("end_turn", None)
    assert (response.usage.input_tokens, response.usage.output_tokens) == (13, 3)
    call = session.calls[-1]
    assert call.messages == (Message("system", "be brief"), Message("user", "think"))
    assert (call.max_tokens, call.stop) == (50, ("!",))
    assert claude.messages.create(model="policy", max_tokens=2, messages=ASK).stop_reason == "max_tokens"
    stopped = claude.messages.create(model="policy", max_tokens=9, messages=ASK, stop_sequences=["ll"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "ll")


def test_messages_carries_tools_calls_and_their_results(claude, session):
    first = claude.messages.create(model="policy", max_tokens=9, messages=asked("call weather"), tools=[CLAUDE_TOOL])
    (block,) = first.content
    assert (first.stop_reason, block.name, block.input) == ("tool_use", "weather", {"x": "é" * 60})
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "fine"}]}
    history = [*ASK, {"role": "assistant", "content": first.content},
               {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]}]  # fmt: skip
    claude.messages.create(model="policy", max_tokens=9, messages=history, tools=[CLAUDE_TOOL])
    call = session.calls[-1]
    assert call.messages == (
        Message("user", "hello"),
        Message("assistant", "", tool_calls=(ToolCall("call00000", "weather", '{"x": "' + "é" * 60 + '"}'),)),
        Message("tool", "fine", tool_call_id="call00000", name="weather"),
        Message("user", "and now?"),
    )
    assert call.tools[0].parameters == WEATHER


def test_a_streamed_message_adds_up_to_the_response(claude):
    for content in ("word " * 100, "think", "call weather clock"):
        with claude.messages.stream(model="policy", max_tokens=9, messages=asked(content), tools=[CLAUDE_TOOL]) as s:
            streamed = s.get_final_message()
        whole = claude.messages.create(model="policy", max_tokens=9, messages=asked(content), tools=[CLAUDE_TOOL])
        assert [block.model_dump(exclude_none=True) for block in streamed.content] == [
            block.model_dump(exclude_none=True) for block in whole.content
        ]
        assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, 3)


def test_a_last_message_of_the_assistants_begins_the_response(claude, client, session):
    begun = [*asked("hello"), {"role": "assistant", "content": "The answer is"}]
    claude.messages.create(model="policy", max_tokens=9, messages=begun)
    assert session.calls[-1].continues and session.calls[-1].messages[-1] == Message("assistant", "The answer is")
    with claude.messages.stream(model="policy", max_tokens=9, messages=begun) as stream:
        assert stream.get_final_text() == "0: The answer is" and session.calls[-1].continues
    claude.messages.create(model="policy", max_tokens=9, messages=ASK)
    assert not session.calls[-1].continues
    # In Chat Completions a field says so; without it a new turn begins, as in the original.
    client.chat.completions.create(model="policy", messages=begun)
    assert not session.calls[-1].continues
    for more in ({}, {"add_generation_prompt": False}):
        body = {"continue_final_message": True, **more}
        client.chat.completions.create(model="policy", messages=begun, extra_body=body)
        assert session.calls[-1].continues
    client.chat.completions.create(model="policy", messages=ASK, extra_body={"add_generation_prompt": True})
    assert not session.calls[-1].continues


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("bash_20250124", "is run by the client"),
        ("text_editor_20250728", "is run by the client"),
        ("memory_20250818", "is run by the client"),
        ("computer_20251124", "is run by the client"),
        ("browser_toolset_20260801", "is run by the client"),
        ("web_search_20250305", "runs at Anthropic"),
        ("tool_search_tool_bm25", "runs at Anthropic"),
        ("tool_search_tool_regex_20251119", "runs at Anthropic"),
        ("mcp_toolset", "runs at Anthropic"),
        ("teleport_20300101", "isn't a type of tool that is known here"),
    ],
)
def test_a_type_of_tool_that_has_no_schema_is_refused_with_who_runs_it(claude, session, kind, says):
    with pytest.raises(anthropic.BadRequestError, match=says):
        claude.messages.create(model="policy", max_tokens=9, messages=ASK, tools=[{"type": kind, "name": "x"}])
    assert not session.calls


def test_tokens_of_messages_are_counted(claude):
    assert claude.messages.count_tokens(model="policy", messages=ASK, system="be").input_tokens == 7


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("tool_choice", {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "any"}}),
        ("thinking", {"thinking": {"type": "enabled", "budget_tokens": 2000}}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image", "source": {
            "type": "base64", "media_type": "image/png", "data": ""}}]}]}),
        ("tools[0].type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("container", {"extra_body": {"container": "c"}}),
    ],
)  # fmt: skip
def test_messages_refuses_a_field_whose_meaning_would_be_lost(claude, session, field, options):
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(**{"model": "policy", "max_tokens": 9, "messages": ASK, **options})
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert caught.value.body["error"]["message"].startswith(f"{field}:")
    assert not session.calls


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, anthropic.BadRequestError), (409, anthropic.ConflictError), (429, anthropic.RateLimitError)],
)
def test_messages_has_typed_errors_too(claude, session, status, error):
    with pytest.raises(error):
        claude.messages.create(model="policy", max_tokens=9, messages=asked(f"refuse {status}"))
    assert len(session.calls) == 1


# --- Responses -------------------------------------------------------------------------------------------------------


RESPONSES_TOOL = {"type": "function", "name": "weather", "description": "of a city", "parameters": WEATHER}


def test_responses_answers_with_items_and_goes_on_from_one_of_them(client, session):
    first = client.responses.create(model="policy", input="hello", instructions="be brief", metadata={"a": "b"})
    assert (first.output_text, first.status, first.metadata) == ("0: hello", "completed", {"a": "b"})
    assert (first.usage.input_tokens, first.usage.output_tokens, first.usage.total_tokens) == (13, 3, 16)
    details = first.usage.input_tokens_details, first.usage.output_tokens_details
    assert (details[0].cached_tokens, details[1].reasoning_tokens) == (0, 0), "nobody bills for what was sampled here"
    second = client.responses.create(model="policy", input="and?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert session.calls[-1].messages == (
        Message("user", "hello"), Message("assistant", "0: hello"), Message("user", "and?"),
    )  # fmt: skip
    with pytest.raises(openai.BadRequestError, match="no response"):
        client.responses.create(model="policy", input="and?", previous_response_id="resp_0")


def test_responses_carries_thoughts_calls_and_their_results(client, session):
    first = client.responses.create(model="policy", input="call weather clock", tools=[RESPONSES_TOOL], store=False)
    assert [(item.type, item.name) for item in first.output] == [
        ("function_call", "weather"),
        ("function_call", "clock"),
    ]
    results = [{"type": "function_call_output", "call_id": item.call_id, "output": "fine"} for item in first.output]
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    history = [
        *ASK,
        thought,
        *first.output,
        *results,
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
    ]
    client.responses.create(model="policy", input=history, tools=[RESPONSES_TOOL])
    asked_for, said, *rest = session.calls[-1].messages
    assert asked_for == Message("user", "hello")
    assert (said.reasoning, [call.name for call in said.tool_calls]) == ("hm", ["weather", "clock"])
    assert [message.role for message in rest] == ["tool", "tool", "user"] and rest[1].name == "clock"
    with pytest.raises(openai.BadRequestError):  # store=False
        client.responses.create(model="policy", input="and?", previous_response_id=first.id)


def test_a_streamed_response_adds_up_to_the_response(client):
    for content in ("word " * 100, "think", "call weather clock"):
        with client.responses.stream(model="policy", input=content, tools=[RESPONSES_TOOL]) as s:
            events = list(s)
            streamed = s.get_final_response()
        assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == sorted(
            {event.sequence_number for event in events if hasattr(event, "sequence_number")}
        )
        whole = client.responses.create(model="policy", input=content, tools=[RESPONSES_TOOL])
        without_ids = [
            [item.model_dump(exclude={"id", "parsed", "parsed_arguments"}, exclude_none=True) for item in r.output]
            for r in (streamed, whole)
        ]
        for items in without_ids:
            for item in items:
                for part in item.get("content", []):
                    part.pop("parsed", None)
        assert without_ids[0] == without_ids[1]
    cut = client.responses.create(model="policy", input="hello", max_output_tokens=1)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("text.format", {"text": {"format": {"type": "json_object"}}}),
        ("reasoning.effort", {"reasoning": {"effort": "as long as you can"}}),
        ("background", {"background": True}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("truncation", {"truncation": "auto"}),
    ],
)
def test_responses_refuses_a_field_whose_meaning_would_be_lost(client, session, field, options):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "policy", "input": "hello", **options})
    assert caught.value.param == field
    assert not session.calls
