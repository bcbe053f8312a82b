"""`reasoning_gym`: score a response with the verifier of the procedural dataset that its task came from.

Two habits of those verifiers matter here. The shared default gives partial credit to any text that *contains* the right
answer (`15` gets 0.5 for `5`), and many return a small reward, or 0, from a bare `except`. So full marks alone count
unless partial credit is asked for, and a verifier that rejects its own gold answer is an error and not a 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from roll.configs.rules.verifier_rules import WHAT_TO_DO, WHY_SANDBOXED, verifier_that_executes
from roll.isolation.sandbox.base import Sandbox, SandboxError, SandboxUnavailable
from roll.rewards.answers import visible_text
from roll.rewards.base import Reward
from roll.rewards.generated_answers import Extract, extract_answer
from roll.rewards.verifier_guard import GRAMMARS, is_plain_answer
from roll.rewards.verifiers_in_sandbox import SandboxedVerifier
from roll.types.trajectory import Task
from roll.utils.reasoning_gym_sets import (
    FULL_MARKS,
    NO_ANSWERS,
    check_entry,
    create_dataset,
    is_wrong,
    reference_answer,
)

PAYLOAD_KEY = "reasoning_gym"
"""`task.payload[PAYLOAD_KEY]` is {"dataset": name, "config": {...}, "entry": what the generator returned}."""
_MAX_SCORERS = 128
_SCORERS: dict[tuple[str, str], Any] = {}


class UnsafeVerifier(ValueError):
    """A verifier that would run the response as code, and no sandbox to run it in."""


def reasoning_gym(
    response: str,
    task: Task,
    *,
    extract: Extract = "auto",
    partial_credit: bool = False,
    sandbox: Sandbox | None = None,
) -> Reward:
    """Return 1.0 for an answer that the dataset's verifier gives full marks, else 0.0 (its own score with
    `partial_credit`).

    `extract` says where the answer is: `auto`, the inside of the last `<answer>...</answer>`, else the lines that the
    response begins with (as many as the answers of the data set have); `first_line` alone that isn't blank;
    `after_answer`, what follows the last "Answer:"; `tags`; `whole`. What is thought before `</think>` isn't looked at.
    Parts: `correct`, `answered`, `score` (what the verifier returned). A verifier that executes the answer runs in the
    sandbox, and gives 0 to an answer that is more than plain values, arithmetic or algebra.

    Raises:
        UnsafeVerifier: the dataset's verifier executes the response, and there is no sandbox.
        SandboxError: the sandbox failed.
        ValueError: a task without the generator's entry, or a verifier that pays texts which are no answer.
        RuntimeError: the verifier fails for a reason that isn't the response.
    """
    name, config, entry = _read_payload(task)
    executed = verifier_that_executes(name, config)
    if executed is not None and sandbox is None:  # before the verifier is even imported
        raise UnsafeVerifier(f"reasoning_gym: {executed}: {WHY_SANDBOXED}; {WHAT_TO_DO}")
    visible = visible_text(response, task)
    answer = extract_answer("" if visible is None else visible, extract, reference_answer(entry))
    score = 0.0
    if answer and is_wrong(answer, entry):
        pass  # a wrong answer, and not one to compute with
    elif answer and executed is not None and sandbox is not None:
        grammar = GRAMMARS.get(name if name == executed else _source_dataset(entry))
        # The gold answer of a text puzzle may read as the name of a variable.
        if grammar is None or answer == entry["answer"] or is_plain_answer(answer, grammar):
            score = _score(SandboxedVerifier(sandbox, name, config), answer, entry, name)
    elif answer:
        score = _score(_scorer(name, config), answer, entry, name)
    correct = float(score >= FULL_MARKS)
    parts = {"correct": correct, "answered": float(bool(answer)), "score": score}
    return Reward(score if partial_credit else correct, parts, answer)


def _source_dataset(entry: Mapping[str, Any]) -> str:
    """Return whose verifier a `composite` hands the answer to."""
    source = str(entry["metadata"].get("source_dataset"))
    if source == "composite":
        raise UnsafeVerifier("reasoning_gym: a composite inside of a composite has verifiers that execute the answer")
    return source


def _read_payload(task: Task) -> tuple[str, Mapping[str, Any], Mapping[str, Any]]:
    payload = task.payload.get(PAYLOAD_KEY)
    if not isinstance(payload, Mapping) or not {"dataset", "config", "entry"} <= set(payload):
        raise ValueError(
            f"task {task.id!r} has no reasoning-gym entry in its payload (columns {sorted(task.payload)}); "
            "the reward `reasoning_gym` scores tasks made by roll.data.procedural"
        )
    return payload["dataset"], payload["config"], payload["entry"]


def _scorer(name: str, config: Mapping[str, Any]) -> Any:
    key = (name, json.dumps(config, sort_keys=True, default=repr))
    if key not in _SCORERS:
        if len(_SCORERS) >= _MAX_SCORERS:
            _SCORERS.clear()
        _SCORERS[key] = create_dataset(name, config)
    return _SCORERS[key]


def _score(scorer: Any, answer: str, entry: Mapping[str, Any], name: str) -> float:
    error: Exception | None = None
    try:
        score = float(scorer.score_answer(answer, entry))
        if not math.isfinite(score):
            error = ValueError(f"it returned {score}")
    except (SandboxError, SandboxUnavailable):
        raise
    except Exception as raised:  # noqa: BLE001 - verifiers raise anything on odd text; re-raised if the task is at fault
        score, error = 0.0, raised
    if error is not None:
        _check_works(scorer, entry, name, error)
        return 0.0  # the verifier works, so what it choked on is the response
    if score < FULL_MARKS:
        _check_works(scorer, entry, name, None)
    elif not isinstance(scorer, SandboxedVerifier):  # those are checked when their tasks are made
        check_entry(scorer, entry, name)
    return score


def _check_works(scorer: Any, entry: Mapping[str, Any], name: str, error: Exception | None) -> None:
    """Raise unless the verifier gives its own gold answer full marks; without a gold answer, unless it can score a text
    that is no answer, after an `error`."""
    gold = entry["answer"]
    if gold is not None and scorer.score_answer(gold, entry) >= FULL_MARKS:
        return
    if gold is None and (error is None or _scores(scorer, NO_ANSWERS[0], entry)):
        return
    raise RuntimeError(
        f"reasoning-gym verifier of {name!r} is broken for this entry: it "
        + (f"raised {type(error).__name__}: {error}" if error else f"rejects its own answer {gold!r}")
    ) from error


def _scores(scorer: Any, text: str, entry: Mapping[str, Any]) -> bool:
    try:
        return math.isfinite(float(scorer.score_answer(text, entry)))
    except (SandboxError, SandboxUnavailable):
        raise
    except Exception:  # noqa: BLE001 - it can't score any text, and the caller raises the first error
        return False
