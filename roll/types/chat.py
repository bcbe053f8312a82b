"""Messages of a conversation, tool calls included: what environments show, tools answer and agents send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from roll.types.picture import Picture

Role = Literal["system", "user", "assistant", "tool"]

THINK_TAGS = ("<think>", "</think>")
"""Around a thought, unless a configuration names other tags."""
PICTURES = "pictures"
"""Key of a row's message with the pictures that it shows."""


def pictures_of(messages: Iterable[Mapping[str, Any]]) -> tuple[Picture, ...]:
    """Return the pictures that messages of a row show, in the order of their places."""
    return tuple(picture for message in messages for picture in message.get(PICTURES, ()))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool that a response asks for."""

    id: str
    """Names the call in the conversation; the reply carries it."""
    name: str
    arguments: str
    """JSON text of an object, as it was said; it may be wrong."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """Of the assistant."""
    tool_call_id: str = ""
    """Role `tool`: the call that this answers."""
    name: str = ""
    """Role `tool`: the tool that answers. Other roles: who speaks, where several do."""
    reasoning: str = ""
    """What the assistant thought, where that is kept apart from `content`."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """What a policy is told about a tool."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of an object."""

    def for_template(self) -> dict[str, Any]:
        """Return it as chat templates expect tools: OpenAI's form."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}
