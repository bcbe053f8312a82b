r"""Finding the final answer in a response, in time linear in its length.

Order: what follows the last `</think>`; there, the last `\boxed{...}`; else what follows the last "answer is"
or "Answer:"; else the last formula or number of the last line. Only a short answer is handed on, so that
neither a 10 MB response nor a hostile one reaches a regular expression or a parser that isn't linear.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from roll.rewards.maths.comparison import read
from roll.rewards.maths.tokens import PLAIN_NUMBER, plain_characters
from roll.rewards.maths.units import read_unit
from roll.types.trajectory import Task

ThinkMode = Literal["auto", "required", "ignore"]

MAX_ANSWER_CHARS = 1000  # A longer answer is no answer
_MAX_FORMULA_CHARS = 200
_TAIL_CHARS = 4000  # How much of the end of a response is searched for an answer that isn't boxed
_BOXES = ("\\boxed", "\\fbox", "\\framebox")
_CUE = re.compile(
    r"\b(?:answer|solution)s?\b[^\S\n]*(?:\*\*|__)?[^\S\n]*(?:(?:is|are|equals)\b[^\S\n]*:?|[:=])[^\S\n]*",
    re.IGNORECASE,
)
_MATH_SPAN = re.compile(
    r"\$\$(.{1,1000}?)\$\$|\\\[(.{1,1000}?)\\\]|(?<!\\)\$([^$\n]{1,1000})\$|(\\begin\{(?:align|gather|equation|multline)(?:ed)?\*?\}.{1,1000}?\\end\{[a-z]+\*?\})|\\\((.{1,1000}?)\\\)",
    re.DOTALL,
)
_NUMBER = rf"(?:{PLAIN_NUMBER})(?:/(?:{PLAIN_NUMBER}))?(?:\s?\\?%)?"
_LAST_NUMBER = re.compile(
    rf"(?:(?<![\w)])-)?[$€£]?(?<![\^_A-Za-z])(?<![\^_]{{)(?:(?:\d+\s*)?\\frac\{{\d+\}}\{{\d+\}}|\d+ \d+/\d+|{_NUMBER})"
)
_BEFORE_VALUE = re.compile(r"=|≈|\\approx|:(?!\d)|####|\b(?:is|are|get|gives|equals|makes|have|obtain)\b")
_LEADING_NUMBER = re.compile(rf"[-+]?[$€£]?-?(?:{PLAIN_NUMBER})(?:\s?/\s?\d+)?(?:\s?\\?%)?(?=[\s.,;!?)]|:(?!\d)|$)")
_OPERATOR_AFTER = re.compile(r"\s*(?:[-+*/^=<>(\\]|,?\s*\d|,?\s*(?:and|or)\b)")
_JOINT = re.compile(
    r"[\s$.]*(?:(?:\\text\s*\{)?\s*(?:,?\s*(?:and|or)\b|[,;&]|\\q?quad)\s*\}?[\s$]*){1,3}(?:\\\(|\\\[|\s|\$)*"
)
"""What stands between two boxes or formulas that are one answer together; a full stop may close the first."""
_BEHIND_BOX = re.compile(
    r"\}[\s$]*(?:\\text\s*\{)?\s*(\\?%|(?:hundred|thousand|million|billion|trillion|dozen|percent)\b)", re.IGNORECASE
)
_QUANTITY_BEFORE = re.compile(r"(\d+(?:\.\d+)?\s+([A-Za-z]+))\s+(?:and\s+)?$")
_BETWEEN = re.compile(r"\s*(?:,?\s*(?:and|or)\b|,)\s*")
_CHOICE = re.compile(r"\(([A-Z])\)(?=[\s.,:;]|$)")
_SEPARATOR = re.compile(r"[,;]|\band\b|\bor\b")
_ASSIGNED = re.compile(r"(?<!\w)(?<!\\)([A-Za-z](?:_?\d)?)\s*=\s*[^=]{1,60}$")
_PROSE_BEFORE = re.compile(
    r"(?!(?:a?(?:sin|cos|tan)h?|log|ln|lg|exp|sqrt|pi)\b)[A-Za-z]{2,}\s+(?:[a-z']+\s+)*(?:\d|\\frac)"
)
"""Words such as `so it's` before a value: read as letters, they would be factors of it."""
_REASON = re.compile(r"(?<=\S)[\s,]+(?:since|because)\b")
_VALUE_ALONE = re.compile(rf"\s*[-+]?[$€£]?-?(?:{_NUMBER})(?:\s?[A-Za-z%°/^{{}}\d]*){{0,3}}\s*")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer a response states."""

    text: str
    boxed: bool


def after_thinking(response: str, think: ThinkMode = "auto") -> str | None:
    """Return what follows the last `</think>`, or None when the thinking never ended.

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


def thought_mode(think: ThinkMode, task: Task) -> ThinkMode:
    """Return how thoughts are read: `auto` is `required` where the task's prompt ends with `<think>`.

    The response has no `<think>` of its own there, and one without `</think>` is nothing but an unfinished thought.
    """
    return "required" if think == "auto" and task.opens_thought else think


def visible_text(response: str, task: Task, think: ThinkMode = "auto") -> str | None:
    """Return what a response says after its thought, or None when the thought has no end."""
    return after_thinking(response, thought_mode(think, task))


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


def all_boxed(text: str) -> str | None:
    r"""Return `last_boxed` with the boxes before it that are one answer with it: `\boxed{1} and \boxed{2}`."""
    last = last_boxed(text)
    start = max(text.rfind(command) for command in _BOXES)
    boxes = [last] if last else []
    while last and len(boxes) < 20:
        before = text[max(0, start - MAX_ANSWER_CHARS - 100) : start]
        earlier = max(before.rfind(command) for command in _BOXES)
        inner = last_boxed(before) if earlier >= 0 else None
        if not inner or "{" not in before[earlier:]:
            break
        end = before.find(inner, earlier) + len(inner)
        if before[end : end + 1] != "}" or not _JOINT.fullmatch(re.sub(r"\\\)|\\\]", "", before[end + 1 :])):
            break
        boxes.append(inner)
        start -= len(before) - earlier
    return " , ".join(reversed(boxes)) if len(boxes) > 1 else last


def box_is_too_long(text: str) -> bool:
    """Return whether the last box goes on for longer than an answer may be."""
    start, command = max((text.rfind(command), command) for command in _BOXES)
    return start >= 0 and last_boxed(text) is None and len(text) - start - len(command) > MAX_ANSWER_CHARS


def find_answer(response: str, *, think: ThinkMode = "auto", require_boxed: bool = False) -> Answer | None:
    """Return the final answer, or None when the response doesn't state one."""
    visible = after_thinking(response, think)
    if visible is None:
        return None
    boxed = all_boxed(visible)
    if boxed is None:
        return None
    if boxed.strip():
        return Answer(boxed.strip() + _after_box(visible), True) if len(boxed) <= MAX_ANSWER_CHARS else None
    plain = None if require_boxed else _plain_answer(visible[-_TAIL_CHARS:])
    return Answer(plain, False) if plain else None


def _after_box(text: str) -> str:
    r"""Return what stands behind the last box and is part of its number: `\\boxed{5} million`, `\\boxed{50}\\%`."""
    start = max(text.rfind(command) for command in _BOXES)
    inner = last_boxed(text) or ""
    behind = text[text.find(inner, start) + len(inner) :][:60]
    match = _BEHIND_BOX.match(behind)
    return f" {match[1]}" if match else ""


def _plain_answer(tail: str) -> str | None:
    tail = plain_characters(tail)
    cue = None
    for cue in _CUE.finditer(tail):  # noqa: B007 - the last one counts
        pass
    if cue is not None:
        stated = tail[cue.end() :].lstrip(" *_\n")
        line = stated.split("\n", 1)[0]
        display = _MATH_SPAN.match(stated)
        plain = _joined_maths(stated, display) if display else _from_statement(line)
        if plain and (len(plain.split()) <= 4 or re.search(r"[\d\\]", plain)):
            return plain  # otherwise a remark such as "the answer is not obvious"
    end = tail.rstrip(" \n.*_`")
    if end.endswith(("\\]", "$$", "}")):
        for span in _MATH_SPAN.finditer(end):
            if span.end() == len(end):
                return _math_inside(span)
    lines = [line.strip() for line in tail.splitlines() if line.strip(" *_`")]
    return _from_last_line(lines[-1]) if lines else None


def _math_inside(match: re.Match[str]) -> str:
    """Return a formula; of several aligned lines, the last."""
    inside = next(group for group in match.groups() if group is not None).strip()
    aligned = re.fullmatch(
        r"\\begin\{((?:align|gather|equation|multline)(?:ed)?\*?|split)\}(.*)\\end\{\1\}", inside, re.DOTALL
    )
    if aligned is None:
        return inside
    rows = [row for row in aligned[2].split("\\\\") if row.strip(" &\n")]
    return rows[-1].replace("&", " ").strip(" =\n") if rows else inside


def _joined_maths(text: str, first: re.Match[str]) -> str:
    """Return a formula together with those that are one answer with it: `$2$ and $3$`."""
    parts, end = [_math_inside(first)], first.end()
    for span in _MATH_SPAN.finditer(text, end):
        if len(parts) == 20 or not _BETWEEN.fullmatch(text[end : span.start()]):
            break
        parts.append(_math_inside(span))
        end = span.end()
    return " , ".join(parts)


def _undecorated(text: str) -> str:
    return text.strip().strip("*_`\"' ").rstrip(".,;:!?").strip("*_`\"' ")


def _with_unit(number: str, rest: str) -> str:
    """Return a number with the unit behind it, or with a word that multiplies it; other words are left out."""
    phrase = re.split(r"[,;:!?()]|\.(?:\s|$)", rest, maxsplit=1)[0].strip(" *_.")
    for words in range(min(len(phrase.split()), 4), 0, -1):
        part = " ".join(phrase.split()[:words])
        unit = read_unit(part)
        if unit is not None and not unit.nouns and (unit.dimensions or unit.factor != 1 or unit.percent):
            return f"{number} {part}"
    return number


def _with_quantity_before(quantity: str, before: str) -> str:
    """Return `3 hours 20 minutes` for `20 minutes` behind `3 hours and`."""
    match = _QUANTITY_BEFORE.search(before[-60:])
    unit = read_unit(match[2]) if match else None
    return f"{match[1]} {quantity}" if match and unit is not None and unit.dimensions and " " in quantity else quantity


def _from_statement(line: str) -> str | None:
    """Return the answer at the start of what follows "answer is"."""
    span = _MATH_SPAN.search(line)
    if span is not None and not re.search(r"\d", line[: span.start()]):
        return _joined_maths(line, span)
    choice = _CHOICE.match(line)
    if choice is not None:
        return choice.group()
    number = _LEADING_NUMBER.match(line)
    if number is not None and not _OPERATOR_AFTER.match(line, number.end()):
        return _with_unit(number.group(), line[number.end() :])
    sentence = _REASON.split(re.split(r"[.!?](?:\s|$)", line, maxsplit=1)[0], maxsplit=1)[0]
    together = _assignments(sentence)[1]
    if together:
        return together
    right = sentence.rpartition("=")[2]
    if "=" in sentence and _VALUE_ALONE.fullmatch(right):
        return right.strip()  # "3 + 4 = 7" states 7
    return _undecorated(sentence)[:MAX_ANSWER_CHARS] or None


def _assignments(sentence: str) -> tuple[list[str], str]:
    """Return the letters that the end of a sentence gives values (`x = 4 and x = 5`), and that end, one answer."""
    letters, parts = [], []
    for part in reversed(_SEPARATOR.split(_undecorated(sentence)[-_MAX_FORMULA_CHARS:])):
        match = _ASSIGNED.search(part.rstrip())
        if match is None:
            if part.strip():
                break
            continue  # of `, and`
        letters.append(match[1])
        parts.append(match.group())
        if part[: match.start()].strip():
            break
    together = ", ".join(reversed(parts))
    return (letters, together) if len(parts) > 1 and _is_value(together) else ([], "")


def _from_last_line(line: str) -> str | None:
    """Return the last formula, else the last number, else a line short enough to be an answer in words."""
    spans = list(_MATH_SPAN.finditer(line))
    if spans:
        first = len(spans) - 1
        while (
            first
            and len(spans) - first < 20
            and _BETWEEN.fullmatch(line[spans[first - 1].end() : spans[first].start()])
        ):
            first -= 1
        return _joined_maths(line, spans[first])
    if line.startswith("\\") and len(line) <= MAX_ANSWER_CHARS:
        return _undecorated(line)
    letters, together = _assignments(line)
    if letters and len(set(letters)) == 1:  # `x = 3 and y = 5` alone doesn't say which was asked for
        return together
    stated = _undecorated(_BEFORE_VALUE.split(line)[-1]).strip("# ")
    if _is_value(stated) and not _PROSE_BEFORE.match(stated):
        return stated
    words = _undecorated(line).split(" ")
    for count in range(min(len(words), 8), 0, -1):
        ending = " ".join(words[-count:])
        starts = ending[:1] in "-+(\\" or ending[:1].isdigit()
        if starts and not re.search("[=<>≈]", ending) and _is_value(ending):
            return ending
    number = None
    for number in _LAST_NUMBER.finditer(line):  # noqa: B007 - the last one counts
        pass
    if number is not None:
        return _with_quantity_before(_with_unit(number.group(), line[number.end() :]), line[: number.start()])
    statement = _undecorated(line)
    return statement if len(statement) <= 50 else None


def _is_value(text: str) -> bool:
    return bool(text) and len(text) <= _MAX_FORMULA_CHARS and read(text).node is not None
