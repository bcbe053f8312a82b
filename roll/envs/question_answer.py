"""Question answering in several tries: rows of a dataset, a reward function that judges, and feedback."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from roll.configs.schema.worker_config import DataArgs
from roll.data.messages import as_chat, refuse_beyond_chat
from roll.data.sources import load_tasks
from roll.envs.base import Env, Message, Observation, ResetNeeded, StepResult
from roll.rewards.base import RewardSpec
from roll.rewards.reward_registry import LoadedReward, load_reward
from roll.types.trajectory import Task
from roll.utils.seeding import stable_hash

_FORMS = ("{}", "\\boxed{{{}}}", "#### {}", "<answer>{}</answer>")
"""How reward functions want an answer written."""


class QuestionAnswer(Env):
    """Answer a question of a dataset; a wrong answer gets feedback and another try.

    The seed picks the row. Any text is an action: with `action_pattern: null` the reward function reads the whole
    response. Training and validation that shall not share rows are two tags with files of their own.

    Rewards: what the reward function gives a right answer, times `discount` for each try before it; the last wrong
    answer gets the reward function's (partial) credit in the same way, earlier ones nothing. A right answer or the last
    try terminates the episode. Reward parts: those of the reward function. Metrics: `tries`, and `success` in the last
    step. An exception of the reward function is an error of the environment, never a reward of 0.

    Args:
        file_name: file, folder, glob or Hub id, or several (jsonl, json, csv, parquet), as in `data_args.file_name`.
        prompt, messages, ground_truth: columns, as in `data_args`.
        reward: name of a reward function (`math_rule`, `gsm8k`, ...), `package.module:function`, or
            `path/to/file.py:function`.
        reward_kwargs: its keyword arguments.
        right_from: rewards from here on count as right.
        max_tries: answers per question.
        discount: factor of the reward for each try before.
        feedback: text after a wrong answer, with {tries_left} and {question}.
    """

    def __init__(
        self,
        *,
        file_name: str | Sequence[str],
        reward: str = "math_rule",
        reward_kwargs: Mapping[str, Any] | None = None,
        prompt: str | None = None,
        messages: str | None = None,
        ground_truth: str | None = None,
        right_from: float = 1.0,
        max_tries: int = 3,
        discount: float = 1.0,
        feedback: str = "That is not right. Try again; tries left: {tries_left}.",
    ) -> None:
        if not isinstance(max_tries, int) or max_tries < 1:
            raise ValueError(f"max_tries: got {max_tries!r}, expected a whole number of at least 1")
        if not 0 <= discount <= 1:
            raise ValueError(f"discount: got {discount!r}, expected between 0 and 1")
        if not math.isfinite(right_from):
            raise ValueError(f"right_from: got {right_from!r}, expected a finite number")
        try:
            feedback.format(tries_left=1, question="")
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"feedback: {feedback!r} can't be filled in ({type(error).__name__}: {error}); it may use "
                "{tries_left} and {question}; braces of your own are doubled"
            ) from None
        files = (file_name,) if isinstance(file_name, str) else tuple(file_name)
        self._tasks = _tasks(files, prompt, messages, ground_truth)
        self.one_episode = len(self._tasks) == 1
        self._reward = _loaded(reward, reward_kwargs or {})
        self._right_from, self._max_tries, self._discount, self._feedback = right_from, max_tries, discount, feedback
        self._task: Task | None = None
        self._tries = 0

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        if options:
            raise ValueError(f"QuestionAnswer has no options, got {', '.join(sorted(options))}: leave them out")
        task = self._tasks[stable_hash("question-answer", seed) % len(self._tasks)]
        self._task, self._tries = task, 0
        return Observation(_question(task), f"{task.id}, no answer yet")

    def step(self, action: str) -> StepResult:
        task = self._task
        if task is None:
            raise ResetNeeded("no question is open: call reset first")
        judged = self._reward(action, task)
        if judged is None:
            raise ValueError(f"task {task.id!r}: the reward function doesn't score it (it returned None)")
        factor = self._discount**self._tries
        self._tries += 1
        metrics = {"tries": 1.0}
        right = judged.value >= self._right_from
        if right or self._tries == self._max_tries:
            self._task = None
            return StepResult(
                reward=judged.value * factor,
                terminated=True,
                reward_parts=judged.parts,
                metrics={**metrics, "success": float(right)},
            )
        text = self._feedback.format(
            tries_left=self._max_tries - self._tries, question="\n".join(m.content for m in _question(task))
        )
        observation = Observation.of(text, f"{task.id}, {self._tries} wrong")
        return StepResult(
            reward=0.0, terminated=False, observation=observation, reward_parts=judged.parts, metrics=metrics
        )

    def solution(self, max_actions: int) -> Sequence[str] | None:  # noqa: ARG002 - it is the same with any time
        """Return the ground truth, in a form that the reward function takes as right; None if there is none."""
        truth = None if self._task is None else self._task.payload.get("ground_truth")
        if self._task is None or truth is None:
            return None
        for form in _FORMS:
            scored = self._reward(form.format(truth), self._task)
            if scored is not None and scored.value >= self._right_from:
                return [form.format(truth)]
        return None


def _question(task: Task) -> tuple[Message, ...]:
    if task.payload["messages"] is None:
        return (Message("user", task.payload["prompt"]),)
    return as_chat(task.payload["messages"])


@lru_cache(maxsize=16)
def _tasks(files: tuple[str, ...], prompt: str | None, messages: str | None, truth: str | None) -> tuple[Task, ...]:
    """Return the rows; read once per process, however many instances there are."""
    columns = DataArgs(prompt=prompt, messages=messages, ground_truth=truth)
    tasks = tuple(load_tasks(files, columns=columns, seed=0))
    for task in tasks:
        refuse_beyond_chat(task.payload["messages"] or (), task.payload.get("tools"), f"row {task.id!r}")
    return tasks


def _loaded(reward: str, kwargs: Mapping[str, Any]) -> LoadedReward:
    return load_reward(RewardSpec(name=reward, kwargs=dict(kwargs)))
