"""Gemma 4: `<|tool_call>call:f{x:1,y:<|"|>some text<|"|>,z:{a:[true]}}<tool_call|>`, without JSON's quotes.

What is thought stands between `<|channel>thought` and `<channel|>`. FunctionGemma's form is the same with other marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roll.envs.tools.parsing.base import NAME, BadCall, Extraction, json_text, read_value, skip_space
from roll.types.chat import ToolSpec

_DEEPEST = 64
_MAX_KEY = 256
_CALL = "call:"


@dataclass(frozen=True, slots=True)
class _Marks:
    opening: str
    closing: str
    quote: str


_GEMMA4 = _Marks("<|tool_call>", "<tool_call|>", '<|"|>')
_FUNCTION_GEMMA = _Marks("<start_function_call>", "<end_function_call>", "<escape>")
_THINKS, _THOUGHT = "<|channel>", "<channel|>"


def parse(text: str, tools: Sequence[ToolSpec]) -> Extraction:  # noqa: ARG001
    """Read the calls off a response."""
    extracted = Extraction()
    visible = _without_thoughts(text, extracted)
    _read(visible, _FUNCTION_GEMMA if _FUNCTION_GEMMA.opening in visible else _GEMMA4, extracted)
    return extracted


def _without_thoughts(text: str, extracted: Extraction) -> str:
    visible, thoughts, at = [], [], 0
    while (begin := text.find(_THINKS, at)) >= 0:
        visible.append(text[at:begin])
        end = text.find(_THOUGHT, begin)
        at = len(text) if end < 0 else end + len(_THOUGHT)
        body = text[begin + len(_THINKS) : len(text) if end < 0 else end]
        thoughts.append(body.removeprefix("thought").strip())
    extracted.thought = "\n".join(filter(None, thoughts))
    return "".join([*visible, text[at:]])


def _read(text: str, marks: _Marks, extracted: Extraction) -> None:
    at, form = 0, f"write {marks.opening}call:name{{key:value}}{marks.closing}, texts between {marks.quote}"
    while (begin := text.find(marks.opening, at)) >= 0 and not extracted.full:
        extracted.content.append(text[at:begin])
        try:
            name, arguments, at = _call(text, begin + len(marks.opening), marks)
        except BadCall as error:
            closing = text.find(marks.closing, error.end)
            at = len(text) if closing < 0 else closing + len(marks.closing)
            extracted.content.append(text[begin:at])
            extracted.problem("unclosed" if closing < 0 else error.kind, f"{error}; {form}")
            continue
        extracted.calls.append((name, json_text(arguments)))
    extracted.content.append(text[at:])


def _call(text: str, at: int, marks: _Marks) -> tuple[str, dict[str, Any], int]:
    at = skip_space(text, at)
    brace = text.find("{", at, at + _MAX_KEY)
    if not text.startswith(_CALL, at) or brace < 0:
        raise BadCall("bad_call", "the call doesn't begin with call:name{", at)
    name = text[at + len(_CALL) : brace].strip()
    if not NAME.fullmatch(name):
        raise BadCall("bad_call", "a call has no name of letters, digits and _.:/-", at)
    arguments, at = _object(text, brace, marks, 0)
    end = skip_space(text, at)
    return name, arguments, end + len(marks.closing) if text.startswith(marks.closing, end) else at


def _value(text: str, at: int, marks: _Marks, depth: int) -> tuple[Any, int]:
    if depth > _DEEPEST:
        raise BadCall("bad_call", f"values are nested deeper than {_DEEPEST}", at)
    if text.startswith(marks.quote, at):
        return _quoted(text, at, marks)
    if text[at : at + 1] == "{":
        return _object(text, at, marks, depth + 1)
    if text[at : at + 1] == "[":
        return _list(text, at, marks, depth + 1)
    value, end = read_value(text, at)  # a number, true, false or null; a text in JSON's own quotes too
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        raise BadCall("bad_call", "a number is too large", end)
    return value, end


def _quoted(text: str, at: int, marks: _Marks) -> tuple[str, int]:
    begin = at + len(marks.quote)
    end = text.find(marks.quote, begin)
    if end < 0:
        raise BadCall("unclosed", f"a text has no closing {marks.quote}", len(text))
    return text[begin:end], end + len(marks.quote)


def _object(text: str, at: int, marks: _Marks, depth: int) -> tuple[dict[str, Any], int]:
    members: dict[str, Any] = {}
    at = skip_space(text, at + 1)
    while text[at : at + 1] != "}":
        if text.startswith(marks.quote, at):
            key, at = _quoted(text, at, marks)
            at = skip_space(text, at)
        else:
            colon = text.find(":", at, at + _MAX_KEY)
            key, at = text[at:colon].strip().strip('"') if colon >= 0 else "", colon if colon >= 0 else at
        if not key or text[at : at + 1] != ":":
            raise BadCall("bad_call", "the arguments aren't key:value", len(text) if at >= len(text) else at)
        members[key], at = _value(text, skip_space(text, at + 1), marks, depth)
        at = _next(text, at, "}")
    return members, at + 1


def _list(text: str, at: int, marks: _Marks, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    at = skip_space(text, at + 1)
    while text[at : at + 1] != "]":
        item, at = _value(text, at, marks, depth)
        items.append(item)
        at = _next(text, at, "]")
    return items, at + 1


def _next(text: str, at: int, closing: str) -> int:
    """Return where the next member begins, or the closing bracket stands. Raises `BadCall`."""
    at = skip_space(text, at)
    if text[at : at + 1] == ",":
        return skip_space(text, at + 1)
    if text[at : at + 1] != closing:
        raise BadCall("bad_call", f"a comma or {closing} is missing", len(text) if at >= len(text) else at)
    return at
