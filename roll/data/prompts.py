"""Tokenised prompts of a set of tasks, within the length limit; what was left out or cut is reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from roll.data.finished_rows import held_out
from roll.data.quarantine import Quarantine
from roll.data.task_ids import base_id
from roll.data.templates import EncodedPrompt, PromptEncoder, TemplateError
from roll.data.threads import encode_all
from roll.types.trajectory import Task
from roll.utils.rows import DataError

Truncation = Literal["error", "left", "right", "middle", "filter"]


class PromptSet:
    """Tasks that can be played, and their prompt token ids."""

    def __init__(self, tasks: Sequence[Task], ids: Sequence[tuple[int, ...]], metrics: Mapping[str, float]) -> None:
        self.tasks = list(tasks)
        self.metrics = metrics
        """What became of the prompts, lengths before anything was done: for the tracker."""
        self._ids = {task.id: row for task, row in zip(tasks, ids, strict=True)}

        self.held_out: PromptSet | None = None
        """Those that `hold_out` took away."""

    def __len__(self) -> int:
        return len(self.tasks)

    def hold_out(self, share: float, seed: int) -> None:
        """Take a share of the tasks away, for validation: see `held_out` of offline.py."""
        chosen = held_out([task.id for task in self.tasks], share, seed)
        held = [task for task in self.tasks if task.id in chosen]
        self.tasks = [task for task in self.tasks if task.id not in chosen]
        self.held_out = PromptSet(held, [self._ids[task.id] for task in held], {})
        self.metrics = {**self.metrics, "data/rows_held_out": float(len(held))}

    def prompt_ids(self, task: Task) -> tuple[int, ...]:
        """Return the prompt's token ids; a repeat in a later epoch has those of the first."""
        try:
            return self._ids[base_id(task.id)]
        except KeyError:
            raise KeyError(f"task {task.id!r} is not in this prompt set of {len(self.tasks)} tasks") from None


class LengthRule:
    """What becomes of prompts by their length, one after another; `finish` when all were seen.

    A prompt of more than `prompt_length` tokens: `error` raises in the end, `filter` leaves the task out, `left`,
    `right` and `middle` cut at that end (a chat template's own tokens are cut like all others).
    """

    def __init__(self, prompt_length: int, truncation: Truncation) -> None:
        self._limit, self._truncation = prompt_length, truncation
        self._count = self._long = self._accepted = 0
        self._sum = self._max = 0
        self._min: int | None = None
        self._first = ""

    @property
    def cut(self) -> str | None:
        """Return the end at which long prompts are cut; None if they aren't."""
        return None if self._truncation in ("error", "filter") else self._truncation

    def accept(self, task: Task, prompt: EncodedPrompt) -> tuple[int, ...] | None:
        """Return the token ids to play a task with; None if it is left out."""
        self._count += 1
        self._sum += prompt.tokens
        self._max = max(self._max, prompt.tokens)
        self._min = prompt.tokens if self._min is None else min(self._min, prompt.tokens)
        ids: tuple[int, ...] | None = prompt.ids
        if prompt.tokens > self._limit:
            self._long += 1
            self._first = self._first or f"{task.id!r} with {prompt.describe_length()}"
            ids = None if self.cut is None else CUT[self.cut](prompt.ids, self._limit)
        self._accepted += ids is not None
        return ids

    def finish(self) -> dict[str, float]:
        """Return metrics; raises `DataError` for long prompts that are an error, and when no task is left."""
        limit = self._limit
        if self._long and self._truncation == "error":
            raise DataError(
                f"{self._long} of {self._count} prompts have more than prompt_length = {limit} tokens, the first is "
                f"{self._first}, the longest has {self._max}; raise prompt_length, or set "
                "truncation to filter, left, right or middle"
            )
        if not self._accepted:
            raise DataError(
                f"all {self._count} prompts have more than prompt_length = {limit} tokens "
                f"(the shortest has {self._min}); raise prompt_length"
            )
        filtered = self._truncation == "filter"
        return {
            "data/prompts": float(self._count),
            "data/prompts_filtered": float(self._long) if filtered else 0.0,
            "data/prompts_truncated": 0.0 if filtered else float(self._long),
            "data/prompt_length_mean": self._sum / self._count,
            "data/prompt_length_max": float(self._max),
        }


def encode_prompts(
    tasks: Sequence[Task],
    encoder: PromptEncoder,
    *,
    prompt_length: int,
    truncation: Truncation = "error",
    num_workers: int = 1,
    quarantine: Quarantine | None = None,
) -> PromptSet:
    """Tokenise all prompts; the result doesn't depend on `num_workers` (`preprocessing_num_workers`).

    `LengthRule` says what becomes of long ones. A prompt that the template doesn't fit raises `TemplateError`, or goes
    to the `quarantine`. Raises `DataError` when no task is left.
    """
    if not tasks:
        raise DataError("there are no tasks to tokenise")
    rule = LengthRule(prompt_length, truncation)
    accepted: list[Task] = []
    accepted_ids: list[tuple[int, ...]] = []
    for task, prompt in zip(tasks, encode_some(tasks, encoder, prompt_length, rule.cut, num_workers), strict=True):
        if isinstance(prompt, TemplateError):
            refuse(task, prompt, quarantine)
            continue
        ids = rule.accept(task, prompt)
        if ids is not None:
            accepted.append(task)
            accepted_ids.append(ids)
    if quarantine is not None:
        quarantine.finish()
    return PromptSet(accepted, accepted_ids, rule.finish())


def encode_some(
    tasks: Sequence[Task], encoder: PromptEncoder, limit: int, cut: str | None, num_workers: int
) -> list[EncodedPrompt | TemplateError]:
    """Encode prompts in threads; the error in place of one that the template doesn't fit."""

    def encode(own: PromptEncoder, task: Task) -> EncodedPrompt | TemplateError:
        try:
            return own.encode_within(task, limit, cut)
        except TemplateError as error:
            return error

    return encode_all(tasks, encoder, encode, num_workers)


def refuse(task: Task, error: TemplateError, quarantine: Quarantine | None) -> None:
    """Put a task that has no prompt into quarantine; without one, raise."""
    if quarantine is None or not quarantine.lenient:
        raise error
    quarantine.add(task.id, str(error).removeprefix(f"task {task.id!r}: "))


def _cut_middle(ids: tuple[int, ...], limit: int) -> tuple[int, ...]:
    head = (limit + 1) // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]


CUT: dict[str, Callable[[tuple[int, ...], int], tuple[int, ...]]] = {
    "left": lambda ids, limit: ids[len(ids) - limit :],
    "right": lambda ids, limit: ids[:limit],
    "middle": _cut_middle,
}
"""Token ids and a limit -> the ids that are left, by where they are cut."""
