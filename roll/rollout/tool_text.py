"""Tools for chat templates that know nothing of them: specs, calls and results as text, in the form of Hermes models.

system      # Tools ... <tools>{"type": "function", "function": {...}}</tools> ...     (user, where there is no system)
assistant   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
user        <tool_response>3</tool_response>
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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

{how}"""
_HERMES = """To call one, write its name and its arguments as JSON between these tags, once per call:
<tool_call>
{"name": <name>, "arguments": <arguments>}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class MessageForm:
    """How a chat template wants the messages of an assistant that thinks and calls tools."""

    arguments_as_text: bool = False
    """It joins the JSON text of arguments to its own; others write an object themselves."""
    names_by_id: bool = False
    """It writes the id of a call in place of the name (Kimi), so that ids have to be `functions.<name>:<number>`."""
    thought_key: str = "reasoning_content"


def template_message(message: Message, form: MessageForm | None = None) -> dict[str, Any]:
    """Return a message as chat templates expect it: OpenAI's form, but as a rule with arguments that are parsed."""
    form = form or MessageForm()
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        read = _arguments_text if form.arguments_as_text else parsed_arguments
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": read(call)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        shown["tool_call_id"] = message.tool_call_id
    if message.name:
        shown["name"] = message.name
    if message.reasoning:
        shown[form.thought_key] = message.reasoning
    return shown


def with_named_ids(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with ids of calls that hold their names, numbered through the conversation."""
    ids: dict[str, str] = {}
    shown, number = [], 0
    for message in messages:
        calls = []
        for call in message.tool_calls:
            ids[call.id] = f"functions.{call.name}:{number}"
            calls.append(replace(call, id=ids[call.id]))
            number += 1
        reply_to = ids.get(message.tool_call_id, message.tool_call_id)
        shown.append(replace(message, tool_calls=tuple(calls), tool_call_id=reply_to))
    return shown


def _arguments_text(call: ToolCall) -> str:
    return call.arguments or "{}"


def parsed_arguments(call: ToolCall) -> Any:
    """Return the arguments of a call; the text itself where it isn't JSON, or is nested too deep for a template."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments
    return arguments if _is_shallow(arguments) else call.arguments


def _is_shallow(value: Any) -> bool:
    """Return whether values nest less deep than any template can write, however deep the stack is already."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [inner for each in level if isinstance(each, (dict, list)) for inner in _inside(each)]
        if not level:
            return True
    return False


def _inside(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def specs_text(tools: Sequence[ToolSpec], example: str = "") -> str:
    """Return what a system message says of the tools; with an `example` of a call, that this is how to write one."""
    how = f"To call one, write it like this one, with its name and its arguments:\n{example}" if example else _HERMES
    specs = "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
    return _INTRODUCTION.format(specs=specs, how=how)


def with_specs(messages: Sequence[Message], text: str, *, system: bool = True) -> list[Message]:
    """Return the messages with `specs_text` in the system message; in the question, where there is no such role."""
    if messages and messages[0].role == "system":
        return [replace(messages[0], content=f"{messages[0].content}\n\n{text}"), *messages[1:]]
    if not system and messages and messages[0].role == "user":
        return [replace(messages[0], content=f"{text}\n\n{messages[0].content}"), *messages[1:]]
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
