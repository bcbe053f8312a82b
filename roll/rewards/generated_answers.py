"""Where the answer to a generated question stands in a response, in time linear in its length."""

from __future__ import annotations

import re
from typing import Literal

Extract = Literal["auto", "first_line", "after_answer", "tags", "whole"]
EXTRACTS = ("auto", "first_line", "after_answer", "tags", "whole")

MAX_ANSWER_CHARS = 10_000
_CUE = re.compile(r"\banswer[ \t]*(?:\*\*)?[ \t]*:[ \t]*(?:\*\*)?", re.IGNORECASE)
_CUE_AT_START = re.compile(r"\s*(?:\*\*|#+ )?(?:(?:the|my) )?(?:final |correct )?" + _CUE.pattern[2:], re.IGNORECASE)


def extract_answer(response: str, extract: Extract, reference: str | None = None) -> str | None:
    """Return the answer as the verifier wants it, or None when the response has none where `extract` looks.

    `reference` is a right answer, whose form says where one ends. `auto`: the inside of the last
    `<answer>...</answer>`, else what the response begins with. `after_answer`: what follows the last "Answer:". Both
    take the first line that isn't blank; where the reference has several lines, those up to a blank one; and where a
    bracket stays open, those up to the one that closes it.
    """
    limit = max(MAX_ANSWER_CHARS, 2 * len(reference or ""))
    if extract == "auto":
        answer = _tagged(response)
        if answer is None:
            start = response.lstrip()[:limit]
            cue = _CUE_AT_START.match(start)
            answer = _answer_lines(start[cue.end() :] if cue else start, reference)
    elif extract == "first_line":
        answer = response.lstrip()[:limit].split("\n", 1)[0]
    elif extract == "after_answer":
        tail, end = response[-limit:], None
        for match in _CUE.finditer(tail):
            end = match.end()
        answer = "" if end is None else _answer_lines(tail[end:], reference)
    elif extract == "tags":
        answer = _tagged(response) or ""
    elif extract == "whole":
        answer = response
    else:
        raise ValueError(f"reasoning_gym: extract must be one of {', '.join(EXTRACTS)}, got {extract!r}")
    answer = answer.strip()
    return answer if answer and len(answer) <= limit else None


def _tagged(response: str) -> str | None:
    inside, closed, _ = response.rpartition("</answer>")
    _, opened, answer = inside.rpartition("<answer>")
    return _unfenced(answer.strip()) if opened and closed else None


def _unfenced(text: str) -> str:
    """Return the inside of a code fence that a text begins with."""
    if not text.startswith("```"):
        return text
    inside = text.partition("\n")[2]
    return inside.partition("\n```")[0] if inside else text.strip("`")


def _answer_lines(text: str, reference: str | None) -> str:
    """Return the lines at the beginning of a text that are the answer."""
    text = text.lstrip()
    if text.startswith("```"):
        return _unfenced(text)
    if reference is not None and "\n" in reference.strip():
        lines = reference.strip().split("\n")
        if any(not line.strip() for line in lines):  # a blank line doesn't end it
            return "\n".join(text.split("\n")[: len(lines)])
        return re.split(r"\n[ \t\r]*\n", text, maxsplit=1)[0]
    return _closed_lines(text)


def _closed_lines(text: str) -> str:
    """Return the first line, and those after it until its brackets are closed; brackets in quotes are text."""
    depth, quoted, first_end = 0, False, None
    position = 0
    while position < len(text):
        character = text[position]
        if character == "\\" and quoted:
            position += 1
        elif character == '"':
            quoted = not quoted
        elif character == "\n":
            if depth <= 0:
                return text[:position]
            first_end = position if first_end is None else first_end
            quoted = False  # no text of JSON goes over the end of a line
        elif not quoted:
            depth += (character in "[{") - (character in "]}")
        position += 1
    return text if first_end is None or depth <= 0 else text[:first_end]
