"""Which keys of messages a chat template writes: found by trying, since only the template knows.

A message is rendered as the last one of its conversation, with a key and without: equal texts mean that the template
leaves out what the key says. (What it leaves out of *earlier* messages, as thoughts, a model doesn't see at inference
either.) A verdict holds for all messages of the same shape, so long data costs a few renderings, not one a row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

Render: TypeAlias = Callable[[Sequence[Mapping[str, Any]]], str]

SAYING_KEYS = (
    "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "thought", "thoughts", "think", "name",
    "tool_plan", "tool_responses", "tools", "documents", "channel", "recipient", "refusal", "prefix", "citations",
)  # fmt: skip
"""Keys that say something: a row that has one is refused where the template leaves it out. Others (ids, dates, scores)
are handed to the template too; what it leaves out of those is named by `roll data check`."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought", "thoughts", "think")
_VERDICTS = 4096


class RenderedKeys:
    """What one template writes, by trying; remembers it."""

    def __init__(self) -> None:
        """Start without having tried anything."""
        self._verdicts: dict[Hashable, bool] = {}

    def lost(self, messages: Sequence[Mapping[str, Any]], render: Render, text: str) -> tuple[int, str] | None:
        """Return the first message, and the key of it, that says something and isn't written; None if all are.

        `text` is the whole conversation, rendered. A name is written too where the text has it elsewhere: that of a
        tool in the call that it answers; one that is the role's says nothing. Of several keys with the same thought one
        is enough.
        """
        for position, message in enumerate(messages):
            filled = [key for key in message if key in SAYING_KEYS and message[key] not in ("", (), {}, False)]
            for key in filled:
                if self.writes(messages, position, key, render):
                    continue
                if key == "name" and message[key] == message["role"]:
                    continue
                if key == "name" and message["role"] in ("tool", "function") and str(message[key]) in text:
                    continue
                twins = [k for k in filled if k != key and k in _THOUGHTS and message[k] == message[key]]
                if key in _THOUGHTS and any(self.writes(messages, position, twin, render) for twin in twins):
                    continue
                return position, key
        return None

    def loses_tools(self, messages: Sequence[Mapping[str, Any]], render: Render, text: str) -> bool:
        """Return whether a template leaves tools out: `text` is with them, `render` without."""
        shape = ("tools", tuple(sorted({message["role"] for message in messages})))
        if shape not in self._verdicts:
            self._verdicts[shape] = text != render(messages)
        return not self._verdicts[shape]

    def unused(self, messages: Sequence[Mapping[str, Any]], render: Render) -> set[str]:
        """Return the keys that say nothing and that the template leaves out."""
        return {
            key
            for position, message in enumerate(messages)
            for key in message
            if key not in ("role", "content", *SAYING_KEYS) and not self.writes(messages, position, key, render)
        }

    def writes(self, messages: Sequence[Mapping[str, Any]], position: int, key: str, render: Render) -> bool:
        """Return whether the template writes a key of a message."""
        message = messages[position]
        shape = (key, message["role"], not message["content"].strip(), _shape(message[key]), position > 0)
        if shape not in self._verdicts:
            if len(self._verdicts) >= _VERDICTS:
                self._verdicts.clear()
            self._verdicts[shape] = _differs(messages, position, key, render)
        return self._verdicts[shape]


def unwritten(
    keys: RenderedKeys,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    text: str,
    render: Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str],
) -> str | None:
    """Return what of messages and tools isn't in their rendered text, in words; None if nothing is lost.

    `render`: of messages and tools.
    """
    if tools:
        names = [str(tool["function"]["name"]) for tool in tools]
        lost = next((name for name in names if name not in text), None)
        if lost is not None or keys.loses_tools(messages, lambda some: render(some, ()), text):
            return f"the chat template leaves out the row's tools ({lost or ', '.join(names):.60}); {_NOT_LEARNT}"
    lost_key = keys.lost(messages, lambda some: render(some, tools), text)
    if lost_key is None:
        return None
    position, key = lost_key
    message = messages[position]
    return (
        f"the chat template leaves out {key!r} of message {position + 1} (role {message['role']}): "
        f"{message[key]!r:.80}; {_NOT_LEARNT}"
    )


def beside_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what a template that is mere text has no place for, in words; None if there is nothing of the kind."""
    keys = [key for message in messages for key in message if key in SAYING_KEYS]
    what = "tools" if tools else next(iter(keys), None)
    return f"a template with {{prompt}} has no place for {what!r}; use native or a Jinja template" if what else None


_NOT_LEARNT = (
    "a model would never see it. Write it in content as the model shall write it, remove it, or choose a template "
    "that has it"
)


def _differs(messages: Sequence[Mapping[str, Any]], position: int, key: str, render: Render) -> bool:
    bare = {name: value for name, value in messages[position].items() if name != key}
    for end in (position + 1, len(messages)):  # some templates refuse to end there
        full = messages[:end]
        try:
            text = render(full)
        except ValueError:
            continue
        try:
            return text != render([*full[:position], bare, *full[position + 1 :]])
        except ValueError:
            return True  # the template asks for it
    return True  # whoever renders the conversation meets the error


def _shape(value: Any) -> Hashable:
    """Return keys and types of a value, the arguments of calls as one: their names differ from call to call."""
    if isinstance(value, Mapping):
        return tuple((k, "any" if k == "arguments" else _shape(v)) for k, v in sorted(value.items(), key=str))
    if isinstance(value, list | tuple):
        return (type(value).__name__, *sorted({_shape(item) for item in value}, key=str))
    return type(value).__name__
