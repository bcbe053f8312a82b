"""`ifeval`: does the response keep the checkable constraints of its prompt?"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from roll.rewards.base import Reward
from roll.rewards.ifeval_checks import CHECKS
from roll.types.trajectory import Task

MAX_CHARS = 1_000_000
_IDS, _KWARGS = "instruction_id_list", "kwargs"


def ifeval(
    response: str, task: Task, *, mode: Literal["strict", "loose"] = "strict", score: Literal["fraction", "all"] = "all"
) -> Reward:
    """Return the share of constraints that hold, or with `all` whether every one does.

    `loose`: a constraint also holds if it does without the first line, the last line, both, or asterisks. An empty
    response keeps none. Parts: `all`, `fraction` in this mode, and one per family of constraints
    (`length_constraints`), the share that holds.
    """
    if mode not in ("strict", "loose") or score not in ("fraction", "all"):
        raise ValueError(f"ifeval: mode is strict or loose, score is fraction or all, got {mode!r} and {score!r}")
    texts = list(variants(response[:MAX_CHARS])) if mode == "loose" else [response[:MAX_CHARS]]
    held: dict[str, list[bool]] = {}
    for name, kwargs in constraints(task):
        family = name.partition(":")[0]
        held.setdefault(family, []).append(any(text.strip() != "" and CHECKS[name](text, **kwargs) for text in texts))
    results = [one for family in held.values() for one in family]
    share, full = sum(results) / len(results), float(all(results))
    parts = {"all": full, "fraction": share}
    parts |= {family: sum(outcomes) / len(outcomes) for family, outcomes in held.items()}
    return Reward(share if score == "fraction" else full, parts)


def variants(response: str) -> Iterator[str]:
    """Yield the eight texts of the loose mode: what stands around an answer taken away."""
    lines = response.split("\n")
    cuts = (lines, lines[1:], lines[:-1], lines[1:-1])
    for cut in cuts:
        text = "\n".join(cut).strip() if cut is not lines else response
        yield text
        yield text.replace("*", "")


def constraints(task: Task) -> list[tuple[str, dict[str, Any]]]:
    """Return the constraints of a row: (id, keyword arguments).

    They stand in the columns `instruction_id_list` and `kwargs`, or under these names in the ground truth; each may
    be JSON text. Keyword arguments that are null are left out. Raises `ValueError` for what can't be checked.
    """
    row: Mapping[str, Any] = task.payload
    if _IDS not in row:
        row = _parsed(row.get("ground_truth"), task.id)
        row = row[0] if isinstance(row, Sequence) and not isinstance(row, str) and row else row
    if not isinstance(row, Mapping) or _IDS not in row:
        raise ValueError(f"task {task.id!r} has no column {_IDS!r}, and none in its ground truth; ifeval needs it")
    ids, many = _parsed(row[_IDS], task.id), _parsed(row.get(_KWARGS), task.id)
    ids = [ids] if isinstance(ids, str) else list(ids or ())
    many = [many] if isinstance(many, Mapping) else list(many or [{}] * len(ids))
    if not ids or len(ids) != len(many):
        raise ValueError(
            f"task {task.id!r}: {len(ids)} constraints and {len(many)} kwargs, expected as many, at least 1"
        )
    return [_checked(name, kwargs, task.id) for name, kwargs in zip(ids, many, strict=True)]


def _checked(name: Any, kwargs: Any, task_id: str) -> tuple[str, dict[str, Any]]:
    if name not in CHECKS:
        raise ValueError(f"task {task_id!r}: no constraint is called {name!r}; known: {', '.join(CHECKS)}")
    takes = list(inspect.signature(CHECKS[name]).parameters)[1:]
    arguments = {key: value for key, value in (kwargs or {}).items() if value is not None}
    if set(arguments) != set(takes):
        raise ValueError(f"task {task_id!r}: {name} has {sorted(arguments)}, expected {takes}")
    return name, arguments


def _parsed(value: Any, task_id: str) -> Any:
    """Return JSON text as what it says; anything else, and a plain word, as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"task {task_id!r}: {value[:80]!r} is no JSON: {error}") from None
