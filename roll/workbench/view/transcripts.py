"""Recorded episodes as conversations, for the formats of other tools: which rows, and their messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roll.tracking.recorded_responses import rollouts
from roll.tracking.rollouts import Kind, clean
from roll.workbench.view.api import Api
from roll.workbench.view.runs import Run

FAILED = ("unscored", "env_error", "reward_error", "timeout", "aborted")
"""Statuses of episodes that have no reward."""
KIND_WORDS: dict[Kind, str] = {"train": "trained on", "dropped": "dropped", "validation": "of validations"}
_DEEPEST = 100  # levels of a tool call's arguments: writing them takes several frames of the stack for each


@dataclass(frozen=True)
class Chosen:
    """The episodes that are written."""

    run: Run
    kind: Kind
    steps: tuple[int, ...]
    rows: tuple[dict[str, Any], ...]
    left_out: int
    """Rows of these steps beyond the most that were asked for."""


def choose(api: Api, *, kind: Kind, steps: Sequence[int] | None, most: int) -> Chosen:
    """Return rows of one run in the order of steps and of the batch.

    Args:
        steps: which; None: the last that is recorded.
        most: rows at most, the first ones of the steps.

    Raises:
        ValueError: there are several runs, nothing of this kind is recorded, or a step isn't.
    """
    if len(api.runs) != 1:
        raise ValueError(f"such a log holds one run, and {len(api.runs)} were given; export each by itself")
    run = api.runs[0]
    recorded = rollouts(run.folder)
    there = run.recorded()[kind]
    if not there:
        raise ValueError(f"{run.name} has no episodes {KIND_WORDS[kind]}; --kind says which are exported")
    wanted = tuple(steps) if steps is not None else (there[-1],)
    rows = list(recorded.rows(wanted, kind=kind))
    return Chosen(run, kind, wanted, tuple(rows[:most]), max(len(rows) - most, 0))


def messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row's turns as messages with `role` and `content`, as models read and wrote them.

    What a turn was shown is a `user` message, markup of the chat template and all; `tool_calls` of a response are
    (`id`, `name`, `arguments`). Without recorded turns: prompt and response.
    """
    turns = row["turns"] or [{"prompt": row["prompt"], "response": row["response"]}]
    result: list[dict[str, Any]] = []
    for turn in turns:
        if turn["prompt"]:
            result.append({"role": "user", "content": turn["prompt"]})
        reply: dict[str, Any] = {"role": "assistant", "content": turn["response"] or ""}
        if turn.get("tool_calls"):
            reply["tool_calls"] = turn["tool_calls"]
        result.append(reply)
    if observation := turns[-1].get("observation"):
        result.append({"role": "user", "content": observation})
    return result


def facts(row: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers and words about a row that every format has room for; what is empty is left out."""
    names = (
        "row_id", "step", "kind", "member", "domain", "tag", "source", "status", "finish_reason", "dropped",
        "reward", "shaped_reward", "advantage", "loss_weight", "num_tokens", "num_response_tokens", "num_turns",
        "version_min", "version_max", "mismatch_max", "kl_mean", "trace",
    )  # fmt: skip
    result = {name: row[name] for name in names if row[name] not in (None, "")}
    if row["seed"] is not None:
        result["seed"] = str(row["seed"])  # other tools' numbers have 53 bits
    return result


def _plain(value: Any, depth: int) -> Any:
    """Return a value with valid Unicode, as `clean`; raises `ValueError` if it is nested deeper than that."""
    if depth < 0:
        raise ValueError(f"nested more than {_DEEPEST} deep")
    if isinstance(value, dict):
        return {clean(key): _plain(item, depth - 1) for key, item in value.items()}
    return [_plain(item, depth - 1) for item in value] if isinstance(value, list) else clean(value)


def arguments_of(text: str) -> tuple[dict[str, Any], str | None]:
    """Return the arguments of a tool call as an object, and what is wrong with them."""
    try:
        value = _plain(json.loads(text or "{}"), _DEEPEST)
    except (ValueError, RecursionError) as error:
        return {"text": text}, f"no JSON: {error}"
    return (value, None) if isinstance(value, dict) else ({"value": value}, "no JSON object")
