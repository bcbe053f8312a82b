"""Qwen-Coder: XML whose values are bare text.

    <tool_call>
    <function=f>
    <parameter=x>
    some text, of any number of lines
    </parameter>
    </function>
    </tool_call>

Values become what the tool's JSON schema says of the parameter: text stays text. Seed-OSS writes the same between
`<seed:tool_call>` and `</seed:tool_call>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from roll.envs.tools.parsing.base import NAME, BadCall, Extraction, json_text
from roll.envs.tools.parsing.typed import parameters_of, typed_argument
from roll.types.chat import ToolSpec

_QWEN = ("<tool_call>", "</tool_call>")
_SEED = ("<seed:tool_call>", "</seed:tool_call>")
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_MAX_PARAMETERS = 64
_NAME = re.compile(r"[^<>\n]{1,256}>")
_FORM = "write <tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>"


def parse(text: str, tools: Sequence[ToolSpec]) -> Extraction:
    """Read the calls off a response. The outer tags may be missing: some models leave them out."""
    return _parse(text, tools, *_QWEN)


def parse_seed(text: str, tools: Sequence[ToolSpec]) -> Extraction:
    """Read the calls off a response of Seed-OSS."""
    return _parse(text, tools, *_SEED)


def _parse(text: str, tools: Sequence[ToolSpec], opening: str, closing: str) -> Extraction:
    extracted, at = Extraction(), 0
    form = _FORM.replace(_QWEN[0], opening).replace(_QWEN[1], closing)
    while (begin := text.find(_FUNCTION, at)) >= 0 and not extracted.full:
        start, before = at, text[at:begin].rstrip()
        opened = before.endswith(opening)
        extracted.content.append(before.removesuffix(opening) if opened else text[at:begin])
        try:
            name, arguments, at = _call(text, begin, tools)
        except BadCall as error:
            at = error.end
            extracted.content.append(text[start + len(before) - len(opening) if opened else begin : at])
            extracted.problem(error.kind, f"{error}; {form}")
            continue
        extracted.calls.append((name, json_text(arguments)))
        rest = text[at : at + len(closing) + 8]
        if rest.lstrip().startswith(closing):
            at += rest.index(closing) + len(closing)
    if not extracted.calls and not extracted.problems and opening in text:
        extracted.problem("bad_call", f"a tool call without <function=...>; {form}")
    extracted.content.append(text[at:])
    return extracted


def _call(text: str, begin: int, tools: Sequence[ToolSpec]) -> tuple[str, dict[str, Any], int]:
    """Return name, arguments and end of the call that begins there. Raises `BadCall`."""
    name, at = _named(text, begin + len(_FUNCTION))
    if not NAME.fullmatch(name):
        raise BadCall("bad_call", "a function has no name of letters, digits and _.:/-", at)
    parameters = parameters_of(tools, name)
    arguments: dict[str, Any] = {}
    for _ in range(_MAX_PARAMETERS + 1):
        closing, parameter = text.find(_END_FUNCTION, at), text.find(_PARAMETER, at)
        if parameter < 0 or 0 <= closing < parameter:
            if closing < 0:
                raise BadCall("unclosed", "the call isn't closed", len(text))
            return name, arguments, closing + len(_END_FUNCTION)
        key, at = _named(text, parameter + len(_PARAMETER))
        end = _value_end(text, at)
        value_text = text[at:end].removeprefix("\n").removesuffix("\n")
        arguments[key] = typed_argument(value_text, key, parameters)
        at = end + len(_END_PARAMETER) if text.startswith(_END_PARAMETER, end) else end
    raise BadCall("too_many", f"the call has more than {_MAX_PARAMETERS} parameters", at)


def _value_end(text: str, at: int) -> int:
    """Return where a value ends: at its closing tag, or where it is missing, at the next tag of the call."""
    closing, following = text.find(_END_PARAMETER, at), text.find("\n" + _PARAMETER, at)
    if closing >= 0 and not 0 <= following < closing:
        return closing
    ends = [end for end in (following, text.find(_END_FUNCTION, at)) if end >= 0]
    if not ends:
        raise BadCall("unclosed", "the call ends inside of a parameter", len(text))
    return min(ends)


def _named(text: str, at: int) -> tuple[str, int]:
    """Return the name that stands before `>`, and where the text goes on."""
    match = _NAME.match(text, at)
    if match is None:
        raise BadCall("bad_call", "a function or a parameter has no name", at)
    name = match.group()[:-1].strip().strip("\"'")
    if not name:
        raise BadCall("bad_call", "a function or a parameter has no name", match.end())
    return name, match.end()
