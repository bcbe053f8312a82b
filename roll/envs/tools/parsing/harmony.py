"""gpt-oss (harmony): messages with a channel each, and a recipient where one calls a tool.

    <|channel|>analysis<|message|>a thought<|end|>
    <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>an answer<|return|>

The prompt ends with `<|start|>assistant`. The recipient may stand before the channel or after it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from roll.envs.tools.parsing.base import NAME, BadCall, Found, read_arguments, skip_space
from roll.types.chat import ToolSpec

_START, _MESSAGE, _CHANNEL = "<|start|>", "<|message|>", "<|channel|>"
_ENDS = re.compile(r"<\|(?:end|call|return|start)\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]{1,160})")
_FUNCTIONS = "functions."
_MAX_HEADER = 512
_MAX_MESSAGES = 256
_FORM = "write <|start|>assistant to=functions.name<|channel|>commentary json<|message|>{...}<|call|>"


def parse(text: str, tools: Sequence[ToolSpec]) -> Found:  # noqa: ARG001
    """Read the calls off a response, and which part of it is thought."""
    found, at, thoughts = Found(), 0, []
    for _ in range(_MAX_MESSAGES):
        body = text.find(_MESSAGE, at)
        if body < 0 or found.full:
            break
        stray, started, header = text[at:body].rpartition(_START)
        found.content.append(stray if started else "")
        header, body = header[-_MAX_HEADER:], body + len(_MESSAGE)
        ends = _ENDS.search(text, body)
        end = len(text) if ends is None else ends.start()
        said = text[body:end]
        recipient = _RECIPIENT.search(header)
        channel = header.rpartition(_CHANNEL)[2].split()[:1] if _CHANNEL in header else []
        if recipient is not None:
            whole = text[at + (len(stray) if started else 0) : end]
            _read_call(whole, recipient.group(1), said, found, closed=ends is not None)
        elif channel == ["analysis"]:
            thoughts.append(said.strip())
        else:
            found.content.append(said)
        at = end if ends is None or ends.group() == _START else ends.end()
    found.thought = "\n".join(filter(None, thoughts))
    rest = text[at:]
    if rest.strip() and rest.strip() != f"{_START}assistant":
        found.content.append(rest)
    elif not (found.calls or found.problems or thoughts or any(found.content)):
        found.content = [text]
    return found


def _read_call(whole: str, recipient: str, said: str, found: Found, *, closed: bool) -> None:
    name = recipient.removeprefix(_FUNCTIONS)
    try:
        if not recipient.startswith(_FUNCTIONS) or not NAME.fullmatch(name):
            raise BadCall("bad_call", f"{recipient!r:.80} is no tool: the recipient of a call is functions.name", 0)
        begin = skip_space(said, 0)
        arguments, end = ("{}", begin) if begin == len(said) and closed else read_arguments(said, begin)
        if skip_space(said, end) != len(said):
            raise BadCall("bad_json", "something follows the object of arguments", end)
    except BadCall as error:
        found.content.append(whole)
        found.problem(error.kind if closed else "unclosed", f"{error}; {_FORM}")
        return
    found.calls.append((name, arguments))
