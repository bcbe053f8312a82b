"""What a chat template leaves out of the assistant's messages in a history that a client sends.

The template is tried once with each shape of a message: text or none, and so many calls. Text beside calls that it
leaves out is said in the log (Llama's and gpt-oss' do, and the calls say what was done); calls, or messages without
calls, that it leaves out are refused, and so is an assistant's first message that it writes as the user's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, Protocol

from roll.data.templates import TemplateError
from roll.envs.base import Message
from roll.types.chat import ToolCall, ToolSpec

logger = logging.getLogger(__name__)

_MARK = "<~history~>"
_USER = Message("user", "-")
_MAX_CALLS = 4
"""Calls of a message that are told apart: a template that writes four writes more."""
_TOOL = ToolSpec("probe_of_history", "-", {"type": "object", "properties": {}})

Lost = Literal["", "text", "message", "calls"]


class Render(Protocol):
    """Text of a conversation, whatever it leaves out."""

    def __call__(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, opens: bool = True) -> str: ...


class HistoryChecks:
    """See the module docstring.

    Args:
        render: `ChatTemplate.unchecked`.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._lost: dict[tuple[bool, int, bool], Lost] = {}
        self._misplaces: dict[bool, bool] = {}
        self._warned = False

    def check(self, messages: Sequence[Message], tools: bool, *, since: int = 0) -> None:
        """Raise `TemplateError` for what is left out or misplaced of the messages from `since` on."""
        first = next((i for i, message in enumerate(messages) if message.role != "system"), None)
        if first is not None and messages[first].role == "assistant" and since <= first and self._misplaced(tools):
            raise TemplateError(
                "the chat template writes the assistant's opening message as the user's, where tools are told of; "
                "begin with a user's message"
            )
        for index in range(since, len(messages)):
            message = messages[index]
            if message.role != "assistant" or not (message.content.strip() or message.tool_calls):
                continue
            lost = self._left_out(bool(message.content.strip()), min(len(message.tool_calls), _MAX_CALLS), tools)
            if lost == "text" and not self._warned:
                self._warned = True
                logger.warning(
                    "the chat template leaves out text that an assistant says beside its calls, such as %.80r: the "
                    "policy doesn't see it where such a message isn't carried as it was sampled",
                    message.content,
                )
            elif lost in ("calls", "message"):
                what = "calls" if lost == "calls" else "the text"
                raise TemplateError(
                    f"the chat template leaves out {what} of message {index}, an assistant's with "
                    f"{len(message.tool_calls)} calls; the policy would never see them. Send one call per message, or "
                    "use another chat template"
                )

    def _left_out(self, has_text: bool, num_calls: int, tools: bool) -> Lost:
        shape = (has_text, num_calls, tools)
        if shape not in self._lost:
            self._lost[shape] = self._tried(*shape)
        return self._lost[shape]

    def _tried(self, has_text: bool, num_calls: int, tools: bool) -> Lost:
        calls = tuple(ToolCall(f"call{i:05d}", f"probe_name_{i}", "{}") for i in range(num_calls))
        results = [Message("tool", "-", tool_call_id=call.id) for call in calls]
        message = Message("assistant", _MARK if has_text else "", calls)
        try:
            text = self._render([_USER, message, *results, _USER], (_TOOL,) if tools else ())
        except TemplateError:
            return ""  # the conversation itself is refused then, and by what the template says
        if any(call.name not in text for call in calls):
            return "calls"
        return "" if not has_text or _MARK in text else "text" if calls else "message"

    def _misplaced(self, tools: bool) -> bool:
        """Return whether an assistant's first message stands behind another header than a later one."""
        if tools not in self._misplaces:
            specs = (_TOOL,) if tools else ()
            greeting = Message("assistant", _MARK)
            try:
                begins = self._render([greeting, _USER], specs).partition(_MARK)[0]
                later = self._render([_USER, greeting, _USER], specs).partition(_MARK)[0]
                asked = self._render([_USER], specs, opens=False)
                between = later[len(asked) :] if later.startswith(asked) else ""
            except TemplateError:
                begins = between = ""
            self._misplaces[tools] = bool(between.strip()) and not begins.rstrip().endswith(between.strip())
        return self._misplaces[tools]
