"""gpt-oss (harmony): messages with a channel each, and a recipient where one calls a tool.

    <|channel|>analysis<|message|>a thought<|end|>
    <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>an answer<|return|>

The prompt ends with `<|start|>assistant`. The recipient may stand before the channel or after it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from roll.envs.tools.parsing.base import NAME, BadCall, Extraction, read_arguments, skip_space
from roll.types.chat import ToolSpec

_START, _MESSAGE, _CHANNEL = "<|start|>", "<|message|>", "<|channel|>"
_ENDS = re.compile(r"<\|(?:end|call|return|start)\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]{1,160})")
_FUNCTIONS = "functions."
_MAX_HEADER = 512
_MAX_MESSAGES = 256
_FORM = "write <|start|>assistant to=functions.name<|channel|>commentary json<|message|>{...}<|call|>"


def parse(text: str, tools: Sequence[ToolSpec]) -> Extraction:  # noqa: ARG001
    """Read the calls off a response, and which part of it is thought."""
    extracted, at, thoughts = Extraction(), 0, []
    for _ in range(_MAX_MESSAGES):
        body = text.find(_MESSAGE, at)
        if body < 0 or extracted.full:
            break
        stray, started, header = text[at:body].rpartition(_START)
        extracted.content.append(stray if started else "")
        header, body = header[-_MAX_HEADER:], body + len(_MESSAGE)
        ends = _ENDS.search(text, body)
        end = len(text) if ends is None else ends.start()
        content_text = text[body:end]
        recipient = _RECIPIENT.search(header)
        channel = header.rpartition(_CHANNEL)[2].split()[:1] if _CHANNEL in header else []
        if recipient is not None:
            message = text[at + (len(stray) if started else 0) : end]
            _read_call(message, recipient.group(1), content_text, extracted, closed=ends is not None)
        elif channel == ["analysis"]:
            thoughts.append(content_text.strip())
        else:
            extracted.content.append(content_text)
        at = end if ends is None or ends.group() == _START else ends.end()
    extracted.thought = "\n".join(filter(None, thoughts))
    rest = text[at:]
    if rest.strip() and rest.strip() != f"{_START}assistant":
        extracted.content.append(rest)
    elif not (extracted.calls or extracted.problems or thoughts or any(extracted.content)):
        extracted.content = [text]
    return extracted


def _read_call(message: str, recipient: str, content_text: str, extracted: Extraction, *, closed: bool) -> None:
    name = recipient.removeprefix(_FUNCTIONS)
    try:
        if not recipient.startswith(_FUNCTIONS) or not NAME.fullmatch(name):
            raise BadCall("bad_call", f"{recipient!r:.80} is no tool: the recipient of a call is functions.name", 0)
        begin = skip_space(content_text, 0)
        arguments, end = ("{}", begin) if begin == len(content_text) and closed else read_arguments(content_text, begin)
        if skip_space(content_text, end) != len(content_text):
            raise BadCall("bad_json", "something follows the object of arguments", end)
    except BadCall as error:
        extracted.content.append(message)
        extracted.problem(error.kind if closed else "unclosed", f"{error}; {_FORM}")
        return
    extracted.calls.append((name, arguments))
