"""Kimi K2: calls by ids that hold their names, and JSON.

<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>...
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from roll.tools.parsing.base import BadCall, Found, read_arguments, skip_space
from roll.types.chat import ToolSpec

_SECTION = re.compile(r"<\|tool_calls?_section_(?:begin|end)\|>")
_OPEN, _CLOSE = "<|tool_call_begin|>", "<|tool_call_end|>"
_HEAD = re.compile(r"\s{0,32}(?:functions\.)?([\w.:/-]{1,128}?)(?::\d{1,9})?\s{0,32}<\|tool_call_argument_begin\|>")
_FORM = f"write {_OPEN}functions.name:0<|tool_call_argument_begin|>{{...}}{_CLOSE}"


def parse(text: str, tools: Sequence[ToolSpec]) -> Found:  # noqa: ARG001
    """Read the calls off a response."""
    found, at = Found(), 0
    while (begin := text.find(_OPEN, at)) >= 0 and not found.full:
        found.content.append(text[at:begin])
        try:
            head = _HEAD.match(text, begin + len(_OPEN))
            if head is None:
                raise BadCall("bad_call", "the call has no id functions.name:number", begin + len(_OPEN))
            arguments, at = read_arguments(text, skip_space(text, head.end()))
        except BadCall as error:
            closing = text.find(_CLOSE, error.end)
            at = len(text) if closing < 0 else closing + len(_CLOSE)
            found.content.append(text[begin:at])
            found.problem("unclosed" if closing < 0 else error.kind, f"{error}; {_FORM}")
            continue
        at = skip_space(text, at)
        at += len(_CLOSE) if text.startswith(_CLOSE, at) else 0
        found.calls.append((head.group(1), arguments))
    found.content.append(text[at:])
    if found.calls:
        found.content = [_SECTION.sub("", piece) for piece in found.content]
    return found
