"""What an assistant's message thinks, apart from what it says, and where a chat template puts it.

Rows give thoughts in two ways: between tags in the content (`<think> ... </think>`), or in a key of their own
(`reasoning_content`, `thinking`). A template that reads a key gets them in that key, whichever way the row has; one
that reads none gets them in the content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from roll.data.templates import PromptEncoder
from roll.types.chat import THINK_TAGS
from roll.types.trajectory import Task

THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking", "thought", "thoughts", "think")
TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_PROBE = "probe of a thought"


class Split(NamedTuple):
    """A message in two parts."""

    thought: str
    answer: str
    raw: str
    """What follows the opening tag, as the row has it; empty where the thought stands in a key."""


def split_thought(message: Mapping[str, Any]) -> Split:
    """Return what a message thinks and says; the thought is empty where there is none, or where it stands twice."""
    content = message.get("content") or ""
    keys = {message[key] for key in THOUGHT_KEYS if isinstance(message.get(key), str) and message[key].strip()}
    for opening, closing in TAGS:
        begin, mark, rest = content.partition(opening)
        if not mark:
            begin, rest = "", content
        raw_thought, mark, answer = rest.partition(closing)
        if mark and not begin.strip() and raw_thought.strip():
            return Split("", content, "") if keys else Split(raw_thought.strip(), answer.lstrip("\n"), rest)
    return Split(keys.pop().strip(), content, "") if len(keys) == 1 else Split("", content, "")


def forced_think_prefix(prompt: str) -> tuple[tuple[str, str], str] | None:
    """Return the tags of the thought that a prompt ends inside, and what it has after the opening one; None where it
    ends outside."""
    for tags in TAGS:
        begin = prompt.rfind(tags[0])
        after = prompt[begin + len(tags[0]) :]
        if begin >= 0 and not after.strip():
            return tags, after
    return None


def closes_thought(prompt: str) -> bool:
    """Return whether a prompt ends with a thought that it has closed itself."""
    return any(prompt.rstrip().endswith(closing) for _, closing in TAGS)


def after_opening(split: Split, closing: str, opened: str) -> str:
    """Return what a model writes after a prompt that has opened its thought, and has `opened` behind the tag.

    A message without a thought closes it at once, in the form of Qwen's templates.
    """
    if split.raw:
        return split.raw.removeprefix(opened) if split.raw.startswith(opened) else split.raw.lstrip("\n")
    if split.thought:
        return f"{split.thought}\n{closing}\n\n{split.answer}"
    return f"{'' if opened.endswith(chr(10)) else chr(10)}\n{closing}\n\n{split.answer}"


class Thoughts:
    """Gives messages to one template so that it writes their thoughts.

    Args:
        render: a conversation with this template; raises `ValueError`.
        template: its text.
    """

    def __init__(self, render: Callable[[Sequence[Mapping[str, Any]]], str], template: str) -> None:
        self._render, self._template = render, template

    def placed(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with its thought where the template reads it."""
        split = split_thought(message)
        if not split.thought or message["role"] != "assistant":
            return message
        bare = {key: value for key, value in message.items() if key not in THOUGHT_KEYS}
        if self._key is not None:
            return {**bare, "content": split.answer, self._key: split.thought}
        read = [tags for tags in TAGS if tags[0] in self._template or tags[1] in self._template]
        if split.raw or not read:
            return message
        opening, closing = read[0]
        return {**bare, "content": f"{opening}\n{split.thought}\n{closing}\n\n{split.answer}"}

    @cached_property
    def _key(self) -> str | None:
        """Return the key that the template reads."""
        for key in THOUGHT_KEYS:
            answer = {"role": "assistant", "content": "Bb", key: _PROBE}
            try:
                text = self._render([{"role": "user", "content": "Aa"}, answer])
            except ValueError:
                continue
            if _PROBE in text:
                return key
        return None


def ends_with_thought(prompt: str) -> bool:
    """Return whether the text of a prompt ends with an opened thought."""
    return prompt.rstrip().endswith(THINK_TAGS[0])


def prompted(task: Task, encoder: PromptEncoder | None) -> Task:
    """Return the task as reward functions get it from a run whose prompts this encoder renders."""
    if encoder is None or not ends_with_thought(encoder.render(task)):
        return task
    return replace(task, opens_thought=True)
