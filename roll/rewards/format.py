"""`format`, `regex`: does the response have the form that was asked for, or match a pattern?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from roll.rewards.base import Reward
from roll.rewards.exact import accepted_answers, normalised
from roll.types.trajectory import Task
from roll.utils.patterns import SECONDS, compile_pattern, matches

TEMPLATES: dict[str, tuple[tuple[str, ...], bool]] = {
    "think_answer": (("think", "answer"), False),
    "reasoning_answer": (("reasoning", "answer"), False),
    "think": (("think",), True),
    "answer": (("answer",), False),
}
"""Tags in their order, and whether text follows the last one."""
ANSWER = "answer"
"""The group of a pattern that is compared with the ground truth."""


def format(
    response: str,
    task: Task,
    *,
    template: str = "think_answer",
    tags: Sequence[str] | None = None,
    pattern: str | None = None,
    opened: bool = False,
    search_timeout_s: float = SECONDS,
) -> Reward:
    """Return 1.0 for a response of the right form, else 0.0.

    The form is a template's (`think_answer`: `<think>...</think><answer>...</answer>`), that of a list of `tags`, or a
    pattern that the whole response matches. Each tag is there once, in order, with text inside, and nothing but white
    space outside; after `think` alone there is text. `opened`: the prompt ends with the first opening tag; of `<think>`
    that is known, unless the response repeats it. Part: `format`.
    """
    if pattern is not None:
        good = any(
            True for _ in matches(_compiled(pattern, False), response, full_match=True, seconds=search_timeout_s)
        )
        return Reward(float(good), {"format": float(good)})
    if template not in TEMPLATES:
        raise ValueError(
            f"format: template is one of {', '.join(TEMPLATES)}, got {template!r}; or give tags, or pattern"
        )
    names, text_follows = (tuple(tags), False) if tags is not None else TEMPLATES[template]
    if not names or any(not name for name in names):
        raise ValueError(f"format: tags are names such as [think, answer], got {list(names)!r}")
    opened = opened or (task.opens_thought and names[0] == "think" and not response.lstrip().startswith("<think>"))
    good = has_form(f"<{names[0]}>{response}" if opened else response, names, text_follows=text_follows)
    return Reward(float(good), {"format": float(good)})


def has_form(text: str, tags: Sequence[str], *, text_follows: bool = False) -> bool:
    """Return whether a text is its tags, each once, in order and filled; takes time linear in the text's length."""
    if any(text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1 for tag in tags):
        return False
    for tag in tags:
        before, _, rest = text.partition(f"<{tag}>")
        inside, closed, text = rest.partition(f"</{tag}>")
        if before.strip() or not inside.strip() or not closed:
            return False
    return bool(text.strip()) == text_follows


def regex(
    response: str,
    task: Task,
    *,
    pattern: str,
    whole: bool = False,
    ignore_case: bool = False,
    search_timeout_s: float = SECONDS,
) -> Reward:
    """Return 1.0 for a response in which the pattern is found, or with `whole` one that it matches from end to end.

    With a group `(?P<answer>...)` in the pattern, 1.0 when that group of the last match is the ground truth (white
    space apart). Parts: `correct`, `answered` (the pattern was found). Raises `TimeoutError` when the search takes
    longer than `search_timeout_s`: the response then has no score.
    """
    compiled = _compiled(pattern, ignore_case)
    last = None
    for last in matches(compiled, response, full_match=whole, seconds=search_timeout_s):  # noqa: B007 - the last one counts
        if ANSWER not in compiled.groupindex:
            break
    has_match = last is not None
    if last is None or ANSWER not in compiled.groupindex:
        return Reward(float(has_match), {"correct": float(has_match), "answered": float(has_match)})
    stated = normalised(last[ANSWER] or "", ignore_case, ignore_punctuation=False)
    accepted = [normalised(one, ignore_case, ignore_punctuation=False) for one in accepted_answers(task)]
    correct = float(bool(stated) and stated in accepted)
    return Reward(correct, {"correct": correct, "answered": float(has_match)}, stated or None)


@lru_cache(maxsize=64)
def _compiled(pattern: str, ignore_case: bool) -> Any:
    return compile_pattern(pattern, ignore_case=ignore_case)
