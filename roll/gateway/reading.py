"""From sampled tokens to the message that a client is given: text, tool calls, thoughts, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.gateway.base import AnswerReason, ChatCall, Choice
from roll.strategies.base import Completion, SamplingParams
from roll.tools.parsing import parse_calls, split_thinking
from roll.types.chat import Message, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How responses are read.

    Args:
        decode: text of a response's tokens.
        token_text: text of each token on its own, where a client asks for log-probs.
        tool_parser: a name in `TOOL_PARSERS`; empty: calls aren't looked for.
        thinking_tags: what is between them is kept apart from the content; null: nothing is.
        opened: what the chat template itself writes of every response, such as the opening tag of a thought.
    """

    decode: Callable[[Sequence[int]], str]
    token_text: Callable[[int], str]
    tool_parser: str = ""
    thinking_tags: tuple[str, str] | None = None
    opened: str = ""
    opened_with: Callable[[Mapping[str, Any]], str] | None = None
    """Gives the same with the template variables of a call; None: they don't matter."""

    def changes(self, call: ChatCall, params: SamplingParams) -> dict[str, Any]:
        """Return the sampling parameters that a call changes without changing the distribution."""
        changes: dict[str, Any] = {}
        if call.max_tokens is not None:
            changes["max_new_tokens"] = min(call.max_tokens, params.max_new_tokens)
        if call.stop:
            changes["stop_strings"] = tuple(dict.fromkeys((*params.stop_strings, *call.stop)))
        return changes

    def choice(self, call: ChatCall, completion: Completion) -> Choice:
        """Return what a client is told of a response."""
        text, stop_string = _cut(self.decode(completion.token_ids), call.stop)
        opened = self.opened
        if call.template_variables and self.opened_with is not None:
            opened = self.opened_with(call.template_variables)
        reasoning, content = split_thinking(opened + text, self.thinking_tags)
        calls: tuple[ToolCall, ...] = ()
        if call.tools and self.tool_parser:
            had = sum(len(message.tool_calls) for message in call.messages)
            found = parse_calls(content, self.tool_parser, tools=call.tools, first=had)
            content, calls = found.content, found.calls
            if not call.parallel_tool_calls:
                calls = calls[:1]
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


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Return the text before the first of the stop strings, and that one."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return text, ""
    at, stop = min(found, key=lambda pair: (pair[0], -len(pair[1])))
    return text[:at], stop
