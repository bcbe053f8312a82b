"""Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, any number of them."""

from __future__ import annotations

from collections.abc import Sequence

from roll.envs.tools.parsing.base import BadCall, Extraction, read_call, skip_space
from roll.types.chat import ToolSpec

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FORM = 'write <tool_call>{"name": "...", "arguments": {...}}</tool_call>'


def parse(text: str, tools: Sequence[ToolSpec]) -> Extraction:  # noqa: ARG001
    """Read the calls off a response."""
    extracted, at = Extraction(), 0
    while (begin := text.find(_OPEN, at)) >= 0 and not extracted.full:
        extracted.content.append(text[at:begin])
        body = skip_space(text, begin + len(_OPEN))
        try:
            name, arguments, end = read_call(text, body, ("arguments", "parameters"))
        except BadCall as error:
            closing = text.find(_CLOSE, body)
            at = len(text) if closing < 0 else closing + len(_CLOSE)
            extracted.content.append(text[begin:at])
            ran_out = closing < 0 and error.kind == "bad_json"
            extracted.problem("unclosed" if ran_out else error.kind, f"{error}; {_FORM}")
            continue
        # Text between the object and the closing tag, and a closing tag that never came, cost nothing to overlook:
        # what is called is clear.
        extracted.calls.append((name, arguments))
        closing, following = text.find(_CLOSE, end), text.find(_OPEN, end)
        closed = closing >= 0 and (following < 0 or closing < following)
        at = closing + len(_CLOSE) if closed else end
    extracted.content.append(text[at:])
    return extracted
