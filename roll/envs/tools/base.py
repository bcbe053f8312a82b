"""What a tool is.

A tool is an object that serves all episodes of a run; what belongs to one episode is its *state*, made at the first
call and closed at the episode's end. Its code is the user's and trusted; what the policy writes into a call is not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.types.chat import ToolSpec
from roll.types.trajectory import Task


class ToolError(Exception):
    """A call can't be answered for a reason that the policy is told: a file that isn't there, a wrong value."""


class ToolFailure(RuntimeError):
    """A tool itself failed (its service is gone): says nothing about the policy; the episode ends as `env_error`."""


@dataclass(frozen=True, slots=True)
class ToolReply:
    """What a tool answers."""

    text: str
    reward: float = 0.0
    """Added to the episode's reward."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers for logging, summed over the calls of an episode."""
    is_error: bool = False
    """The text says why the call failed; it is counted as such."""


Answer = ToolReply | str
"""A text alone is a reply."""


class Tool(ABC):
    """A tool of the user's own, made once a run as `cls(**options)`.

    `call` may be a coroutine; one that isn't runs in a thread, side by side with others (`concurrency`), so it must be
    safe to call at once from several.
    """

    description: str = ""
    """What the policy is told that it does."""
    parameters: Mapping[str, Any] = {"type": "object", "properties": {}}
    """JSON schema of its arguments; they are checked before `call`."""

    def create(self, task: Task, kwargs: Mapping[str, Any]) -> Any:  # noqa: ARG002
        """Return the state of an episode. Default: there is none.

        Args:
            task: what is played, with the columns of its row in `task.payload`.
            kwargs: what the row's `tools_kwargs` says of this tool.
        """
        return None

    @abstractmethod
    def call(self, arguments: Mapping[str, Any], state: Any) -> Answer | Awaitable[Answer]:
        """Return what a call gives. Raises `ToolError` with a sentence for the policy."""

    def close(self, state: Any) -> None:
        """Release the state of an episode. Default: there is nothing to release."""

    def shutdown(self) -> None:
        """Release what the run holds. Default: nothing."""

    @property
    def keeps_state(self) -> bool:
        """Return whether calls of one episode change what later ones meet: they are then made one after the other."""
        return type(self).create is not Tool.create

    def spec(self, name: str) -> ToolSpec:
        """Return what the policy is told."""
        return ToolSpec(name, self.description, self.parameters)
