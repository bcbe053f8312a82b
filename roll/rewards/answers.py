r"""Finding the final answer in a response, in time linear in its length.

Order: what follows the last `</think>`; there, the last `\boxed{...}`; else what follows the last "answer is"
or "Answer:"; else the last formula or number of the last line. Only a short answer is handed on, so that
neither a 10 MB response nor a hostile one reaches a regular expression or a parser that isn't linear.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from roll.rewards.quantities import PLAIN_NUMBER, plain_characters, read_quantity

ThinkMode = Literal["auto", "required", "ignore"]

MAX_ANSWER_CHARS = 1000  # A longer answer is no answer
_TAIL_CHARS = 4000  # How much of the end of a response is searched for an answer that isn't boxed
_BOXES = ("\\boxed", "\\fbox", "\\framebox")
_CUE = re.compile(
    r"\banswer\b[^\S\n]*(?:\*\*|__)?[^\S\n]*(?:(?:is|are|equals)\b[^\S\n]*:?|[:=])[^\S\n]*", re.IGNORECASE
)
_MATH_SPAN = re.compile(
    r"\$\$(.{1,1000}?)\$\$|\\\[(.{1,1000}?)\\\]|(?<!\\)\$([^$\n]{1,1000})\$|\\\((.{1,1000}?)\\\)", re.DOTALL
)
_LAST_NUMBER = re.compile(rf"(?:(?<![\w)])-)?[$€£]?(?:{PLAIN_NUMBER})(?:/(?:{PLAIN_NUMBER}))?(?:\s?\\?%)?")
_LEADING_NUMBER = re.compile(rf"[-+]?[$€£]?-?(?:{PLAIN_NUMBER})(?:\s?/\s?\d+)?(?:\s?\\?%)?(?=[\s.,;:!?)]|$)")
_OPERATOR_AFTER = re.compile(r"\s*(?:[-+*/^=<>(\\]|,?\s*\d|,?\s*(?:and|or)\b)")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer a response states."""

    text: str
    boxed: bool


def after_thinking(response: str, think: ThinkMode = "auto") -> str | None:
    """What follows the last `</think>`, or None when the thinking never ended.

    `auto`: a response without either tag is all answer, one that opens `<think>` must close it. `required`: there must
    be a `</think>` (for chat templates that open the thinking in the prompt). `ignore`: the tags are plain text.
    """
    if think == "ignore":
        return response
    closed = response.rfind("</think>")
    if closed >= 0:
        rest = response[closed + len("</think>") :]
        return None if "<think>" in rest else rest
    return None if think == "required" or "<think>" in response else response


def last_boxed(text: str) -> str | None:
    r"""Inside of the last `\boxed{...}`, braces balanced; "" when there is no box, None when the last one is
    unfinished."""
    start, command = max((text.rfind(command), command) for command in _BOXES)
    if start < 0:
        return ""
    window = text[start + len(command) : start + len(command) + MAX_ANSWER_CHARS + 10].lstrip()
    if not window.startswith("{"):
        return window.split(maxsplit=1)[0].strip("$.,") if window else None
    depth, position = 0, 0
    while position < len(window):
        character = window[position]
        if character == "\\":
            position += 2  # an escaped brace doesn't count
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return window[1:position]
        position += 1
    return None


def box_is_too_long(text: str) -> bool:
    """Whether the last box goes on for longer than an answer may be."""
    start, command = max((text.rfind(command), command) for command in _BOXES)
    return start >= 0 and last_boxed(text) is None and len(text) - start - len(command) > MAX_ANSWER_CHARS


def find_answer(response: str, *, think: ThinkMode = "auto", require_boxed: bool = False) -> Answer | None:
    """The final answer, or None when the response doesn't state one."""
    visible = after_thinking(response, think)
    if visible is None:
        return None
    boxed = last_boxed(visible)
    if boxed is None:
        return None
    if boxed.strip():
        return Answer(boxed.strip(), True) if len(boxed) <= MAX_ANSWER_CHARS else None
    plain = None if require_boxed else _plain_answer(visible[-_TAIL_CHARS:])
    return Answer(plain, False) if plain else None


def _plain_answer(tail: str) -> str | None:
    tail = plain_characters(tail)
    cue = None
    for cue in _CUE.finditer(tail):  # noqa: B007 - the last one counts
        pass
    if cue is not None:
        stated = tail[cue.end() :].lstrip(" *_\n")
        line = stated.split("\n", 1)[0]
        display = _MATH_SPAN.match(stated)
        plain = _math_inside(display) if display else _from_statement(line)
        if plain and (len(plain.split()) <= 4 or re.search(r"[\d\\]", plain)):
            return plain  # otherwise a remark such as "the answer is not obvious"
    lines = [line.strip() for line in tail.splitlines() if line.strip(" *_`")]
    return _from_last_line(lines[-1]) if lines else None


def _math_inside(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()


def _undecorated(text: str) -> str:
    return text.strip().strip("*_`\"' ").rstrip(".,;:!?").strip("*_`\"' ")


def _from_statement(line: str) -> str | None:
    """The answer at the start of what follows "answer is"."""
    span = _MATH_SPAN.search(line)
    if span is not None and not re.search(r"\d", line[: span.start()]):
        return _math_inside(span)
    number = _LEADING_NUMBER.match(line)
    if number is not None and not _OPERATOR_AFTER.match(line, number.end()):
        return number.group()
    sentence = re.split(r"[.!?](?:\s|$)", line, maxsplit=1)[0]
    right = sentence.rpartition("=")[2]
    if read_quantity(right) is not None:
        return right.strip()  # "3 + 4 = 7" states 7
    return _undecorated(sentence)[:MAX_ANSWER_CHARS] or None


def _from_last_line(line: str) -> str | None:
    """The last formula, else the last number, else a line short enough to be an answer in words."""
    spans = list(_MATH_SPAN.finditer(line))
    if spans:
        return _math_inside(spans[-1])
    if line.startswith("\\") and len(line) <= MAX_ANSWER_CHARS:
        return _undecorated(line)
    numbers = _LAST_NUMBER.findall(line)
    if numbers:
        return str(numbers[-1])
    words = _undecorated(line)
    return words if len(words) <= 50 else None
