"""Tools for chat templates that know nothing of them: specs, calls and results as text, in the form of Hermes models.

system      # Tools ... <tools>{"type": "function", "function": {...}}</tools> ...
assistant   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
user        <tool_response>3</tool_response>
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from roll.envs.base import Message
from roll.types.chat import ToolCall, ToolSpec

_DEEPEST = 64
"""Lists and objects within each other that arguments are written anew with."""
_INTRODUCTION = """# Tools

You can call these functions:
<tools>
{specs}
</tools>

To call one, write its name and its arguments as JSON between these tags, once per call:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""


def template_message(message: Message) -> dict[str, Any]:
    """Return a message as chat templates expect it: OpenAI's form, but with arguments that are parsed."""
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": parsed_arguments(call)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        shown["tool_call_id"] = message.tool_call_id
    if message.name:
        shown["name"] = message.name
    if message.reasoning:
        shown["reasoning_content"] = message.reasoning
    return shown


def parsed_arguments(call: ToolCall) -> Any:
    """Return the arguments of a call; the text itself where it isn't JSON, or is nested too deep for a template."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments
    return arguments if _is_shallow(arguments) else call.arguments


def _is_shallow(value: Any) -> bool:
    """How deep a template can write depends on how deep the stack is already; this doesn't."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [inner for each in level if isinstance(each, (dict, list)) for inner in _inside(each)]
        if not level:
            return True
    return False


def _inside(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def specs_text(tools: Sequence[ToolSpec]) -> str:
    """Return what a system message says of the tools."""
    return _INTRODUCTION.format(specs="\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools))


def with_specs(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages with `specs_text` in the system message."""
    if messages and messages[0].role == "system":
        return [replace(messages[0], content=f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [Message("system", text), *messages]


def call_as_text(message: Message) -> Message:
    """Return an assistant's message with its calls in the content."""
    calls = [
        json.dumps({"name": call.name, "arguments": parsed_arguments(call)}, ensure_ascii=False)
        for call in message.tool_calls
    ]
    parts = [*([message.content] if message.content else []), *(f"<tool_call>\n{c}\n</tool_call>" for c in calls)]
    return replace(message, content="\n".join(parts), tool_calls=())


def results_as_user(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the results of tools as the user's; those that follow each other are one message."""
    shown: list[Message] = []
    joins = False
    for message in messages:
        if message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            if joins:
                shown[-1] = replace(shown[-1], content=f"{shown[-1].content}\n{text}")
            else:
                shown.append(Message("user", text))
        else:
            shown.append(message)
        joins = message.role == "tool"
    return shown
