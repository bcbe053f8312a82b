"""`regex`: does the response match a pattern, or is what the pattern finds the expected answer?"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from roll.rewards.base import Reward
from roll.rewards.exact import accepted_answers, normalised
from roll.types.trajectory import Task
from roll.utils.patterns import SECONDS, compile_pattern, matches

ANSWER = "answer"
"""The group of a pattern that is compared with the ground truth."""


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
