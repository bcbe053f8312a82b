"""GLM-4.5 and later: a name, and pairs of keys and values that are bare text or JSON.

    <tool_call>f
    <arg_key>x</arg_key>
    <arg_value>some text</arg_value>
    </tool_call>

The line ends may be missing (GLM-4.7). Values become what the tool's JSON schema says of the argument.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from roll.envs.tools.parsing.base import NAME, BadCall, Extraction, json_text, skip_space
from roll.envs.tools.parsing.typed import parameters_of, typed_argument
from roll.types.chat import ToolSpec

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _END_KEY = "<arg_key>", "</arg_key>"
_VALUE = "<arg_value>"
_END_VALUE = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>|\Z))")
"""A value may hold its own closing tag: the one that something of the call follows ends it."""
_NAME_ENDS = re.compile(r"\n|<arg_key>|</tool_call>")
_MAX_ARGUMENTS = 64
_FORM = "write <tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>"


def parse(text: str, tools: Sequence[ToolSpec]) -> Extraction:
    """Read the calls off a response."""
    extracted, at = Extraction(), 0
    while (begin := text.find(_OPEN, at)) >= 0 and not extracted.full:
        extracted.content.append(text[at:begin])
        try:
            name, arguments, at = _call(text, begin + len(_OPEN), tools)
        except BadCall as error:
            closing = text.find(_CLOSE, error.end)
            at = len(text) if closing < 0 else closing + len(_CLOSE)
            extracted.content.append(text[begin:at])
            extracted.problem("unclosed" if closing < 0 else error.kind, f"{error}; {_FORM}")
            continue
        extracted.calls.append((name, json_text(arguments)))
    extracted.content.append(text[at:])
    return extracted


def _call(text: str, at: int, tools: Sequence[ToolSpec]) -> tuple[str, dict[str, Any], int]:
    """Return name, arguments and end of the call whose name begins at `at`. Raises `BadCall`."""
    ends = _NAME_ENDS.search(text, skip_space(text, at))
    if ends is None:
        raise BadCall("unclosed", "the call isn't closed", len(text))
    name = text[at : ends.start()].strip()
    if not NAME.fullmatch(name):
        raise BadCall("bad_call", "a call has no name of letters, digits and _.:/-", at)
    parameters = parameters_of(tools, name)
    arguments: dict[str, Any] = {}
    at = skip_space(text, ends.start())
    for _ in range(_MAX_ARGUMENTS + 1):
        if text.startswith(_CLOSE, at):
            return name, arguments, at + len(_CLOSE)
        if not text.startswith(_KEY, at):
            raise BadCall("bad_call", f"the call of {name} holds something besides {_KEY} and {_VALUE}", at)
        end = text.find(_END_KEY, at)
        if end < 0:
            raise BadCall("unclosed", "the call ends inside of a key", len(text))
        key, at = text[at + len(_KEY) : end].strip(), skip_space(text, end + len(_END_KEY))
        if not key or not text.startswith(_VALUE, at):
            raise BadCall("bad_call", f"the call of {name} has a key without a value", at)
        closing = _END_VALUE.search(text, at)
        if closing is None:
            raise BadCall("unclosed", "the call ends inside of a value", len(text))
        arguments[key] = typed_argument(text[at + len(_VALUE) : closing.start()], key, parameters)
        at = skip_space(text, closing.end())
    raise BadCall("too_many", f"the call has more than {_MAX_ARGUMENTS} arguments", at)
