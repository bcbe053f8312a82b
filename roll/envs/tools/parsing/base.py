"""What the forms of tool calls share: what is found, its limits, and JSON that is read without being trusted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from roll.types.chat import ToolCall

MAX_CALLS = 32
"""Calls and problems that are read off one response; also what bounds the time of reading it."""
MAX_CHARACTERS = 1_000_000
"""Of a response that is read at all."""

ProblemKind = Literal["bad_json", "bad_call", "unclosed", "too_many", "too_long"]
"""`bad_json`: not JSON. `bad_call`: JSON, but no name or no arguments. `unclosed`: it ends inside a call. `too_many`,
`too_long`: the limits above."""


@dataclass(frozen=True, slots=True)
class CallProblem:
    """Something that looks like a call and can't be made."""

    kind: ProblemKind
    message: str
    """What is wrong and what is expected, for the policy."""


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """A response, taken apart."""

    content: str
    """What it says outside of its calls. A call that can't be made stays in it as it was said."""
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[CallProblem, ...] = ()
    thought: str = ""
    """What it thinks, where the form itself says which part that is (channels of gpt-oss and Gemma 4)."""


@dataclass(slots=True)
class Extraction:
    """What a form finds in a text, in order."""

    content: list[str] = field(default_factory=list)
    """Pieces between calls."""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """(name, JSON text of its arguments)."""
    problems: list[CallProblem] = field(default_factory=list)
    thought: str = ""
    """What the form itself marks as thought: no calls are looked for in it."""

    def problem(self, kind: ProblemKind, message: str) -> None:
        """Note a call that can't be made."""
        self.problems.append(CallProblem(kind, message))

    @property
    def full(self) -> bool:
        """Return whether no more is read; if so, that is noted."""
        if len(self.calls) + len(self.problems) < MAX_CALLS:
            return False
        self.problem("too_many", f"more than {MAX_CALLS} tool calls in one response; the others were not read")
        return True


class BadCall(ValueError):
    """A piece of text isn't a call. `end`: how far it was read."""

    def __init__(self, kind: ProblemKind, message: str, end: int) -> None:
        super().__init__(message)
        self.kind: ProblemKind = kind
        self.end = end


NAME = re.compile(r"[\w.:/-]{1,128}")
"""Names of functions."""


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} isn't a number in JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_SPACE = " \t\r\n"


def read_value(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that begins at `at`, and where it ends. Raises `BadCall`."""
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        where = f"{error.msg} (character {error.pos - at} of the call)"
        raise BadCall("bad_json", f"the call isn't valid JSON: {where}", max(error.pos, at + 1)) from error
    except (ValueError, RecursionError) as error:  # NaN, an integer of thousands of digits, a thousand brackets
        raise BadCall(
            "bad_json", "the call isn't valid JSON: NaN, too deep, or a number too long", len(text)
        ) from error


def read_call(text: str, at: int, argument_keys: Sequence[str], *, bare: bool = True) -> tuple[str, str, int]:
    """Return name, arguments and end of the call `{"name": ..., <one of the keys>: {...}}` that begins at `at`.

    The arguments are the text that was said, not one made from it. `bare`: a call may have none. Raises `BadCall`.
    """
    members, end = _members(text, at)
    name = members.get("name", (None, ""))[0]
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadCall("bad_call", 'the call has no "name" of letters, digits and _.:/-', end)
    for key in argument_keys:
        if key in members:
            return name, arguments_text(*members[key], key, end), end
    if not bare:
        raise BadCall("bad_call", f'the call has no "{argument_keys[0]}"', end)
    return name, "{}", end


def arguments_text(value: Any, text: str, key: str, end: int) -> str:
    """Return the JSON text of an object of arguments. Raises `BadCall`.

    Some models write the object as a text that holds JSON: that is taken for the object.
    """
    if isinstance(value, str):
        try:
            inner, _ = read_value(value.strip(), 0)
        except BadCall:
            inner = None
        if isinstance(inner, dict):
            return value.strip()
    if not isinstance(value, dict):
        raise BadCall("bad_call", f'"{key}" of the call must be a JSON object', end)
    return text


def json_text(arguments: Mapping[str, Any]) -> str:
    """Return the JSON text of arguments that were written in another form."""
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(arguments)
    return text


def read_marked(
    text: str, opening: str, closing: str, form: str, call: Callable[[str, int], tuple[str, str, int]]
) -> Extraction:
    """Return the calls between marks, and the text around them.

    Args:
        form: how a call is written, for messages about one that can't be read.
        call: gives name, arguments and end of the call that begins at a position; raises `BadCall`.
    """
    extracted, at = Extraction(), 0
    while (begin := text.find(opening, at)) >= 0 and not extracted.full:
        extracted.content.append(text[at:begin])
        try:
            name, arguments, at = call(text, begin + len(opening))
        except BadCall as error:
            end = text.find(closing, error.end)
            at = len(text) if end < 0 else end + len(closing)
            extracted.content.append(text[begin:at])
            extracted.problem("unclosed" if end < 0 else error.kind, f"{error}; {form}")
            continue
        extracted.calls.append((name, arguments))
    extracted.content.append(text[at:])
    return extracted


def skip_space(text: str, at: int) -> int:
    """Return where the text goes on after white space."""
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def read_arguments(text: str, at: int) -> tuple[str, int]:
    """Return the text of the JSON object of arguments that begins at `at`, and where it ends. Raises `BadCall`."""
    value, end = read_value(text, at)
    return arguments_text(value, text[at:end], "arguments", end), end


def _members(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """Return key -> (value, its text) of the JSON object that begins at `at`, and where it ends. Raises `BadCall`."""
    if text[at : at + 1] != "{":
        raise BadCall("bad_json", "the call isn't a JSON object", at + 1)
    members: dict[str, tuple[Any, str]] = {}
    at = skip_space(text, at + 1)
    while text[at : at + 1] != "}":
        key, at = read_value(text, at)
        at = skip_space(text, at)
        if not isinstance(key, str) or text[at : at + 1] != ":":
            raise BadCall("bad_json", 'the call isn\'t valid JSON: expected "name": and so on', at + 1)
        begin = skip_space(text, at + 1)
        value, at = read_value(text, begin)
        members[key] = (value, text[begin:at])
        at = skip_space(text, at)
        if text[at : at + 1] == ",":
            at = skip_space(text, at + 1)
            if text[at : at + 1] == "}":
                raise BadCall("bad_json", "the call isn't valid JSON: a comma before the closing brace", at + 1)
        elif text[at : at + 1] != "}":
            raise BadCall("bad_json", "the call isn't valid JSON: a comma or the closing brace is missing", at + 1)
    return members, at + 1
