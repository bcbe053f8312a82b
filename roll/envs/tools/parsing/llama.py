"""Llama 3: the whole response is a call `{"name": "f", "parameters": {...}}`, or several with `;` between them.

`<|python_tag|>` may stand before them. Before anything else it announces code for the tool `python`, or a call
`name.call(key="value")`, which Llama writes for the tools that it was trained with.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from roll.envs.tools.parsing.base import BadCall, Found, json_text, read_call, skip_space
from roll.types.chat import ToolSpec

_TAG = "<|python_tag|>"
_ENDS = ("<|eom_id|>", "<|eot_id|>", "<|end_of_text|>")
_KEYS = ("parameters", "arguments")
_FORM = 'write {"name": "...", "parameters": {...}} and nothing else'
_CODE_TOOLS = ("python", "code_interpreter", "ipython")
_MAX_BUILT_IN = 10_000


def parse(text: str, tools: Sequence[ToolSpec]) -> Found:
    """Read the calls off a response."""
    for end in _ENDS:
        text = text.strip().removesuffix(end)
    content, tagged, said = text.partition(_TAG)
    found = Found(content=[content])
    if not tagged:
        found.content, said = [], content
    at = skip_space(said, 0)
    if said[at : at + 1] == "{":
        _read_calls(said, at, found, certain=bool(tagged))
    elif tagged and (call := _built_in(said.strip()) or _code(said, tools)):
        found.calls.append(call)
    else:
        found.content.append(tagged + said)
        if tagged:
            found.problem("bad_call", f"the call can't be read; {_FORM}")
    return found


def _read_calls(said: str, at: int, found: Found, *, certain: bool) -> None:
    """Read calls up to the end of the text; an object that isn't a call is content."""
    while at < len(said) and not found.full:
        try:
            name, arguments, end = read_call(said, at, _KEYS, bare=certain)
        except BadCall as error:
            found.content.append(said[at:])
            if certain or found.calls or ('"name"' in said and any(f'"{key}"' in said for key in _KEYS)):
                found.problem(error.kind, f"{error}; {_FORM}")
            return
        found.calls.append((name, arguments))
        at = skip_space(said, end)
        at = skip_space(said, at + 1) if said[at : at + 1] in (";", ",") else at
        if at < len(said) and said[at] != "{":
            break
    found.content.append(said[at:])


def _built_in(said: str) -> tuple[str, str] | None:
    """Return the call `name.call(key="value")`, if it is one with nothing but literals. It is read, never run."""
    if len(said) > _MAX_BUILT_IN or ".call(" not in said:
        return None
    try:
        node = ast.parse(said, mode="eval").body
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "call"):
            return None
        if not isinstance(node.func.value, ast.Name) or node.args:
            return None
        arguments: dict[str, Any] = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords if k.arg}
        return node.func.value.id, json_text(arguments)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _code(said: str, tools: Sequence[ToolSpec]) -> tuple[str, str] | None:
    """Return the code after the tag as a call of the tool that runs code, if there is one."""
    for tool in tools:
        keys = list(tool.parameters.get("properties", {}))
        if tool.name in _CODE_TOOLS and keys and said.strip():
            return tool.name, json_text({keys[0]: said.strip()})
    return None
