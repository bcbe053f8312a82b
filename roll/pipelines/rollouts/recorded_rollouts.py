"""From a step's parquet file of rollouts back to what the step was trained on, bit for bit.

A file is taken as what anybody may have written. Episodes are put together again from their rows and turns, and cut
into rows as `assemble` does; a file whose rows aren't these is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, get_args

import numpy as np
import torch

from roll.pipelines.rollouts.assemble import Member, Rollouts, cut_rows
from roll.tracking.recorded_responses import RecordedRollouts
from roll.tracking.rollouts import SCHEMA_VERSION, columns, file_of
from roll.types.trajectory import TRAINABLE, FinishReason, Task, Trajectory, Turn

Row = Mapping[str, Any]

_OLDEST = 2
_COMPLETE_SINCE = 3
"""Version since which turns that no row trains are recorded."""
_READ = (
    *("step", "row_id", "task_id", "domain", "tag", "source", "seed", "member", "payload", "ground_truth"),
    *("status", "error", "answer", "explanation", "reward", "greedy_reward", "reward_parts", "role_rewards"),
    *("spans", "counts", "token_ids", "action_mask", "versions", "sampling_logprobs"),
    *("turns", "untrained_turns", "untrained_token_ids"),
)

_UNREADABLE = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, NotImplementedError, OSError),
    RecursionError,
)
"""What reading and putting together raise where a file isn't what it should be."""


class RecordingError(ValueError):
    """A recording that can't be replayed; the message names the file."""


def read_step(files: RecordedRollouts, step: int) -> Rollouts:
    """Return what a step was trained on, before log-probs and credit.

    Raises:
        RecordingError: the file can't be read, is of another version, or contradicts itself.
    """
    path = file_of(files.folder, step)
    try:
        version = files.version(step)
        if not _OLDEST <= version <= SCHEMA_VERSION:
            raise ValueError(
                f"its schema has version {version}, and versions {_OLDEST} to {SCHEMA_VERSION} can be replayed"
                + ("" if version > SCHEMA_VERSION else ": the turns of its episodes aren't recorded")
            )
        rows = _rows(files, step)
        members = list(_members(rows, version))
        rollouts = cut_rows(members)
        _compare(rollouts, rows)
        return rollouts if version < _COMPLETE_SINCE else _with_greedy(rollouts, rows)
    except _UNREADABLE as error:
        raise RecordingError(f"{path} can't be replayed: {error}") from error


def token_texts(files: RecordedRollouts, step: int) -> dict[int, str]:
    """Return the text of each distinct token of a step, as the run's tokenizer gave it.

    Raises:
        RecordingError: the file has no texts, or not one for every token.
    """
    path = file_of(files.folder, step)
    try:
        table = files.table(step, columns=["token_ids", "token_texts"])
        table = table.set_column(0, "token_ids", table["token_ids"].cast(columns()["token_ids"]))
        ids = table["token_ids"].combine_chunks().flatten()
        texts = table["token_texts"].combine_chunks().flatten()
        if len(ids) != len(texts):
            raise ValueError(f"it has {len(ids)} tokens and {len(texts)} texts of tokens")
        distinct, positions = np.unique(np.asarray(ids.to_numpy(zero_copy_only=False)), return_index=True)
        shown = texts.take(positions).to_pylist()
    except _UNREADABLE as error:
        raise RecordingError(f"{path} can't be replayed: {error}") from error
    return dict(zip(distinct.tolist(), shown, strict=True))


def _rows(files: RecordedRollouts, step: int) -> list[dict[str, Any]]:
    import pyarrow as pa

    types = columns()
    table = files.table(step, columns=list(_READ)).cast(pa.schema([(name, types[name]) for name in _READ]))
    rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
    if not rows:
        raise ValueError("it has no rows")
    for row in rows:
        if row["step"] != step:
            raise ValueError(f"row {row['row_id']!r} is of step {row['step']}")
        for name in ("row_id", "task_id", "domain", "tag", "status", "member", "reward", "turns"):
            if row[name] is None:
                raise ValueError(f"row {row['row_id']!r} has no {name}")
        sizes = {len(row[name] or ()) for name in ("token_ids", "action_mask", "versions", "sampling_logprobs")}
        if len(sizes) > 1 or sizes == {0}:
            raise ValueError(f"row {row['row_id']!r} lacks entries in a column of its tokens")
        _require_numbers(row)
    return rows


def _require_numbers(row: Row) -> None:
    """Raise `ValueError` unless every token that the policy chose has a log-prob that a ratio can be made of."""
    sampled = zip(row["sampling_logprobs"], row["action_mask"], strict=True)
    for position, (logprob, chosen) in enumerate(sampled):
        if chosen and (logprob is None or not math.isfinite(logprob)):
            raise ValueError(f"row {row['row_id']!r} has the sampling log-prob {logprob} at token {position}")


def _members(rows: Sequence[Row], version: int) -> Iterator[Member]:
    """Yield the trajectories that a file's rows are of, in their order."""
    tasks: dict[str, int] = {}
    members: set[tuple[str, int]] = set()
    for (task_id, member), of in groupby(rows, key=lambda row: (row["task_id"], row["member"])):
        own = list(of)
        if (task_id, member) in members or (task_id in tasks and tasks[task_id] != len(tasks) - 1):
            raise ValueError(f"rows of {task_id!r} aren't beside each other")
        members.add((task_id, member))
        group = tasks.setdefault(task_id, len(tasks))
        trajectory = _trajectory(own, version)
        yield Member(group, _task(own[0]), trajectory, f"{episode_task(trajectory)}#{member}")


def episode_task(trajectory: Trajectory) -> str:
    """Return the id of the task that an episode was of: a role that is paid apart has one of its own."""
    roles = tuple(trajectory.role_rewards)
    if not roles:
        return trajectory.task_id
    end = f"@{roles[0]}"
    if len(roles) > 1 or not trajectory.task_id.endswith(end):
        raise ValueError(f"{trajectory.id} is paid for the roles {', '.join(roles)}, and not a part for one of them")
    return trajectory.task_id.removesuffix(end)


def _task(row: Row) -> Task:
    try:  # a long one was cut off
        payload = json.loads(row["payload"] or "{}")
    except (ValueError, RecursionError):
        payload = {"ground_truth": row["ground_truth"]}
    return Task(
        id=row["task_id"],
        source=row["source"] or "",
        payload=payload if isinstance(payload, dict) else {},
        seed=row["seed"] or 0,
        tag=row["tag"],
        domain=row["domain"],
    )


def _trajectory(rows: Sequence[Row], version: int) -> Trajectory:
    first = rows[0]
    turns = _turns(rows)
    if not all(_is_number(row["reward"]) and row["reward"] == first["reward"] for row in rows):
        raise ValueError(f"row {first['row_id']!r} has no reward that is a number, or another than its episode's rows")
    if first["status"] not in TRAINABLE:
        raise ValueError(f"row {first['row_id']!r} has status {first['status']!r}, which isn't trained on")
    trajectory = Trajectory(
        task_id=first["task_id"],
        member=first["member"],
        turns=turns,
        reward=first["reward"],
        reward_parts=first["reward_parts"] or {},
        role_rewards=first["role_rewards"] or {},
        status=first["status"],
        error=first["error"] or "",
        answer=first["answer"],
        explanation=first["explanation"] or "",
        spans=first["spans"] or {},
        counts=first["counts"] or {},
    )
    if version < _COMPLETE_SINCE and any(row["row_id"] != trajectory.id for row in rows):
        raise ValueError(
            f"{trajectory.id} has several contexts or branches, and version {version} of the schema doesn't say "
            "whether it had turns without a response, whose rewards belong to others: record the run again"
        )
    return trajectory


def _is_number(value: float) -> bool:
    """Return whether a number is finite where it is computed with, in float32."""
    return bool(np.isfinite(np.float64(value))) and abs(value) <= float(np.finfo(np.float32).max)


def _turns(rows: Sequence[Row]) -> tuple[Turn, ...]:
    """Return the turns of an episode: each is in the row that trains it, or in none."""
    turns: dict[int, Turn] = {}
    for row in rows:
        end = 0
        for turn in row["turns"]:
            end = _add(turns, turn, row, end, row["token_ids"])
        if end != len(row["token_ids"]):
            raise ValueError(f"the turns of row {row['row_id']!r} have {end} of its {len(row['token_ids'])} tokens")
    end, left = 0, rows[0]["untrained_token_ids"] or []
    for turn in rows[0]["untrained_turns"] or ():
        if turn["response_tokens"]:
            raise ValueError(f"turn {turn['number']} of {rows[0]['row_id']!r} has a response that no row trains")
        end = _add(turns, turn, rows[0], end, left)
    if sorted(turns) != list(range(len(turns))):
        raise ValueError(
            f"row {rows[0]['row_id']!r} and those beside it have the turns {sorted(turns)}: some are missing"
        )
    return tuple(turns[number] for number in range(len(turns)))


def _add(turns: dict[int, Turn], turn: Row, row: Row, start: int, ids: Sequence[int]) -> int:
    """Add a turn to those found, unless another row trains it; return where the next one starts."""
    prompt, response, name = turn["prompt_tokens"], turn["response_tokens"], row["row_id"]
    if turn["start"] != start or prompt is None or response is None or min(prompt, response) < 0:
        raise ValueError(f"turn {turn['number']} of row {name!r} doesn't begin where the one before it ends")
    acted = start + prompt
    end = acted + response
    if end > len(ids):
        raise ValueError(f"the turns of row {name!r} have more tokens than the row")
    if turn["shared"]:
        return end
    if turn["number"] in turns:
        raise ValueError(f"turn {turn['number']} of {name!r} is in two rows")
    if turn["finish_reason"] not in get_args(FinishReason):
        raise ValueError(f"turn {turn['number']} of row {name!r} ended by {turn['finish_reason']!r}")
    if turn["reward"] is None or not _is_number(turn["reward"]):
        raise ValueError(f"turn {turn['number']} of row {name!r} has no reward that is a number")
    acting = row["action_mask"][acted:end]
    turns[turn["number"]] = Turn(
        prompt_ids=tuple(ids[start:acted]),
        response_ids=tuple(ids[acted:end]),
        logprobs=tuple(row["sampling_logprobs"][acted:end]) if response else (),
        versions=tuple(row["versions"][acted:end]) if response else (),
        finish_reason=turn["finish_reason"],
        observation=turn["observation"] or "",
        reward=turn["reward"],
        metrics=turn["metrics"] or {},
        resets_context=bool(turn["resets_context"]),
        after=turn["after"],
        role=turn["role"] or "",
        state=turn["state"] or "",
        num_fire_tokens=acting.index(True) if True in acting else response,
    )
    return end


def _compare(rollouts: Rollouts, rows: Sequence[Row]) -> None:
    """Raise `ValueError` unless the file has the rows that its episodes are cut into."""
    batch = rollouts.batch
    recorded = [row["row_id"] for row in rows]
    if list(batch.row_ids) != recorded:
        other = next((name for name in recorded if name not in batch.row_ids), recorded[-1])
        raise ValueError(f"its episodes are other rows than those it has, e.g. {other!r}")
    names = {"token_ids": np.int64, "action_mask": np.bool_, "versions": np.int64, "sampling_logprobs": np.float32}
    for name, dtype in names.items():
        column = getattr(batch, name).numpy()
        for i, row in enumerate(rows):
            cut = column[int(batch.offsets[i]) : int(batch.offsets[i + 1])]
            if not np.array_equal(cut, np.array(row[name], dtype=dtype), equal_nan=dtype is np.float32):
                raise ValueError(f"{name} of row {row['row_id']!r} contradicts the turns of its episode")


def _with_greedy(rollouts: Rollouts, rows: Sequence[Row]) -> Rollouts:
    scores = [math.nan] * len(rollouts.trajectories)
    for row, number in zip(rows, rollouts.row_trajectory.tolist(), strict=True):
        score = math.nan if row["greedy_reward"] is None else row["greedy_reward"]
        if not (math.isnan(score) or _is_number(score)):
            raise ValueError(f"row {row['row_id']!r} has a greedy_reward that is no number")
        scores[number] = score
    greedy = torch.tensor(scores, dtype=torch.float32)
    return rollouts if bool(greedy.isnan().all()) else replace(rollouts, greedy_scores=greedy)
