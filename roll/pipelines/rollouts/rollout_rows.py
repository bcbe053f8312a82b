"""Trajectories as rows of the parquet files of rollouts (`roll.tracking.rollouts`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from roll.envs.tools.parsing import parse_calls, split_thinking
from roll.pipelines.rollouts.assemble import Rollouts, token_columns
from roll.rollout.tool_forms import resolve_parser
from roll.tracking.rollouts import TOKEN_COLUMNS
from roll.types.batch import TokenBatch, TokenOutputs
from roll.types.chat import THINK_TAGS
from roll.types.trajectory import Group, Task, Trajectory

_LONGEST_PAYLOAD = 65_536
"""Characters of a task's payload that are kept: a task may carry a whole repository."""

_OUTPUTS = {"old_logprobs": "logprobs", "entropies": "entropy"}


class Texts:
    """A tokenizer's texts: of rows, of single tokens, and the calls of tools in them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a row's tokens."""
        text: str = self._tokenizer.decode(list(ids))
        return text

    def of_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token by itself."""
        for token in ids:
            if token not in self._known:
                self._known[token] = self.decode([token])
        return [self._known[token] for token in ids]

    def tool_calls(self, response: str) -> list[dict[str, str]]:
        """Return the calls of tools that a response makes, in the form of the model's chat template."""
        if not self._parser:
            return []
        _, content = split_thinking(response, THINK_TAGS)
        calls = parse_calls(content, self._parser).calls
        return [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in calls]

    @cached_property
    def _parser(self) -> str:
        """Return the parser of calls; empty where the template writes them in a form that isn't known."""
        if not getattr(self._tokenizer, "chat_template", None):
            return "hermes"
        try:
            return resolve_parser("auto", self._tokenizer)
        except ValueError:
            return ""


def training_rows(rollouts: Rollouts, texts: Texts) -> list[dict[str, Any]]:
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
            _branch_of(rollouts.trajectories[number], rollouts.row_turns[i]),
            rollouts.row_turns[i].start,
            {"token_ids": ids[cut], **columns},
            texts,
        )
        row["row_id"] = row_id
        if rollouts.shaped_rewards is not None:
            row["shaped_reward"] = float(rollouts.shaped_rewards[number])
        if batch.loss_weight is not None:
            row["loss_weight"] = float(batch.loss_weight[i])
        if rollouts.greedy_scores is not None and not rollouts.greedy_scores[number].isnan():
            row["greedy_reward"] = float(rollouts.greedy_scores[number])
        rows.append(row)
    for number, (first, left) in _untrained(rollouts).items():
        trajectory = rollouts.trajectories[number]
        turns = [trajectory.turns[position] for position in left]
        rows[first]["untrained_turns"] = _turns(trajectory, left, 0, texts)
        rows[first]["untrained_token_ids"] = [token for turn in turns for token in turn.prompt_ids]
    return rows


def _untrained(rollouts: Rollouts) -> dict[int, tuple[int, list[int]]]:
    """Return the first row and the turns without a row of every trajectory that has such turns: those of branches in
    which the policy chose no token."""
    first: dict[int, int] = {}
    left: dict[int, set[int]] = {}
    for row, (number, own) in enumerate(zip(rollouts.row_trajectory.tolist(), rollouts.row_turns, strict=True)):
        first.setdefault(number, row)
        left.setdefault(number, set(range(len(rollouts.trajectories[number].turns)))).difference_update(own)
    return {number: (first[number], sorted(turns)) for number, turns in left.items() if turns}


def played_rows(
    task: Task, trajectories: Iterable[Trajectory], texts: Texts, dropped: str = ""
) -> list[dict[str, Any]]:
    """Return rows of trajectories that nothing is trained on, one per context.

    Args:
        dropped: why a member that could be trained on isn't; another says so by its status and error.
    """
    rows = []
    for trajectory in trajectories:
        branches, first = trajectory.branches or ((),), 0
        for k, branch in enumerate(branches):
            row = _row(task, trajectory, branch, first, _played_columns(trajectory, branch, first), texts)
            first = branch[-1] + 1 if branch else 0
            row["row_id"] = trajectory.id if len(branches) == 1 else f"{trajectory.id}/{k}"
            if dropped or not trajectory.trainable:
                row["dropped"] = dropped if trajectory.trainable else trajectory.error or trajectory.status
            rows.append(row)
    return rows


def _branch_of(trajectory: Trajectory, own: range) -> tuple[int, ...]:
    """Return the turns of the branch that ends with those that a row trains."""
    return next(branch for branch in trajectory.branches if branch[-1] == own.stop - 1)


def group_rows(groups: Iterable[Group], texts: Texts) -> list[dict[str, Any]]:
    """Return the rows of whole groups that were only played: a validation's."""
    return [row for group in groups for row in played_rows(group.task, group.trajectories, texts)]


def _played_columns(trajectory: Trajectory, branch: Sequence[int], first: int) -> dict[str, Any]:
    """Return the token columns that playing alone gives; turns before `first` are another row's."""
    shown = [(trajectory.turns[position], position >= first) for position in branch]
    columns = token_columns(shown, sum(turn.num_tokens for turn, _ in shown))
    return {name: column.numpy() for name, column in columns.items()}


def _row(
    task: Task, trajectory: Trajectory, branch: Sequence[int], own: int, columns: Mapping[str, Any], texts: Texts
) -> dict[str, Any]:
    """Return a row of a branch whose turns before position `own` are another row's."""
    turns = [trajectory.turns[position] for position in branch]
    ids = columns["token_ids"]
    shown = _turns(trajectory, branch, own, texts)
    first = next((turn["start"] + turn["prompt_tokens"] for turn in shown if not turn["shared"]), 0)
    payload = json.dumps(dict(task.payload), ensure_ascii=False, default=str)
    truth = task.payload.get("ground_truth", "")
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
        "prompt": texts.decode(ids[:first].tolist()),
        "response": texts.decode(ids[first:].tolist()),
        "answer": trajectory.answer,
        "ground_truth": truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False, default=str),
        "payload": payload[:_LONGEST_PAYLOAD],
        "explanation": trajectory.explanation,
        "trace": trajectory.trace,
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "role_rewards": trajectory.role_rewards,
        "spans": trajectory.spans,
        "counts": trajectory.counts,
        "turns": shown,
        "num_tokens": len(ids),
        "num_turns": len(turns),
        "num_tool_calls": sum(len(turn["tool_calls"]) for turn in shown),
        **columns,
        **_numbers(columns),
    }


def _turns(trajectory: Trajectory, branch: Sequence[int], own: int, texts: Texts) -> list[dict[str, Any]]:
    turns, start = [], 0
    for position in branch:
        turn = trajectory.turns[position]
        response = texts.decode(turn.response_ids)
        turns.append(
            {
                "number": position,
                "shared": position < own,
                "start": start,
                "prompt_tokens": len(turn.prompt_ids),
                "response_tokens": turn.num_response_tokens,
                "prompt": texts.decode(turn.prompt_ids),
                "response": response,
                "observation": turn.observation,
                "reward": turn.reward,
                "finish_reason": turn.finish_reason,
                "role": turn.role,
                "state": turn.state,
                "after": turn.after,
                "resets_context": turn.resets_context,
                "metrics": sorted(turn.metrics.items()),
                "tool_calls": texts.tool_calls(response),
            }
        )
        start += turn.num_tokens
    return turns


def _numbers(columns: Mapping[str, Any]) -> dict[str, float | int | None]:
    """Return what a row's token columns add up to over its action tokens, for sorting and filtering."""
    mask = columns["action_mask"]
    numbers: dict[str, float | int | None] = {"num_response_tokens": int(mask.sum())}
    if not mask.any():
        return numbers
    numbers |= {
        "version_min": int(columns["versions"][mask].min()),
        "version_max": int(columns["versions"][mask].max()),
    }
    if "advantages" in columns:
        numbers["advantage"] = float(columns["advantages"][mask].mean())
    if "old_logprobs" in columns:
        off = np.abs(columns["old_logprobs"][mask] - columns["sampling_logprobs"][mask])
        numbers |= {"mismatch_mean": float(off.mean()), "mismatch_max": float(off.max())}
    if "ref_logprobs" in columns:
        policy = columns.get("old_logprobs", columns["sampling_logprobs"])
        numbers["kl_mean"] = float((policy[mask] - columns["ref_logprobs"][mask]).mean())
    return numbers


def column_notes(rollouts: Rollouts, reasons: Mapping[str, str]) -> dict[str, str]:
    """Return why token columns of a step are empty, of those for which `reasons` has one."""
    present = {**rollouts.batch.columns(), **rollouts.recorded}
    return {name: why for name, why in reasons.items() if name not in present}


def recorded_outputs(batch: TokenBatch, outputs: TokenOutputs, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return what `rollout_dump_outputs` names of a forward pass, float32 [N] in the order of the batch."""
    ordered = outputs.reorder(batch.row_ids) if names else outputs
    return {name: ordered.require(_OUTPUTS[name]) for name in names}
