"""Runs on disk as a run leaves them, small and by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.tracking.live import LiveFiles
from roll.tracking.rollouts import Kind, write_rollouts
from roll.tracking.steplines import StepLines

TEXTS = {1: "Two", 2: " plus", 3: " two", 4: " is", 5: " four", 6: " five", 7: "<script>", 8: "\n"}


def row(task: str, member: int, reward: float, advantage: float, **more: Any) -> dict[str, Any]:
    """One episode of a turn: three tokens of prompt, two of response, the last with a mismatch of 0.1 * member."""
    ids = [1, 2, 3, 4, 5 if reward > 0 else 6]
    found = {
        "row_id": f"{task}#{member}",
        "task_id": task,
        "domain": "sums",
        "tag": "sums",
        "seed": 2**63 + 5,
        "member": member,
        "status": "ok",
        "finish_reason": "stop",
        "prompt": "Two plus two",
        "response": " is four" if reward > 0 else " is five",
        "ground_truth": "four",
        "payload": json.dumps({"ground_truth": "four", "level": 3}),
        "token_ids": ids,
        "action_mask": [False, False, False, True, True],
        "loss_mask": [False, False, False, True, True],
        "versions": [-1, -1, -1, 0, 0],
        "sampling_logprobs": [0.0, 0.0, 0.0, -1.0, -0.5],
        "old_logprobs": [0.0, 0.0, 0.0, -1.0, -0.5 - 0.125 * member],
        "advantages": [0.0, 0.0, 0.0, advantage, advantage],
        "reward": reward,
        "reward_parts": {"correct": reward},
        "advantage": advantage,
        "num_tokens": 5,
        "num_response_tokens": 2,
        "num_turns": 1,
        "num_tool_calls": 0,
        "version_min": 0,
        "version_max": 0,
        "mismatch_mean": 0.0625 * member,
        "mismatch_max": 0.125 * member,
        "turns": [
            {
                "number": 0, "start": 0, "prompt_tokens": 3, "response_tokens": 2, "prompt": "Two plus two",
                "response": " is four" if reward > 0 else " is five", "reward": reward, "finish_reason": "stop",
                "resets_context": False,
            }
        ],
    }  # fmt: skip
    return found | more


def group(task: str, *rewards: float, **more: Any) -> list[dict[str, Any]]:
    """A group whose advantages are rewards less their mean."""
    mean = sum(rewards) / len(rewards)
    return [row(task, member, reward, reward - mean, **more) for member, reward in enumerate(rewards)]


def write_run(
    folder: Path,
    steps: Mapping[int, Sequence[Mapping[str, Any]]],
    *,
    others: Mapping[tuple[Kind, int], Sequence[Mapping[str, Any]]] | None = None,
    metrics: Mapping[int, Mapping[str, float]] | None = None,
    notes: Mapping[str, str] | None = None,
    ended: bool = True,
) -> Path:
    """Write a run: rollouts by step, others by kind and step, metrics by step."""
    logs, rollouts = folder / "logs", folder / "rollouts"
    lines = StepLines(logs / "metrics.jsonl", None)
    for step, values in (metrics or {step: {"reward/mean": 0.5, "time/step": 2.0} for step in steps}).items():
        lines.append({"step": step, **values})
    lines.close()
    live = LiveFiles(logs, {"exp_name": folder.name, "total_steps": 10, "rollouts": "../rollouts"}, resume_step=None)
    for (kind, step), rows in {**{("train", s): r for s, r in steps.items()}, **(others or {})}.items():
        write_rollouts(
            rollouts, step, rows, kind=kind, notes=notes, token_text=lambda ids: [TEXTS.get(one, "?") for one in ids]
        )
    for step in steps:
        live.step_done(step)
    live.event(max(steps, default=0), "warning", "the KL runs away")
    if ended:
        live.end("finished")
    return folder
