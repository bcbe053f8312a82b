"""What harnesses send by themselves: taken where nothing is lost, refused by name where something would be."""

from __future__ import annotations

import pytest

from roll.configs.catalog.harness_table import HARNESSES, expand_fields
from roll.gateway.base import ChatAnswer, Choice, RefusedCall
from roll.gateway.protocols import wire_formats
from roll.types.chat import Message, ToolCall

CHAT, MESSAGES, RESPONSES = "chat/completions", "messages", "responses"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Add.", "parameters": SCHEMA}
NAMESPACE = {
    "type": "namespace", "name": "crew", "description": "Other agents.",
    "tools": [{"type": "function", **FUNCTION, "strict": False}, {"type": "function", "name": "wait"}],
}  # fmt: skip


def body_of(route, **fields):
    said = {"input": "hello"} if route == RESPONSES else {"messages": [{"role": "user", "content": "hello"}]}
    return {"model": "policy", **said, **({"max_tokens": 9} if route == MESSAGES else {}), **fields}


def tool_of(route, **fields):
    if route == MESSAGES:
        return {"name": "add", "input_schema": SCHEMA, **fields}
    return {"type": "function", **FUNCTION, **fields} if route == RESPONSES else {
        "type": "function", "function": {**FUNCTION, **fields}}  # fmt: skip


def read(route, ignored=(), **fields):
    return wire_formats()[route].read(body_of(route, **fields), frozenset(ignored))


def why_refused(route, ignored=(), **fields):
    with pytest.raises(RefusedCall) as caught:
        read(route, ignored, **fields)
    assert caught.value.status == 400
    return caught.value


TAKEN = [
    (CHAT, {"response_format": {"type": "text"}}),
    (CHAT, {"verbosity": "low"}),
    (CHAT, {"prompt_cache_options": {"mode": "explicit"}, "store": True, "parallel_tool_calls": True}),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]}}),
    (MESSAGES, {"context_management": {}}),
    (MESSAGES, {"thinking": {"type": "adaptive", "display": "summarized"}}),
    (MESSAGES, {"thinking": {"type": "disabled"}}),
    (MESSAGES, {"output_config": {"effort": None, "format": None}}),
    (MESSAGES, {"speed": "fast", "diagnostics": {}}),
    (RESPONSES, {"client_metadata": {"session_id": "x"}}),
    (RESPONSES, {"text": {"verbosity": "low"}}),
    (RESPONSES, {"text": {"format": {"type": "text"}, "verbosity": "high"}}),
    (RESPONSES, {"reasoning": {"summary": "auto", "context": "auto", "mode": "standard"}}),
    (RESPONSES, {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]}),
    *((route, {"tools": [tool_of(route, strict=True)]}) for route in (CHAT, MESSAGES, RESPONSES)),
    *((route, {"tools": [tool_of(route, defer_loading=False)]}) for route in (CHAT, MESSAGES, RESPONSES)),
    (MESSAGES, {"tools": [tool_of(MESSAGES, eager_input_streaming=True, allowed_callers=["direct"])]}),
]


@pytest.mark.parametrize(("route", "fields"), TAKEN)
def test_what_loses_nothing_is_taken_and_changes_nothing(route, fields):
    call = read(route, **fields).call
    assert call.effort is None
    assert [tool.name for tool in call.tools] == (["add"] if "tools" in fields else [])
    plain = read(route, **({"tools": [tool_of(route)]} if "tools" in fields else {}))
    assert call == plain.call


@pytest.mark.parametrize(
    ("route", "field"),
    [
        (CHAT, {"reasoning_effort": "high"}),
        (MESSAGES, {"output_config": {"effort": "high"}}),
        (RESPONSES, {"reasoning": {"effort": "high", "summary": "auto"}}),
    ],
)
def test_how_long_to_think_is_handed_on_for_templates_that_have_a_variable_for_it(route, field):
    assert read(route, **field).call.effort == "high"
    assert read(route, list(field), **field).call.effort is None


LOST = [
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    (CHAT, {"response_format": {"type": "text", "grammar": "x"}}, "response_format"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"moderation": {"model": "x"}}, "moderation"),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management.edits[0]"),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns",
                                                                                           "value": 1}}]}},
     "context_management.edits[0]"),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919", "keep": "all"}]}},
     "context_management.edits[0]"),
    (MESSAGES, {"context_management": {"trigger": 1}}, "context_management.trigger"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
    (MESSAGES, {"output_config": {"task_budget": {"total": 1}}}, "output_config.task_budget"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    (MESSAGES, {"thinking": {"type": "adaptive", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format"),
    (RESPONSES, {"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    (RESPONSES, {"reasoning": {"context": "current_turn"}}, "reasoning.context"),
    (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"),
    (RESPONSES, {"context_management": [{"type": "compaction"}]}, "context_management"),
    (CHAT, {"tools": [tool_of(CHAT, defer_loading=True)]}, "tools[0].function.defer_loading"),
    (MESSAGES, {"tools": [tool_of(MESSAGES, input_examples=[{"a": 1}])]}, "tools[0].input_examples"),
    (RESPONSES, {"tools": [tool_of(RESPONSES, allowed_callers=["programmatic"])]}, "tools[0].allowed_callers"),
]  # fmt: skip


@pytest.mark.parametrize(("route", "fields", "field"), LOST)
def test_what_would_change_the_response_is_refused_by_its_name_and_can_be_ignored(route, fields, field):
    refused = why_refused(route, **fields)
    assert refused.field == field and str(refused).startswith(f"{field}: ")
    (name,) = fields
    ignored = name if name != "tools" else f"tools.{field.rpartition('.')[2]}"
    assert repr(ignored) in str(refused)
    assert read(route, [ignored], **fields)


HOSTILE = [0, 1, -1, 0.5, True, False, "", "x", "é" * 300, [], [1], [[]], {}, {"type": 1}, {"a": {"b": []}}, [{}]]
CHECKED = {
    CHAT: ("reasoning_effort", "verbosity", "response_format", "prompt_cache_options", "tool_choice"),
    MESSAGES: ("context_management", "output_config", "thinking", "speed", "diagnostics", "tool_choice"),
    RESPONSES: ("reasoning", "text", "include", "client_metadata", "prompt_cache_options", "tool_choice"),
}
WITHIN = [
    (MESSAGES, "context_management", "edits"), (MESSAGES, "output_config", "effort"),
    (MESSAGES, "output_config", "format"), (MESSAGES, "thinking", "type"), (MESSAGES, "thinking", "display"),
    (RESPONSES, "reasoning", "effort"), (RESPONSES, "reasoning", "summary"), (RESPONSES, "reasoning", "mode"),
    (RESPONSES, "reasoning", "context"), (RESPONSES, "text", "verbosity"), (RESPONSES, "text", "format"),
]  # fmt: skip
NEUTRAL = (
    ("prompt_cache_options", dict), ("client_metadata", dict), ("diagnostics", dict), ("speed", str),
    ("context_management", dict), ("output_config", dict), ("reasoning", dict), ("text", dict), ("include", list),
)  # fmt: skip
"""Fields with a kind of value that may be fine: an empty object, any text."""


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_a_value_of_another_kind_is_refused_with_the_fields_name(value):
    for route, names in CHECKED.items():
        for name in names:
            if any(name == each and isinstance(value, kind) for each, kind in NEUTRAL):
                continue
            assert why_refused(route, **{name: value}).field.startswith(name), (route, name)
    for route, name, key in WITHIN:
        if (key, value) != ("edits", []):
            inner = {"type": "adaptive", key: value} if name == "thinking" else {key: value}
            assert why_refused(route, **{name: inner}).field.startswith(name), (route, name, key)
    for route in (CHAT, MESSAGES, RESPONSES):
        if not isinstance(value, bool):
            assert "tools[0]" in why_refused(route, tools=[tool_of(route, strict=value)]).field
        if value is not False and value not in ("", [], {}):
            assert "defer_loading" in why_refused(route, tools=[tool_of(route, defer_loading=value)]).field
        assert why_refused(route, tools=[{"type": value or 1}]).field.startswith("tools[0]")


@pytest.mark.parametrize(
    ("key", "values"),
    [("name", (None, 0, "", [], {}, "x" * 257)), ("description", (0, True, [], {})), ("tools", (None, 0, "x", {}))],
)
def test_a_namespace_of_another_kind_is_refused_with_what_is_wrong(key, values):
    for value in values:
        assert why_refused(RESPONSES, tools=[{**NAMESPACE, key: value}]).field == f"tools[0].{key}"


@pytest.mark.parametrize(
    ("route", "kind", "says"),
    [
        (CHAT, "custom", "take free text"), (CHAT, "web_search", "no tools but functions"),
        (RESPONSES, "custom", "take free text"),
        *((RESPONSES, kind, "is run by the client") for kind in (
            "local_shell", "shell", "apply_patch", "computer", "computer_use_preview", "tool_search")),
        *((RESPONSES, kind, "runs at OpenAI") for kind in (
            "web_search", "web_search_preview_2025_03_11", "file_search", "code_interpreter", "image_generation", "mcp",
            "programmatic_tool_calling")),
        (RESPONSES, "teleport", "isn't a type that is known here"),
        (MESSAGES, "web_search_20250305", "runs at Anthropic"), (MESSAGES, "advisor_20260301", "runs at Anthropic"),
        (MESSAGES, "bash_20250124", "is run by the client"),
    ],
)  # fmt: skip
def test_a_tool_that_is_no_function_is_refused_with_the_reason_or_left_out_by_its_type(route, kind, says):
    tools = [{"type": kind, "name": "x"}, tool_of(route)]
    refused = why_refused(route, tools=tools)
    assert says in str(refused) and refused.field == "tools[0].type"
    name = kind.partition("_20")[0]
    assert f"tools.{name} " in str(refused)
    assert [tool.name for tool in read(route, [f"tools.{name}"], tools=tools).call.tools] == ["add"]


def test_a_namespace_is_a_group_of_functions_under_the_names_that_the_client_gave_them():
    tools = [{"type": "function", **FUNCTION}, NAMESPACE]
    asked = read(RESPONSES, tools=tools, input=[
        {"role": "user", "content": "hello"},
        {"type": "function_call", "call_id": "1", "namespace": "crew", "name": "wait", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "done"},
    ])  # fmt: skip
    assert [tool.name for tool in asked.call.tools] == ["add", "crew__add", "crew__wait"]
    assert [tool.description for tool in asked.call.tools] == ["Add.", "Other agents.\nAdd.", ""]
    assert asked.call.messages[1].tool_calls == (ToolCall("1", "crew__wait", "{}"),)
    assert asked.call.messages[2].name == "crew__wait"
    calls = (ToolCall("2", "crew__add", '{"a": 1}'), ToolCall("3", "add", "{}"), ToolCall("4", "crew__other", "{}"))
    choice = Choice(message=Message("assistant", "", calls), reason="tool_calls", token_ids=(), logprobs=())
    wire = wire_formats()[RESPONSES]
    items = wire.answer(asked, ChatAnswer(choices=(choice,), prompt_tokens=1))["output"]
    assert [(item.get("namespace"), item["name"]) for item in items] == [
        ("crew", "add"), (None, "add"), (None, "crew__other"),
    ]  # fmt: skip
    streamed = "".join(wire.events(asked, ChatAnswer(choices=(choice,), prompt_tokens=1)))
    assert '"namespace": "crew"' in streamed
    assert why_refused(RESPONSES, tools=[NAMESPACE, NAMESPACE]).field == "tools"
    for group in (NAMESPACE, {"type": "namespace", "name": 1, "tools": "x"}):
        left = read(RESPONSES, ["tools.namespace"], tools=[tools[0], group])
        assert ([tool.name for tool in left.call.tools], left.groups) == (["add"], {})
    nested = {**NAMESPACE, "tools": [NAMESPACE]}
    assert why_refused(RESPONSES, tools=[nested]).field == "tools[0].tools[0].type"
    for group in (1, [], {}):
        call = {"type": "function_call", "call_id": "1", "namespace": group, "name": "wait", "arguments": "{}"}
        assert why_refused(RESPONSES, input=[call]).field == "input[0].namespace"


def test_the_name_of_a_harness_stands_for_the_fields_that_it_sends():
    assert expand_fields(["codex", "messages.mood"]) == {*HARNESSES["codex"], "messages.mood"}
    assert "temperature" in expand_fields(["aider"]) and "temperature" not in expand_fields(["aider"], trains=False)
    codex = {"tools": [{"type": "web_search", "external_web_access": True}, NAMESPACE]}
    assert why_refused(RESPONSES, **codex).field == "tools[0].type"
    assert len(read(RESPONSES, expand_fields(["codex"]), **codex).call.tools) == 2
    smolagents = {"tools": [tool_of(CHAT)], "tool_choice": "required"}
    assert read(CHAT, expand_fields(["smolagents"]), **smolagents).call.tools
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    thinking = {"type": "enabled", "budget_tokens": 2000}
    claude = {"context_management": edits, "thinking": thinking, "temperature": 1}
    call = read(MESSAGES, expand_fields(["claude-code"]), **claude).call
    assert call.temperature is None
