"""Trajectories as rows of the parquet files of rollouts (`roll.tracking.rollouts`)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from roll.pipelines.assemble import Rollouts
from roll.tracking.rollouts import TOKEN_COLUMNS
from roll.types.batch import TokenBatch, TokenOutputs
from roll.types.episode import Group, Task, Trajectory, Turn

_LONGEST_PAYLOAD = 65_536
"""Characters of a task's payload that are kept: a task may carry a whole repository."""

_OUTPUTS = {"old_logprobs": "logprobs", "entropies": "entropy"}

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_MOST_CALLS = 100

Decode = Callable[[Sequence[int]], str]


def training_rows(rollouts: Rollouts, decode: Decode) -> list[dict[str, Any]]:
    """Return a row for every row that a step has trained on, with all columns that its batch has."""
    batch, present = rollouts.batch, {**rollouts.batch.columns(), **rollouts.recorded}
    token_columns = {name: present[name].numpy() for name in TOKEN_COLUMNS if name in present}
    offsets, ids = batch.offsets.tolist(), batch.token_ids.numpy()
    rows = []
    for i, row_id in enumerate(batch.row_ids):
        number, cut = int(rollouts.row_trajectory[i]), slice(offsets[i], offsets[i + 1])
        columns = {name: column[cut] for name, column in token_columns.items()}
        row = _row(
            rollouts.tasks[number],
            rollouts.trajectories[number],
            rollouts.row_turns[i],
            {"token_ids": ids[cut], **columns},
            decode,
        )
        row["row_id"] = row_id
        if rollouts.shaped_rewards is not None:
            row["shaped_reward"] = float(rollouts.shaped_rewards[number])
        if batch.loss_weight is not None:
            row["loss_weight"] = float(batch.loss_weight[i])
        rows.append(row)
    return rows


def played_rows(
    task: Task, trajectories: Iterable[Trajectory], decode: Decode, dropped: str = ""
) -> list[dict[str, Any]]:
    """Return rows of trajectories that nothing is trained on, one per context.

    Args:
        dropped: why a member that could be trained on isn't; another says so by its status and error.
    """
    rows = []
    for trajectory in trajectories:
        contexts, first = trajectory.contexts or ((),), 0
        for k, context in enumerate(contexts):
            positions = range(first, first + len(context))
            first = positions.stop
            row = _row(task, trajectory, positions, _played_columns(context), decode)
            row["row_id"] = trajectory.id if len(contexts) == 1 else f"{trajectory.id}/{k}"
            if dropped or not trajectory.trainable:
                row["dropped"] = dropped if trajectory.trainable else trajectory.error or trajectory.status
            rows.append(row)
    return rows


def group_rows(groups: Iterable[Group], decode: Decode) -> list[dict[str, Any]]:
    """Return the rows of whole groups that were only played: a validation's."""
    return [row for group in groups for row in played_rows(group.task, group.trajectories, decode)]


def _played_columns(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the token columns that playing alone gives."""
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for turn in turns:
        given = len(turn.prompt_ids) + turn.num_fire_tokens
        ids += [*turn.prompt_ids, *turn.response_ids]
        mask += [False] * given + [True] * (len(turn.response_ids) - turn.num_fire_tokens)
        logprobs += [0.0] * given + [*turn.logprobs[turn.num_fire_tokens :]]
        versions += [-1] * given + [*turn.versions[turn.num_fire_tokens :]]
    return {
        "token_ids": np.array(ids, dtype=np.int64),
        "action_mask": np.array(mask, dtype=bool),
        "sampling_logprobs": np.array(logprobs, dtype=np.float32),
        "versions": np.array(versions, dtype=np.int64),
    }


def _row(
    task: Task, trajectory: Trajectory, positions: range, columns: Mapping[str, Any], decode: Decode
) -> dict[str, Any]:
    turns = [trajectory.turns[position] for position in positions]
    ids = columns["token_ids"]
    first = len(turns[0].prompt_ids) if turns else 0
    payload = json.dumps(dict(task.payload), ensure_ascii=False, default=str)
    truth = task.payload.get("ground_truth", "")
    shown = _turns(turns, positions.start, decode)
    return {
        "task_id": task.id,
        "domain": task.domain,
        "tag": task.tag,
        "source": task.source,
        "seed": task.seed if 0 <= task.seed < 2**64 else None,
        "member": trajectory.member,
        "status": trajectory.status,
        "finish_reason": turns[-1].finish_reason if turns else "",
        "error": trajectory.error,
        "prompt": decode(ids[:first].tolist()),
        "response": decode(ids[first:].tolist()),
        "answer": trajectory.answer,
        "ground_truth": truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False, default=str),
        "payload": payload[:_LONGEST_PAYLOAD],
        "explanation": trajectory.explanation,
        "trace": trajectory.trace,
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "role_rewards": trajectory.role_rewards,
        "spans": trajectory.spans,
        "turns": shown,
        "num_tokens": len(ids),
        "num_turns": len(turns),
        "num_tool_calls": sum(len(turn["tool_calls"]) for turn in shown),
        **columns,
        **_numbers(columns),
    }


def _turns(turns: Sequence[Turn], first: int, decode: Decode) -> list[dict[str, Any]]:
    found, start = [], 0
    for number, turn in enumerate(turns, start=first):
        response = decode(turn.response_ids)
        found.append(
            {
                "number": number,
                "start": start,
                "prompt_tokens": len(turn.prompt_ids),
                "response_tokens": len(turn.response_ids),
                "prompt": decode(turn.prompt_ids),
                "response": response,
                "observation": turn.observation,
                "reward": turn.reward,
                "finish_reason": turn.finish_reason,
                "role": turn.role,
                "after": turn.after,
                "resets_context": turn.resets_context,
                "metrics": sorted(turn.metrics.items()),
                "tool_calls": tool_calls(response),
            }
        )
        start += len(turn.prompt_ids) + len(turn.response_ids)
    return found


def tool_calls(text: str) -> list[dict[str, str]]:
    """Return the calls of tools in a response, as Hermes and Qwen write them: JSON between `<tool_call>` tags."""
    found = []
    for number, said in enumerate(_CALL.findall(text)[:_MOST_CALLS]):
        try:
            call = json.loads(said)
        except (ValueError, RecursionError):
            call = None
        name, arguments = (call.get("name", ""), call.get("arguments", {})) if isinstance(call, dict) else ("", said)
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        found.append({"id": str(number), "name": str(name), "arguments": arguments})
    return found


def _numbers(columns: Mapping[str, Any]) -> dict[str, float | int | None]:
    """Return what a row's token columns add up to over its action tokens, for sorting and filtering."""
    mask = columns["action_mask"]
    found: dict[str, float | int | None] = {"num_response_tokens": int(mask.sum())}
    if not mask.any():
        return found
    found |= {"version_min": int(columns["versions"][mask].min()), "version_max": int(columns["versions"][mask].max())}
    if "advantages" in columns:
        found["advantage"] = float(columns["advantages"][mask].mean())
    if "old_logprobs" in columns:
        off = np.abs(columns["old_logprobs"][mask] - columns["sampling_logprobs"][mask])
        found |= {"mismatch_mean": float(off.mean()), "mismatch_max": float(off.max())}
    if "ref_logprobs" in columns:
        policy = columns.get("old_logprobs", columns["sampling_logprobs"])
        found["kl_mean"] = float((policy[mask] - columns["ref_logprobs"][mask]).mean())
    return found


def token_texts(decode: Decode) -> Callable[[Sequence[int]], list[str]]:
    """Return what gives the texts of token ids, and remembers them."""
    known: dict[int, str] = {}

    def texts(ids: Sequence[int]) -> list[str]:
        for token in ids:
            if token not in known:
                known[token] = decode([token])
        return [known[token] for token in ids]

    return texts


def column_notes(rollouts: Rollouts, reasons: Mapping[str, str]) -> dict[str, str]:
    """Return why token columns of a step are empty, of those for which `reasons` has one."""
    present = {**rollouts.batch.columns(), **rollouts.recorded}
    return {name: why for name, why in reasons.items() if name not in present}


def recorded_outputs(batch: TokenBatch, outputs: TokenOutputs, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return what `rollout_dump_outputs` names of a forward pass, float32 [N] in the order of the batch."""
    ordered = outputs.reorder(batch.row_ids) if names else outputs
    return {name: ordered.require(_OUTPUTS[name]) for name in names}
