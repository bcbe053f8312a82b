"""What a response says after its thought, where the prompt itself may have opened the thought."""

from __future__ import annotations

from roll.rewards.answers import ThinkMode, after_thinking
from roll.types.trajectory import Task


def thought_mode(think: ThinkMode, task: Task) -> ThinkMode:
    """Return how thoughts are read: `auto` is `required` where the task's prompt ends with `<think>`.

    The response has no `<think>` of its own there, and one without `</think>` is nothing but an unfinished thought.
    """
    return "required" if think == "auto" and task.opens_thought else think


def visible_text(response: str, task: Task, think: ThinkMode = "auto") -> str | None:
    """Return what a response says after its thought, or None when the thought has no end."""
    return after_thinking(response, thought_mode(think, task))
