"""What `roll eval score` counts: which responses belong to one question, and a table of results by tag."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from roll.pipelines.rollouts.validation import majority_of_k, pass_at_k
from roll.rewards.base import RewardResult

OF_RESPONSES = ("sample", "finish_reason", "score", "score_error")
"""Columns that `roll eval generate` and `roll eval score` add to a response: they say nothing about the question."""
ALL_TAGS = "(all)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredResponse:
    """One response and what the reward said of it."""

    question: str
    """What it answers, see `question_key`."""
    tag: str
    result: RewardResult | None
    """None: there is no response, which is no right one. A result without a reward says nothing about the response."""


def question_key(values: Mapping[str, Any], response_column: str) -> str:
    """Return what responses to one question share: the row without the response and what was added to it.

    Columns that are null count as absent, as files of rows with differing columns have them.
    """
    return digest({name: value for name, value in _without(values, response_column).items() if value is not None})


def digest(value: Any) -> str:
    """Return a text that equal values have in common, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _without(values: Mapping[str, Any], response_column: str) -> dict[str, Any]:
    """Return a row without its response, found as `column_value` finds it, and without what was added to that."""
    added = set(OF_RESPONSES)
    if "sample" in values or "finish_reason" in values:
        added.add("error")  # of the generation; alone it may be part of the question
    remaining = {name: value for name, value in values.items() if name not in added and name != response_column}
    outer, _, inner = response_column.partition(".")
    if response_column not in values and isinstance(below := values.get(outer), Mapping):
        remaining[outer] = {name: value for name, value in below.items() if name != inner}
    return remaining


def distinguishing_columns(
    rows: Sequence[Mapping[str, Any]], questions: Sequence[str], same: Sequence[str], response_column: str
) -> tuple[int, list[str]]:
    """Return how many rows look like another attempt at a question that an earlier row has, yet count as a question of
    their own, and the columns that tell them apart.

    Args:
        rows: the rows of the file.
        questions: the question of each, see `question_key`.
        same: what is shared by attempts at one question: prompt and reference answer.
        response_column: where the responses are.
    """
    first: dict[str, tuple[Mapping[str, Any], str]] = {}
    count = 0
    columns: dict[str, None] = {}
    for values, question, shared in zip(rows, questions, same, strict=True):
        earlier, its_question = first.setdefault(shared, (values, question))
        if question == its_question:
            continue
        count += 1
        one, other = _without(earlier, response_column), _without(values, response_column)
        different = [name for name in {**one, **other} if digest(one.get(name)) != digest(other.get(name))]
        columns.update(dict.fromkeys(different))
    return count, list(columns)


def results_table(
    responses: Sequence[ScoredResponse], threshold: float, ks: Sequence[int] = (), votes: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """Return a row for each tag, and one for all: how many, mean score, accuracy, pass@k and maj@k by question."""
    tags: dict[str, list[ScoredResponse]] = defaultdict(list)
    for response in responses:
        tags[response.tag].append(response)
    if len(tags) > 1:
        tags[ALL_TAGS] = list(responses)
    return [_row(tag, members, threshold, ks, votes) for tag, members in tags.items()]


@dataclass(frozen=True, slots=True)
class _Question:
    """The responses to one question that count: all but those whose reward failed."""

    key: str
    right: list[bool]
    answers: list[str | None]


def _row(
    tag: str, responses: Sequence[ScoredResponse], threshold: float, ks: Sequence[int], votes: Sequence[int]
) -> dict[str, Any]:
    questions = _by_question(responses, threshold)
    answered = [question for question in questions if question.right]
    absent = sum(response.result is None for response in responses)
    values = [r.result.reward.value for r in responses if r.result is not None and r.result.reward is not None]
    counted = len(values) + absent
    row: dict[str, Any] = {"tag": tag, "rows": len(questions), "responses": len(responses)}
    row["no response"] = absent
    row["failed"] = len(responses) - counted
    row["mean score"] = _of(f"{fmean(values):.4g}" if values else None, len(values), len(responses))
    accuracy = f"{fmean(fmean(question.right) for question in answered):.1%}" if answered else None
    row["accuracy"] = _of(accuracy, counted, len(responses))

    for k in ks:
        row[f"pass@{k}"] = _over_questions(questions, k, _passes)
    stated = any(answer is not None for question in questions for answer in question.answers)
    for k in votes:
        row[f"maj@{k}"] = _over_questions(questions, k, _majority) if stated else "–"
    return row


def _over_questions(questions: Sequence[_Question], k: int, score: Callable[[_Question, int], float]) -> str:
    enough = [question for question in questions if len(question.right) >= k]
    mean = fmean(score(question, k) for question in enough) if enough else None
    return _of(None if mean is None else f"{mean:.1%}", len(enough), len(questions))


def _passes(question: _Question, k: int) -> float:
    return pass_at_k(len(question.right), sum(question.right), k)


def _majority(question: _Question, k: int) -> float:
    return majority_of_k(question.answers, list(map(float, question.right)), k, question.key)


def _by_question(responses: Sequence[ScoredResponse], threshold: float) -> list[_Question]:
    questions: dict[str, _Question] = {}
    for response in responses:
        question = questions.setdefault(response.question, _Question(response.question, [], []))
        if response.result is None:
            question.right.append(False)
            question.answers.append(None)
        elif response.result.reward is not None:
            question.right.append(response.result.reward.value >= threshold)
            question.answers.append(response.result.reward.answer)
    return list(questions.values())


def _of(value: str | None, counted: int, total: int) -> str:
    """Return a cell, which says over how many of all it is where some are left out."""
    if value is None:
        return "–"
    return value if counted == total else f"{value} ({counted} of {total})"


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of `results_table`."""
    from rich.table import Table

    from roll.utils.terminal import Console

    table = Table()
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row.values()))
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:  # in a file or a pipe lines may be as long as they are
        console.width = max(console.width, console.measure(table, options=console.options.update(width=500)).maximum)
    console.print(table)
