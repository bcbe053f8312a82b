"""What the page shows of a step: groups, one episode with its tokens, the tokens on which engine and trainer differ."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from roll.tracking.rollouts import METADATA_KEY, TOKEN_COLUMNS, Kind, columns, file_of
from roll.workbench.view.rows import BadQuery, RowFilter, RowIndex, plain, records

_TOKENS = ("token_ids", "token_texts", "untrained_token_ids")
_MAX_BRANCHES = 64
_MAX_DIFFERENCES = 200
GROUP_ORDERS = ("recorded", "reward_mean", "reward_std", "length_mean", "mismatch_max", "advantage_max")


def groups(
    index: RowIndex, folder: Path, kind: Kind, wanted: RowFilter, *, sort: str, order: str, offset: int, limit: int
) -> dict[str, Any]:
    """Return the groups of a step with a member that fits; `match` says which members do."""
    if wanted.step is None:
        raise BadQuery("groups are those of a step: give step=")
    if sort not in GROUP_ORDERS:
        raise BadQuery(f"sort: groups aren't sorted by {sort!r}; by {', '.join(GROUP_ORDERS)}")
    table = index.table(folder, kind, wanted.step)
    fits = set(index.matching(folder, kind, wanted)["row"].to_pylist())
    by_task: dict[str, list[dict[str, Any]]] = {}
    for row in records(table):
        by_task.setdefault(row["task_id"], []).append(row | {"match": row["row"] in fits})
    result = [_group(task, members) for task, members in by_task.items() if any(m["match"] for m in members)]
    if sort != "recorded":
        result.sort(key=lambda group: (group[sort] is None, group[sort] or 0.0), reverse=order == "desc")
    elif order == "desc":
        result.reverse()
    shown = result[offset : offset + limit]
    members = [member for group in shown for member in group["members"]]
    texts = _rows(file_of(folder, wanted.step, kind), [member["row"] for member in members], ("response",))
    responses = {member["row"]: text["response"] for member, text in zip(members, texts, strict=True)}
    for group in shown:
        group["distinct"] = len({responses[member["row"]] for member in group["members"]})
    return {"total": len(result), "groups": shown}


def _group(task: str, members: list[dict[str, Any]]) -> dict[str, Any]:
    def over(name: str, what: Any) -> float | None:
        values = [member[name] for member in members if member[name] is not None]
        return plain(float(what(values))) if values else None

    return {
        "task_id": task,
        "domain": members[0]["domain"],
        "tag": members[0]["tag"],
        "reward_mean": over("reward", statistics.fmean),
        "reward_std": over("reward", statistics.pstdev),
        "length_mean": over("num_response_tokens", statistics.fmean),
        "mismatch_max": over("mismatch_max", max),
        "advantage_max": over("advantage", max),
        "members": members,
    }


def episode(index: RowIndex, folder: Path, kind: Kind, step: int, row: int) -> dict[str, Any]:
    """Return one row with all its columns, the others of its group, and why columns are empty."""
    table = index.table(folder, kind, step)
    if not 0 <= row < table.num_rows:
        raise BadQuery(f"the {kind} rows of step {step} are 0 to {table.num_rows - 1}, there is no {row}")
    path = file_of(folder, step, kind)
    (row_read,) = _rows(path, [row], tuple(columns()))
    token_columns = {name: _shortened(row_read.pop(name), name) for name in TOKEN_COLUMNS}
    siblings = table.filter(pc.equal(table["task_id"], row_read["task_id"] or ""))
    return {
        **{name: plain(value) for name, value in row_read.items() if name not in _TOKENS},
        "row": row,
        "seed": None if row_read["seed"] is None else str(row_read["seed"]),
        "rows": table.num_rows,
        "staleness": plain(table["staleness"][row].as_py()),
        "token_ids": row_read["token_ids"],
        "token_texts": row_read["token_texts"],
        "columns": {name: values for name, values in token_columns.items() if values},
        "notes": notes(path),
        "group": records(siblings),
        "branches": _branches(path, [member for member in records(siblings) if member["member"] == row_read["member"]]),
    }


def _branches(path: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns of all rows of an episode, each once, with the turn that each one continues."""
    branches: dict[int, dict[str, Any]] = {}
    for row, turns in zip(rows, _rows(path, [row["row"] for row in rows[:_MAX_BRANCHES]], ("turns",)), strict=False):
        before: int | None = None
        for turn in turns["turns"] or []:
            if turn["number"] not in branches:
                parent = None if turn["resets_context"] else turn["after"] if turn["after"] is not None else before
                about = {name: turn[name] for name in ("number", "after", "role", "resets_context", "reward")}
                response = (turn["response"] or "")[:120]
                branches[turn["number"]] = plain({**about, "parent": parent, "row": row["row"], "response": response})
            before = turn["number"]
    return list(branches.values())


def _shortened(values: Any, name: str) -> list[Any]:
    if name in ("action_mask", "loss_mask"):
        return [int(value) for value in values or ()]
    return [plain(value) for value in values or ()]


def notes(path: Path) -> dict[str, str]:
    """Return why columns of a file are empty, by their names."""
    about = (pq.read_schema(path).metadata or {}).get(METADATA_KEY)
    result: dict[str, str] = json.loads(about).get("notes", {}) if about else {}
    return result


def differences(index: RowIndex, folder: Path, kind: Kind, step: int, limit: int) -> dict[str, Any]:
    """Return the action tokens of a step whose log-probs by trainer and engine differ most, the largest first."""
    index.table(folder, kind, step)
    path, limit = file_of(folder, step, kind), min(limit, _MAX_DIFFERENCES)
    names = ("row_id", "action_mask", "sampling_logprobs", "old_logprobs", "token_ids")
    best: list[tuple[float, int, int, float, float]] = []
    first = 0
    with pq.ParquetFile(path) as file:
        there = [name for name in names if name in file.schema_arrow.names]
        for number in range(file.num_row_groups):
            part = file.read_row_group(number, columns=there).combine_chunks()
            best = sorted([*best, *_largest(part, first, limit)], reverse=True)[:limit]
            first += part.num_rows
    result = []
    shown = _rows(path, [row for _, row, _, _, _ in best], ("row_id", "task_id", "member", "token_texts"))
    for (size, row, position, sampling, old), about in zip(best, shown, strict=True):
        texts = about.pop("token_texts") or []
        token = texts[position] if position < len(texts) else ""
        numbers = {"difference": size, "sampling_logprob": sampling, "old_logprob": old}
        result.append({**about, "row": row, "position": position, "token": token, **plain(numbers)})
    why = "" if result else notes(path).get("old_logprobs", "the trainer's log-probs aren't recorded")
    return {"tokens": result, "note": why}


def _largest(part: pa.Table, first: int, limit: int) -> list[tuple[float, int, int, float, float]]:
    """Return (difference, row, position, sampling, old) of a row group's largest differences."""
    lists = {name: _flat(part[name]) for name in ("action_mask", "sampling_logprobs", "old_logprobs")}
    offsets = [flat[0] for flat in lists.values()]
    if any(not np.array_equal(offsets[0], other) for other in offsets[1:]):
        return _largest_by_row(part, first, limit)
    mask, sampling, old = (flat[1] for flat in lists.values())
    return _picked(mask.astype(bool), sampling, old, offsets[0], first, limit)


def _largest_by_row(part: pa.Table, first: int, limit: int) -> list[tuple[float, int, int, float, float]]:
    result = []
    for index in range(part.num_rows):
        lists = [_flat(part[name].slice(index, 1)) for name in ("action_mask", "sampling_logprobs", "old_logprobs")]
        if len({len(values) for _, values in lists}) == 1:
            mask, sampling, old = (values for _, values in lists)
            result += _picked(mask.astype(bool), sampling, old, np.array([0, len(mask)]), first + index, limit)
    return result


def _picked(
    mask: Any, sampling: Any, old: Any, offsets: Any, first: int, limit: int
) -> list[tuple[float, int, int, float, float]]:
    size = np.where(mask, np.abs(old.astype(np.float64) - sampling), -1.0)
    size = np.where(np.isfinite(size), size, -1.0)
    positions = np.argsort(-size, kind="stable")[:limit]
    owners = np.searchsorted(offsets, positions, side="right") - 1
    return [
        (float(size[p]), first + int(o), int(p - offsets[o]), float(sampling[p]), float(old[p]))
        for p, o in zip(positions, owners, strict=True)
        if size[p] >= 0
    ]


def _flat(column: Any) -> tuple[Any, Any]:
    """Return offsets and values of a column of lists as arrays."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    offsets = np.concatenate([[0], np.cumsum(pc.fill_null(pc.list_value_length(array), 0).to_numpy(False))])
    return offsets.astype(np.int64), array.flatten().to_numpy(zero_copy_only=False)


def same_task(index: RowIndex, folder: Path, task: str, kinds: Sequence[Kind]) -> list[dict[str, Any]]:
    """Return the rows of a task over all steps."""
    result = []
    for kind in kinds:
        table = index.table(folder, kind)
        result += [{**row, "kind": kind} for row in records(table.filter(pc.equal(table["task_id"], task)))]
    return result


def _rows(path: Path, indices: Sequence[int], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return rows of a file by their places, reading only the row groups that have them."""
    if not indices:
        return []
    fields = columns()
    try:
        with pq.ParquetFile(path) as file:
            there = [name for name in names if name in file.schema_arrow.names]
            ends, end = [], 0
            for number in range(file.num_row_groups):
                end += file.metadata.row_group(number).num_rows
                ends.append(end)
            by_group: dict[int, list[int]] = {}
            for index in set(indices) if there else ():
                by_group.setdefault(int(np.searchsorted(ends, index, side="right")), []).append(index)
            rows: dict[int, dict[str, Any]] = {}
            for number, wanted in by_group.items():
                start = ends[number - 1] if number else 0
                part = file.read_row_group(number, columns=there, use_threads=False)
                taken = part.take([index - start for index in wanted])
                rows |= dict(zip(wanted, taken.to_pylist(maps_as_pydicts="lossy"), strict=True))
    except (OSError, IndexError, pa.ArrowException) as error:
        raise BadQuery(f"{path.name} can't be read: {error}") from error
    missing: dict[str, Any] = {
        name: [] if pa.types.is_list(fields[name]) else None for name in names if name not in there
    }
    return [{**missing, **rows.get(index, {})} for index in indices]
