"""Tokenised prompts of a set of tasks, within the length limit; what was left out or cut is reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from roll.data.task_ids import base_id
from roll.data.templates import PromptEncoder
from roll.data.threads import encode_all
from roll.types.episode import Task
from roll.utils.readers import DataError

Truncation = Literal["error", "left", "right", "middle", "filter"]


class PromptSet:
    """Tasks that can be played, and their prompt token ids."""

    def __init__(self, tasks: Sequence[Task], ids: Sequence[tuple[int, ...]], metrics: Mapping[str, float]) -> None:
        self.tasks = list(tasks)
        self.metrics = metrics
        """What became of the prompts, lengths before anything was done: for the tracker."""
        self._ids = {task.id: row for task, row in zip(tasks, ids, strict=True)}

    def __len__(self) -> int:
        return len(self.tasks)

    def prompt_ids(self, task: Task) -> tuple[int, ...]:
        """Return the prompt's token ids; a repeat in a later epoch has those of the first."""
        try:
            return self._ids[base_id(task.id)]
        except KeyError:
            raise KeyError(f"task {task.id!r} is not in this prompt set of {len(self.tasks)} tasks") from None


def encode_prompts(
    tasks: Sequence[Task],
    encoder: PromptEncoder,
    *,
    prompt_length: int,
    truncation: Truncation = "error",
    num_workers: int = 1,
) -> PromptSet:
    """Tokenise all prompts; the result doesn't depend on `num_workers` (`preprocessing_num_workers`).

    A prompt of more than `prompt_length` tokens: `error` raises, `filter` leaves the task out, `left`,
    `right` and `middle` cut at that end (a chat template's own tokens are cut like all others). Raises
    `DataError` when no task is left.
    """
    if not tasks:
        raise DataError("there are no tasks to tokenise")
    encoded = encode_all(tasks, encoder, PromptEncoder.encode, num_workers)
    kept: list[Task] = []
    kept_ids: list[tuple[int, ...]] = []
    long: list[str] = []
    for task, ids in zip(tasks, encoded, strict=True):
        if len(ids) > prompt_length:
            long.append(f"{task.id!r} with {len(ids)}")
            if truncation in ("error", "filter"):
                continue
            ids = CUT[truncation](ids, prompt_length)
        kept.append(task)
        kept_ids.append(ids)
    lengths = [len(ids) for ids in encoded]
    if long and truncation == "error":
        raise DataError(
            f"{len(long)} of {len(tasks)} prompts have more than prompt_length = {prompt_length} tokens, the first is "
            f"{long[0]}, the longest has {max(lengths)}; raise prompt_length, or set "
            "truncation to filter, left, right or middle"
        )
    if not kept:
        raise DataError(
            f"all {len(tasks)} prompts have more than prompt_length = {prompt_length} tokens "
            f"(the shortest has {min(lengths)}); raise prompt_length"
        )
    filtered = truncation == "filter"
    metrics = {
        "data/prompts": float(len(tasks)),
        "data/prompts_filtered": float(len(long)) if filtered else 0.0,
        "data/prompts_truncated": 0.0 if filtered else float(len(long)),
        "data/prompt_length_mean": sum(lengths) / len(lengths),
        "data/prompt_length_max": float(max(lengths)),
    }
    return PromptSet(kept, kept_ids, metrics)


def _cut_middle(ids: tuple[int, ...], limit: int) -> tuple[int, ...]:
    head = (limit + 1) // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]


CUT: dict[str, Callable[[tuple[int, ...], int], tuple[int, ...]]] = {
    "left": lambda ids, limit: ids[len(ids) - limit :],
    "right": lambda ids, limit: ids[:limit],
    "middle": _cut_middle,
}
"""Token ids and a limit -> the ids that are left, by where they are cut."""
