"""The form in which a policy calls tools, found by trying: calls that the chat template writes are read back.

    call -> template -> "<tool_call>..." -> every parser in turn -> the call again: that parser

What is tried has arguments of every kind, text before a call, and two calls at once. A template that writes calls in a
form that none of the parsers gives back is refused by name, not guessed at.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from roll.configs.catalog.entries import implementation
from roll.configs.catalog.tool_table import TOOL_PARSERS
from roll.data.templates import TemplateError
from roll.envs.base import Message
from roll.envs.tools.parsing import parse_calls, split_thinking
from roll.rollout.chat_format import ChatTemplate
from roll.types.chat import THINK_TAGS, ToolCall, ToolSpec

_ASKED = Message("user", "What is known?")
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "code": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "nested": {"type": "object"},
    "items": {"type": "array"},
}
_TOOLS = tuple(
    ToolSpec(name, f"{name} something.", {"type": "object", "properties": _ARGUMENTS}) for name in ("look_up", "put")
)
_VALUES = {
    "text": 'a "quoted" {word}, é 日 <b> & [x]: 1',
    "code": "if a < b:\n    print(1)",
    "count": 12,
    "share": 0.25,
    "nested": {"key": ["value", 1], "inner": {"deep": "x y"}},
    "items": ["a, b", {"c": 2}, []],
}
_TEXT_FORM = "hermes"
"""The form in which a template without tools is told of them (`tool_text.py`)."""


def resolve_parser(name: str, tokenizer: Any) -> str:
    """Return the name of a parser; `auto` becomes the one that gives back what the tokenizer's chat template writes,
    `hermes` for a template that neither tells of tools nor writes calls: it is told of them in that form.

    Raises `ValueError` if there is no such parser, or none gives the calls back.
    """
    if name != "auto":
        implementation(TOOL_PARSERS, name, key="tool_parser", kind="function")
        return name
    chosen, why = _tried(ChatTemplate(tokenizer))
    if chosen is None:
        raise ValueError(
            f"tool_parser: auto takes the parser that gives back the calls which the tokenizer's chat template writes; "
            f"{why}. Give one of {', '.join(TOOL_PARSERS)}, if the model was trained to write its form, or a function "
            "of your own as package.module:function or file.py:function"
        )
    return chosen


def _tried(template: ChatTemplate) -> tuple[str | None, str]:
    """Return the parser, or why there is none."""
    if not template.writes_calls:
        return (None, "this one tells of tools and writes no calls") if template.knows_tools else (_TEXT_FORM, "")
    written: list[tuple[str, Message]] = []
    for response in _RESPONSES:
        try:
            written.append((written_call(template, response, _TOOLS), response))
        except TemplateError as error:
            if response is _RESPONSES[0]:
                return None, f"this one writes none: {error}"  # others may be more than the family does at once
    fits = (name for name in TOOL_PARSERS if all(_gives_back(name, text, response) for text, response in written))
    return next(fits, None), f"none gives back what this one writes: {written[0][0][:120]!r}"


def written_call(template: ChatTemplate, response: Message, tools: Sequence[ToolSpec]) -> str:
    """Return what the template writes of a response, from where the prompt ends. Raises `TemplateError`."""
    thinks = replace(response, reasoning="I need to know.")
    for response_message, known_tools in ((response, tools), (thinks, tools), (response, ())):
        with contextlib.suppress(TemplateError):
            return template.response_text([_ASKED], response_message, known_tools)
    # It shows a response without the thought that prompts open: from where the two differ.
    prompt, upto = template.unchecked([_ASKED], tools), template.unchecked([_ASKED, response], tools, opens=False)
    begin = next((i for i, (a, b) in enumerate(zip_longest(prompt, upto)) if a != b), len(prompt))
    mark = upto.rfind("<", 0, begin)
    begin = mark if mark >= 0 and ">" not in upto[mark:begin] else begin
    return upto[begin : len(upto) - len(template.closing_of([_ASKED], upto, tools))]


def _gives_back(parser: str, text: str, response: Message) -> bool:
    parsed = parse_calls(split_thinking(text, THINK_TAGS)[1], parser, tools=_TOOLS)
    expected = [call for call in response.tool_calls if call.name in text]  # some write the first alone
    if parsed.problems or len(parsed.calls) != len(expected) or not expected:
        return False
    if parsed.content.strip() not in ("", response.content):
        return False  # pieces of the call are left over
    return all(
        one.name == other.name and _same(json.loads(one.arguments), json.loads(other.arguments))
        for one, other in zip(parsed.calls, expected, strict=True)
    )


def _same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)  # 1, 1.0 and true are three values


def _response(content: str, *calls: tuple[str, dict[str, Any]]) -> Message:
    made = (
        ToolCall(f"call{i:05d}", name, json.dumps(arguments, ensure_ascii=False))
        for i, (name, arguments) in enumerate(calls)
    )
    return Message("assistant", content, tuple(made))


_RESPONSES = (
    _response("", ("look_up", _VALUES)),
    _response("", ("look_up", {})),
    _response("I will look.", ("look_up", {"text": "one"})),
    _response("", ("look_up", {"text": "one"}), ("put", {"count": 2})),
)
"""That the template writes, the first of them in any case."""
