"""Responses that a reward must give full marks, and such that it must not, made from a row's reference answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_DIGIT = re.compile(r"\d")
_SWAPPED = {"yes": "no", "no": "yes", "true": "false", "false": "true"}
_SENTENCE = re.compile(
    r"[^\W\d_]+(?:\s+\S+){0,200}?\s+(?:is|are|was|were|equals?|has|have|had)\s+(?P<rest>\S.*)", re.DOTALL
)
_NO_DIGITS = "8191"  # In place of an answer without digits: hardly ever right
_IN_EXTRACT = {"tags": "<answer>{answer}</answer>", "boxed": r"\boxed{{{answer}}}", "after_answer": "Answer: {answer}"}

MATH_RULE = "math_rule"
JUDGING = ("gsm8k", MATH_RULE, "choice", "exact", "regex", "code", "reasoning_gym")
"""Rewards that compare a response with a reference answer."""


def reference_template(name: str, kwargs: Mapping[str, Any]) -> str:
    """Return the response that a reward expects, with `{answer}` in it."""
    if name == "gsm8k":
        return "#### {answer}"
    if name == "math_rule":
        return r"\boxed{{{answer}}}"
    if name == "choice":
        return r"\boxed{{{answer}}}" if kwargs.get("require_boxed") else "The answer is ({answer})"
    if name in ("exact", "reasoning_gym"):
        return _IN_EXTRACT.get(str(kwargs.get("extract")), "{answer}")
    if name == "code":
        return "```python\n{answer}\n```"
    return "{answer}"


def answer_text(name: str, truth: Any, kwargs: Mapping[str, Any]) -> str:
    """Return the reference answer as a response writes it: the number behind `####`, the letter of a choice, an object
    as JSON."""
    if isinstance(truth, (list, tuple)) and truth and name in JUDGING:
        truth = truth[0]  # one of several right ones
    if isinstance(truth, (list, tuple, dict)):
        return json.dumps(truth, ensure_ascii=False, default=str)
    text = str(int(truth)) if isinstance(truth, float) and truth.is_integer() else str(truth)
    if name == "gsm8k":
        return text.rpartition("####")[2].strip()
    if name == "choice":
        letters = str(kwargs.get("letters", "ABCDEFGHIJ"))
        if isinstance(truth, int) and 0 <= truth < len(letters):
            return letters[truth]
        return text.strip().lstrip("([")[:1]
    if name == "math_rule" and "boxed" in text:
        from roll.rewards.answers import last_boxed

        return last_boxed(text) or text
    return text


def answer_in_sentence(truth: Any) -> str | None:
    """Return what a reference answer states that is a whole sentence, e.g. `50 m²` for "The area is 50 m²"; else None.

    No response states such a sentence word for word.
    """
    if not isinstance(truth, str) or len(truth) > 1000 or any(mark in truth for mark in ("boxed", "####")):
        return None
    match = _SENTENCE.fullmatch(truth.strip())
    return match["rest"].rstrip(" .!") or None if match else None


def filled(template: str, answer: str) -> str:
    """Return the template with the answer in it; doubled braces are single ones."""
    before, _, after = template.partition("{answer}")
    return f"{_braces(before)}{answer}{_braces(after)}"


def _braces(text: str) -> str:
    return text.replace("{{", "{").replace("}}", "}")


def perturbed(name: str, answer: str) -> str:
    """Return an answer that is wrong: another letter, another first digit, the opposite, or a number."""
    if name == "choice":
        return "B" if answer == "A" else "A"
    if name == "code":
        return "raise SystemExit(1)"
    if answer.strip().lower() in _SWAPPED:
        return _SWAPPED[answer.strip().lower()]
    changed = _DIGIT.sub(lambda match: str((int(match.group()) + 1) % 10), answer, count=1)
    return changed if changed != answer else _NO_DIGITS
