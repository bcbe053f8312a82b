"""`reasoning_gym`: score a response with the verifier of the procedural dataset that its task came from.

Two habits of those verifiers matter here. The shared default gives partial credit to any text that *contains* the right
answer (`15` gets 0.5 for `5`), and many return a small reward, or 0, from a bare `except`. So full marks alone count
unless partial credit is asked for, and a verifier that rejects its own gold answer is an error and not a 0.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from roll.configs.rules.verifiers import WHAT_TO_DO, WHY_SANDBOXED, verifier_that_executes
from roll.rewards.base import Reward
from roll.rewards.verifier_guard import GRAMMARS, is_plain_answer
from roll.rewards.verifiers_in_sandbox import SandboxedVerifier
from roll.sandbox.base import Sandbox, SandboxError, SandboxUnavailable
from roll.types.episode import Task

Extract = Literal["first_line", "after_answer", "tags", "whole"]

PAYLOAD_KEY = "reasoning_gym"
"""`task.payload[PAYLOAD_KEY]` is {"dataset": name, "config": {...}, "entry": what the generator returned}."""
_MAX_ANSWER_CHARS = 10_000
_FULL_MARKS = 1.0 - 1e-9


class UnsafeVerifier(ValueError):
    """A verifier that would run the response as code, and no sandbox to run it in."""


def reasoning_gym(
    response: str,
    task: Task,
    *,
    extract: Extract = "first_line",
    partial_credit: bool = False,
    sandbox: Sandbox | None = None,
) -> Reward:
    """1.0 for an answer that the dataset's verifier gives full marks, else 0.0 (its own score with `partial_credit`).

    `extract` says where the answer is: `first_line` (few-shot prompts: the first line that isn't blank), `after_answer`
    (the line after the last "Answer:"), `tags` (inside of the last `<answer>...</answer>`), `whole`. Parts: `correct`,
    `answered`, `score` (what the verifier said). A verifier that executes the answer runs in the sandbox, and gives 0
    to an answer that is more than plain values, arithmetic or algebra.

    Raises:
        UnsafeVerifier: the dataset's verifier executes the response, and there is no sandbox.
        SandboxError: the sandbox failed.
        ValueError: a task without the generator's entry.
        RuntimeError: the verifier fails for a reason that isn't the response.
    """
    name, config, entry = _read_payload(task)
    executed = verifier_that_executes(name, config)
    if executed is not None and sandbox is None:  # before the verifier is even imported
        raise UnsafeVerifier(f"reasoning_gym: {executed}: {WHY_SANDBOXED}; {WHAT_TO_DO}")
    answer = extract_answer(response, extract)
    score = 0.0
    if answer and executed is not None and sandbox is not None:
        grammar = GRAMMARS.get(name if name == executed else _source_dataset(entry))
        # The gold answer of a text puzzle may read as the name of a variable.
        if grammar is None or answer == entry["answer"] or is_plain_answer(answer, grammar):
            score = _score(SandboxedVerifier(sandbox, name, config), answer, entry, name)
    elif answer:
        score = _score(_scorer(name, json.dumps(config, sort_keys=True)), answer, entry, name)
    correct = float(score >= _FULL_MARKS)
    parts = {"correct": correct, "answered": float(bool(answer)), "score": score}
    return Reward(score if partial_credit else correct, parts, answer)


def _source_dataset(entry: Mapping[str, Any]) -> str:
    """Return whose verifier a `composite` hands the answer to."""
    source = str(entry["metadata"].get("source_dataset"))
    if source == "composite":
        raise UnsafeVerifier("reasoning_gym: a composite inside of a composite has verifiers that execute the answer")
    return source


def extract_answer(response: str, extract: Extract) -> str | None:
    """The answer as the verifier wants it, or None when the response has none where `extract` looks."""
    if extract == "first_line":
        answer = response.lstrip()[:_MAX_ANSWER_CHARS].split("\n", 1)[0]
    elif extract == "after_answer":
        marks = list(re.finditer(r"\banswer\s*:", response[-_MAX_ANSWER_CHARS:], re.IGNORECASE))
        answer = response[-_MAX_ANSWER_CHARS:][marks[-1].end() :].lstrip().split("\n", 1)[0] if marks else ""
    elif extract == "tags":
        inside, closed, _ = response.rpartition("</answer>")
        _, opened, answer = inside.rpartition("<answer>")
        answer = answer if opened and closed else ""
    elif extract == "whole":
        answer = response
    else:
        raise ValueError(f"reasoning_gym: extract must be first_line, after_answer, tags or whole, got {extract!r}")
    answer = answer.strip()
    return answer if answer and len(answer) <= _MAX_ANSWER_CHARS else None


def _read_payload(task: Task) -> tuple[str, Mapping[str, Any], Mapping[str, Any]]:
    payload = task.payload.get(PAYLOAD_KEY)
    if not isinstance(payload, Mapping) or not {"dataset", "config", "entry"} <= set(payload):
        raise ValueError(
            f"task {task.id!r} has no reasoning-gym entry in its payload (columns {sorted(task.payload)}); "
            "the reward `reasoning_gym` scores tasks made by roll.data.procedural"
        )
    return payload["dataset"], payload["config"], payload["entry"]


@lru_cache(maxsize=128)
def _scorer(name: str, config: str) -> Any:
    import reasoning_gym as library

    return library.create_dataset(name, **{**json.loads(config), "size": 1, "seed": 0})


def _score(scorer: Any, answer: str, entry: Mapping[str, Any], name: str) -> float:
    try:
        score = float(scorer.score_answer(answer, entry))
    except (SandboxError, SandboxUnavailable):
        raise
    except Exception as error:  # noqa: BLE001 - verifiers raise anything on odd text; re-raised if the task is at fault
        _check_verifier(scorer, entry, name, error)
        return 0.0  # the verifier works, so what it choked on is the response
    if not math.isfinite(score):
        raise RuntimeError(f"reasoning-gym verifier of {name!r} returned {score}")
    if score < _FULL_MARKS:
        _check_verifier(scorer, entry, name, None)
    return score


def _check_verifier(scorer: Any, entry: Mapping[str, Any], name: str, error: Exception | None) -> None:
    """Raise unless the verifier gives its own gold answer full marks; without a gold answer, raise on any `error`."""
    gold = entry["answer"]
    if gold is not None and scorer.score_answer(gold, entry) >= _FULL_MARKS:
        return
    if gold is not None or error is not None:
        raise RuntimeError(
            f"reasoning-gym verifier of {name!r} is broken for this entry: it "
            + (f"raised {type(error).__name__}: {error}" if error else f"rejects its own answer {gold!r}")
        ) from error
