"""Llama 3: the whole response is a call `{"name": "f", "parameters": {...}}`, or several with `;` between them.

`<|python_tag|>` may stand before them. Before anything else it announces code for the tool `python`, or a call
`name.call(key="value")`, which Llama writes for the tools that it was trained with.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from roll.envs.tools.parsing.base import BadCall, Extraction, json_text, read_call, skip_space
from roll.types.chat import ToolSpec

_TAG = "<|python_tag|>"
_ENDS = ("<|eom_id|>", "<|eot_id|>", "<|end_of_text|>")
_KEYS = ("parameters", "arguments")
_FORM = 'write {"name": "...", "parameters": {...}} and nothing else'
_CODE_TOOLS = ("python", "code_interpreter", "ipython")
_MAX_BUILT_IN = 10_000


def parse(text: str, tools: Sequence[ToolSpec]) -> Extraction:
    """Read the calls off a response."""
    for end in _ENDS:
        text = text.strip().removesuffix(end)
    content, tagged, body = text.partition(_TAG)
    extracted = Extraction(content=[content])
    if not tagged:
        extracted.content, body = [], content
    at = skip_space(body, 0)
    if body[at : at + 1] == "{":
        _read_calls(body, at, extracted, certain=bool(tagged))
    elif tagged and (call := _built_in(body.strip()) or _code(body, tools)):
        extracted.calls.append(call)
    else:
        extracted.content.append(tagged + body)
        if tagged:
            extracted.problem("bad_call", f"the call can't be read; {_FORM}")
    return extracted


def _read_calls(body: str, at: int, extracted: Extraction, *, certain: bool) -> None:
    """Read calls up to the end of the text; an object that isn't a call is content."""
    while at < len(body) and not extracted.full:
        try:
            name, arguments, end = read_call(body, at, _KEYS, bare=certain)
        except BadCall as error:
            extracted.content.append(body[at:])
            if certain or extracted.calls or ('"name"' in body and any(f'"{key}"' in body for key in _KEYS)):
                extracted.problem(error.kind, f"{error}; {_FORM}")
            return
        extracted.calls.append((name, arguments))
        at = skip_space(body, end)
        at = skip_space(body, at + 1) if body[at : at + 1] in (";", ",") else at
        if at < len(body) and body[at] != "{":
            break
    extracted.content.append(body[at:])


def _built_in(body: str) -> tuple[str, str] | None:
    """Return the call `name.call(key="value")`, if it is one with nothing but literals. It is read, never run."""
    if len(body) > _MAX_BUILT_IN or ".call(" not in body:
        return None
    try:
        node = ast.parse(body, mode="eval").body
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "call"):
            return None
        if not isinstance(node.func.value, ast.Name) or node.args:
            return None
        arguments: dict[str, Any] = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords if k.arg}
        return node.func.value.id, json_text(arguments)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _code(body: str, tools: Sequence[ToolSpec]) -> tuple[str, str] | None:
    """Return the code after the tag as a call of the tool that runs code, if there is one."""
    for tool in tools:
        keys = list(tool.parameters.get("properties", {}))
        if tool.name in _CODE_TOOLS and keys and body.strip():
            return tool.name, json_text({keys[0]: body.strip()})
    return None
