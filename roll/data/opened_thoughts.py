"""Whether a chat template opens the response's thought in the prompt, as those of reasoning models do."""

from __future__ import annotations

from dataclasses import replace

from roll.data.templates import PromptEncoder
from roll.types.chat import THINK_TAGS
from roll.types.trajectory import Task


def ends_with_thought(prompt: str) -> bool:
    """Return whether the text of a prompt ends with an opened thought."""
    return prompt.rstrip().endswith(THINK_TAGS[0])


def prompted(task: Task, encoder: PromptEncoder | None) -> Task:
    """Return the task as reward functions get it from a run whose prompts this encoder renders."""
    if encoder is None or not ends_with_thought(encoder.render(task)):
        return task
    return replace(task, opens_thought=True)
