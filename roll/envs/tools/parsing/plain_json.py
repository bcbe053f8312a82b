"""Plain JSON: a call `{"name": "f", "arguments": {...}}` or a list of them, as the whole response, in a fence, or as
lines of their own. Mistral's `[TOOL_CALLS]` may stand before them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from roll.envs.tools.parsing.base import BadCall, Extraction, read_call, skip_space
from roll.types.chat import ToolSpec

_BEGIN = re.compile(r'^[ \t]{0,8}(?=\{\s{0,32}"|\[\s{0,32}\{)', re.MULTILINE)
_MAX_OBJECTS = 256
"""That are looked at, calls or not. Each costs a walk over the text before it: the decoder counts its lines."""
_FENCE = re.compile(r"```(?:json|tool_call)?[ \t]*\n?[ \t]*\Z")
_MARK = "[TOOL_CALLS]"
_KEYS = ("arguments", "parameters")
_FORM = 'write {"name": "...", "arguments": {...}}'


def parse(text: str, tools: Sequence[ToolSpec]) -> Extraction:  # noqa: ARG001
    """Read the calls off a response. An object that doesn't name both a function and arguments is content."""
    extracted, at, search = Extraction(), 0, 0
    text = text.replace(_MARK, "\n", 1)
    objects = 0
    while (begin := _BEGIN.search(text, search)) is not None and not extracted.full:
        start, objects = begin.end(), objects + 1
        if objects > _MAX_OBJECTS:
            extracted.problem("too_many", f"more than {_MAX_OBJECTS} JSON objects; the others were not read for calls")
            break
        try:
            calls, end = read_calls(text, start)
        except BadCall as error:
            search = max(error.end, start + 1)
            if '"name"' in text[start : start + 200] and any(f'"{key}"' in text[start : start + 2000] for key in _KEYS):
                extracted.problem(error.kind, f"{error}; {_FORM}")
            elif error.end >= len(text):
                break
            continue
        extracted.content.append(_without_fence(text[at : begin.start()]))
        extracted.calls += calls
        at = search = _after_fence(text, end)
    extracted.content.append(text[at:])
    return extracted


def read_calls(text: str, at: int) -> tuple[list[tuple[str, str]], int]:
    """Return the call, or the list of calls, that begins at `at`, and where it ends. Raises `BadCall`."""
    if text[at] == "{":
        name, arguments, end = read_call(text, at, _KEYS, bare=False)
        return [(name, arguments)], end
    calls, at = [], skip_space(text, at + 1)
    while True:
        name, arguments, at = read_call(text, at, _KEYS, bare=False)
        calls.append((name, arguments))
        at = skip_space(text, at)
        if text[at : at + 1] == "]":
            return calls, at + 1
        if text[at : at + 1] != ",":
            raise BadCall("bad_json", "the list of calls isn't closed", at + 1)
        at = skip_space(text, at + 1)


def _without_fence(before: str) -> str:
    match = _FENCE.search(before[-32:])
    return before if match is None else before[: len(before) - len(match.group())]


def _after_fence(text: str, end: int) -> int:
    at = skip_space(text, end)
    return at + 3 if text.startswith("```", at) and not text.startswith("```json", at) else end
