"""Kimi K2: calls by ids that hold their names, and JSON.

<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>...
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from roll.envs.tools.parsing.base import BadCall, Extraction, read_arguments, read_marked, skip_space
from roll.types.chat import ToolSpec

_SECTION = re.compile(r"<\|tool_calls?_section_(?:begin|end)\|>")
_OPEN, _CLOSE = "<|tool_call_begin|>", "<|tool_call_end|>"
_HEAD = re.compile(r"\s{0,32}(?:functions\.)?([\w.:/-]{1,128}?)(?::\d{1,9})?\s{0,32}<\|tool_call_argument_begin\|>")
_FORM = f"write {_OPEN}functions.name:0<|tool_call_argument_begin|>{{...}}{_CLOSE}"


def parse(text: str, tools: Sequence[ToolSpec]) -> Extraction:  # noqa: ARG001
    """Read the calls off a response."""
    extracted = read_marked(text, _OPEN, _CLOSE, _FORM, _call)
    if extracted.calls:
        extracted.content = [_SECTION.sub("", piece) for piece in extracted.content]
    return extracted


def _call(text: str, at: int) -> tuple[str, str, int]:
    """Return name, arguments and end of the call whose head begins at `at`. Raises `BadCall`."""
    head = _HEAD.match(text, at)
    if head is None:
        raise BadCall("bad_call", "the call has no id functions.name:number", at)
    arguments, at = read_arguments(text, skip_space(text, head.end()))
    at = skip_space(text, at)
    return head.group(1), arguments, at + len(_CLOSE) if text.startswith(_CLOSE, at) else at
