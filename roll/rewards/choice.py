r"""`choice`: is the letter that the response settles on the right one?"""

from __future__ import annotations

import re
from typing import Any

from roll.rewards.answers import ThinkMode, last_boxed
from roll.rewards.base import Reward, ground_truth
from roll.rewards.thoughts import visible_text
from roll.types.episode import Task

_TAIL_CHARS = 4000
_OPEN, _CLOSE = r"[\s*_\"'“‘(\[{$]{0,6}(?:\\(?:text|textbf|mathrm|mathbf)\{)?\(?", r"(?=[\s)\].,:;*_}\"'”’!?$]|$)"
_CUE = (
    r"(?:\b(?i:answer|choice|option|solution)\b[\s*_\"]{0,4}"
    r"(?i:(?:is|are|must be|should be|would be)\b[\s*_]{0,4}:?|[:=])"
    r"|\b(?i:(?:it|that|this)(?:'s|’s| is| must be| should be)|choose|chose|pick|select|go with|settle on)\b)"
    r"(?:[\s*_]{0,4}(?i:(?:the )?(?:option|choice|letter|answer)\b))?:?"
)
_NEGATED_BEFORE = re.compile(
    r"(?i)(?:\bnot|n['’]t|\bnever|\bneither|\bnor|\brather than|\binstead of|\bexcept|\bother than|\beliminat\w+|"
    r"\brul\w+ out|\bexclud\w+|\breject\w*)\s+(?:\w+\s+){0,2}[\s*_\"'“(\[{$]*$"
)
_NEGATED_AFTER = re.compile(
    r"(?i)[)\].*_}\"']{0,4}\s*(?:(?:is|was|are)\s*(?:not\b|n['’]t|wrong|incorrect|false|out\b)|(?:can|could)(?:not|n['’]t))"
)


def choice(
    response: str, task: Task, *, letters: str = "ABCDEFGHIJ", think: ThinkMode = "auto", require_boxed: bool = False
) -> Reward:
    r"""1.0 when the letter stated is the one of `task.payload["ground_truth"]`, else 0.0.

    The letter is the one of the last `\boxed{}`, else of the last "answer is B", "Answer: (B)", "choose B", else the
    last "(B)", "B." at the start of a line, or line that is a letter. A letter that is ruled out ("not (B)", "B is
    wrong") isn't stated. The ground truth is a letter, alone or in front of its text, or its number from 0. Parts:
    `correct`, `answered`.
    """
    if think not in ("auto", "required", "ignore"):
        raise ValueError(f"choice: think must be auto, required or ignore, got {think!r}")
    if len(set(letters)) != len(letters) or not re.fullmatch(r"[A-Z]{2,26}", letters):
        raise ValueError(f"choice: letters are capitals such as ABCD, each once, got {letters!r}")
    expected = _expected(ground_truth(task), letters, task.id)
    visible = visible_text(response, task, think)
    stated = None if visible is None else stated_letter(visible, letters, require_boxed=require_boxed)
    correct = float(stated == expected)
    return Reward(correct, {"correct": correct, "answered": float(stated is not None)}, stated)


def stated_letter(text: str, letters: str, *, require_boxed: bool = False) -> str | None:
    """Return the letter that a text settles on, or None."""
    boxed = last_boxed(text)
    if boxed is None or boxed.strip() or require_boxed:
        match = re.match(rf"{_OPEN}([{letters}]){_CLOSE}", (boxed or "").strip())
        return match.group(1) if match else None
    tail = text[-_TAIL_CHARS:]
    mentions = rf"\(([{letters}])\)|^[\s*_#>-]{{0,6}}\(?([{letters}])(?:[.):]|[*_]{{0,3}}\s*$)"
    for pattern in (rf"{_CUE}{_OPEN}([{letters}]){_CLOSE}", mentions):
        stated = [match for match in re.finditer(pattern, tail, re.MULTILINE) if not _ruled_out(tail, match)]
        if stated:
            return next(group for group in stated[-1].groups() if group)
    return None


def _ruled_out(text: str, match: re.Match[str]) -> bool:
    letter = match.start(match.lastindex or 0)
    before = re.split(r"[.!?;\n]", text[max(0, letter - 60) : letter])[-1]
    return bool(_NEGATED_BEFORE.search(before) or _NEGATED_AFTER.match(text, letter + 1))


def _expected(truth: Any, letters: str, task_id: str) -> str:
    if isinstance(truth, int) and not isinstance(truth, bool) and 0 <= truth < len(letters):
        return letters[truth]
    match = re.match(r"\s*[(\[]?([A-Z])(?:[)\].:]|\s*$)", truth) if isinstance(truth, str) else None
    if match is None or match.group(1) not in letters:
        raise ValueError(
            f"task {task_id!r}: ground truth {str(truth)[:80]!r} is no choice; expected a letter of {letters} "
            f"('B', '(B)', 'B. text') or a number from 0 to {len(letters) - 1}"
        )
    return match.group(1)
