"""Mistral: `[TOOL_CALLS]` before each call, a name and JSON since version 11 of its form; until then before a list.

[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[CALL_ID]a1B2c3D4e[ARGS]{}
[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "a1B2c3D4e"}]
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from roll.envs.tools.parsing.base import BadCall, Extraction, read_arguments, skip_space
from roll.envs.tools.parsing.plain_json import read_calls
from roll.types.chat import ToolSpec

_MARK = "[TOOL_CALLS]"
_CALL = re.compile(r"([\w.:/-]{1,128})(?:\[CALL_ID\][^\[\]{}\s]{0,64})?(?:\[ARGS\])?\s{0,32}(?=\{)")
_FORM = f'write {_MARK}name[ARGS]{{"argument": ...}}'


def parse(text: str, tools: Sequence[ToolSpec]) -> Extraction:  # noqa: ARG001
    """Read the calls off a response."""
    extracted, at = Extraction(), 0
    while (begin := text.find(_MARK, at)) >= 0 and not extracted.full:
        extracted.content.append(text[at:begin])
        try:
            calls, at = _calls(text, skip_space(text, begin + len(_MARK)))
        except BadCall as error:
            following = text.find(_MARK, begin + len(_MARK))
            at = len(text) if following < 0 else following
            extracted.content.append(text[begin:at])
            ran_out = following < 0 and error.kind == "bad_json"
            extracted.problem("unclosed" if ran_out else error.kind, f"{error}; {_FORM}")
            continue
        extracted.calls += calls
    extracted.content.append(text[at:])
    return extracted


def _calls(text: str, at: int) -> tuple[list[tuple[str, str]], int]:
    """Return the calls after a mark, and where they end. Raises `BadCall`."""
    if text[at : at + 1] in ("[", "{"):
        return read_calls(text, at)
    named = _CALL.match(text, at)
    if named is None:
        raise BadCall(
            "bad_call", "no name and object of arguments after the mark", len(text) if at >= len(text) else at
        )
    arguments, end = read_arguments(text, named.end())
    return [(named.group(1), arguments)], end
