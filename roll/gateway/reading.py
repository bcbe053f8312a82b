"""From sampled tokens to the message that a client is given: text, tool calls, thoughts, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roll.data.templates import TemplateError
from roll.envs.tools.parsing import parse_calls, split_thinking
from roll.gateway.base import AnswerReason, ChatCall, Choice
from roll.rollout.plain_text import PlainText
from roll.rollout.tokenizing import Marks
from roll.strategies.base import Completion, SamplingParams
from roll.types.chat import Message, ToolCall

_EFFORT = "reasoning_effort"
_WITH_CHANNELS = ("harmony", "gemma")
"""Forms that say of every response which part of it is thought, also where no tools are told of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseReader:
    """Reads responses: text, tool calls and thoughts.

    Args:
        decode: text of a response's tokens.
        token_text: text of each token on its own, where a client asks for log-probs.
        tool_parser: a name in `TOOL_PARSERS`; empty: calls aren't looked for.
        thinking_tags: what is between them is kept apart from the content; null: nothing is.
        opened: what the chat template itself writes of every response, such as the opening tag of a thought.
        marks: the special tokens of responses, some of which may be marks of calls; None: they are never looked at.
    """

    decode: Callable[[Sequence[int]], str]
    token_text: Callable[[int], str]
    tool_parser: str = ""
    thinking_tags: tuple[str, str] | None = None
    opened: str = ""
    opened_with: Callable[[Mapping[str, Any]], str] | None = None
    """Gives the same with the template variables of a call; None: they don't matter."""
    marks: Marks | None = None
    takes_effort: bool = False
    """Whether the chat template reads `reasoning_effort`."""

    def with_effort(self, call: ChatCall) -> ChatCall:
        """Return a call whose effort is a variable of the chat template, where that reads it and the call has none."""
        variables = call.template_variables
        if call.effort is None or not self.takes_effort or _EFFORT in variables:
            return call
        return replace(call, template_variables={**variables, _EFFORT: call.effort})

    def changes(self, call: ChatCall, params: SamplingParams) -> dict[str, Any]:
        """Return the sampling parameters that a call changes without changing the distribution."""
        changes: dict[str, Any] = {}
        if call.max_tokens is not None:
            changes["max_new_tokens"] = min(call.max_tokens, params.max_new_tokens)
        if call.stop:
            changes["stop_strings"] = tuple(dict.fromkeys((*params.stop_strings, *call.stop)))
        return changes

    def choice(self, call: ChatCall, completion: Completion, *, num_calls: int = 0) -> Choice:
        """Return what a client is told of a response.

        Args:
            num_calls: tool calls so far, from which ids are counted on. Histories may be shortened, or have calls that
                weren't made here: an id is never that of a call in the history either.
        """
        reads_calls = bool(self.tool_parser) and (bool(call.tools) or self.tool_parser in _WITH_CHANNELS)
        text, stop_string = _cut(self._text(completion.token_ids, marked=reads_calls), call.stop)
        opened = self.opened
        if call.template_variables and self.opened_with is not None:
            opened = self.opened_with(call.template_variables)
        if call.continues:  # what the client began stands after a thought, if there is one
            opened = ""
        reasoning, content = split_thinking(opened + text, self.thinking_tags)
        calls: tuple[ToolCall, ...] = ()
        if reads_calls:
            known = {known.id for message in call.messages for known in message.tool_calls}
            first = max(num_calls, len(known))
            parsed = parse_calls(content, self.tool_parser, tools=call.tools, first=first)
            while not known.isdisjoint(new.id for new in parsed.calls):
                first += 1
                parsed = parse_calls(content, self.tool_parser, tools=call.tools, first=first)
            if call.tools or not parsed.calls:
                content, calls, reasoning = parsed.content, parsed.calls, reasoning or parsed.thought
            if not call.parallel_tool_calls:
                calls = calls[:1]
            if self.marks is not None:
                content, reasoning = (self.marks.strip(part, completion.token_ids) for part in (content, reasoning))
        reason: AnswerReason = "length" if completion.finish_reason == "length" else "stop"
        if calls and reason == "stop":
            reason = "tool_calls"
        return Choice(
            message=Message("assistant", content, tool_calls=calls, reasoning=reasoning),
            reason=reason,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            tokens=() if call.top_logprobs is None else tuple(map(self.token_text, completion.token_ids)),
            stop_string=stop_string,
        )

    def _text(self, token_ids: Sequence[int], *, marked: bool) -> str:
        return self.marks.decode(token_ids) if marked and self.marks is not None else self.decode(token_ids)


def reads_effort(chat: PlainText) -> bool:
    """Return whether a chat template has a variable for how long to think."""
    try:
        chat.with_variables({_EFFORT: "medium"})
    except TemplateError:
        return False
    return True


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Return the text before the first of the stop strings, and that one."""
    matches = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not matches:
        return text, ""
    at, stop = min(matches, key=lambda pair: (pair[0], -len(pair[1])))
    return text[:at], stop
