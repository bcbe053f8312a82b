"""Responses that call tools: several turns, until one calls none.

    prompt --generate--> response with calls --parse--> tools --> replies --> the next prompt
                         response without: what it says is the answer

Calls are read off the text of the sampled tokens, which stand in later contexts as they were sampled. What can't be
made (no such tool, broken JSON) is answered too, as an error that the policy reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.tool_config import ToolUseConfig
from roll.data.templates import TemplateError
from roll.envs.base import Message, Observation
from roll.envs.tools.parsing import ParsedResponse, parse_calls, split_thinking
from roll.envs.tools.toolbox import Called, EpisodeTools, Toolbox
from roll.rollout.agent import Agent
from roll.rollout.episode import Episode
from roll.rollout.tool_forms import resolve_parser
from roll.strategies.base import Completion

COUNTED = ("calls", "errors", "unknown", "bad_calls", "bad_arguments", "timeouts", "failed", "refused", "cut_replies")
"""Counters below `tools/` that a run with tools always has."""
_CHARACTERS_PER_TOKEN = 16
"""A reply is cut at so many characters for each of its tokens before it is tokenised."""

Ended = Literal["answer", "length", "turns", "room"]
"""`answer`: it calls no tool. `length`: a response was cut off. `turns`: the last turn calls one still. `room`: the
replies don't fit into the context."""


@dataclass(frozen=True, slots=True)
class Responded:
    """The last of the responses, and what came before it."""

    completion: Completion
    ended: Ended
    messages: tuple[Message, ...]
    """What was said and answered, the last response included."""
    turns: int


def tool_turns(
    config: RLConfig, agent: Agent, tokenizer: Any, toolbox: Toolbox | None, names: Sequence[str]
) -> ToolTurns:
    """Return what plays responses that may call the tools of these entries. Raises `ValueError`, `TemplateError`."""
    parser = resolve_parser(config.tool_use.parser, tokenizer) if names else ""
    return ToolTurns(agent, toolbox, names, config.tool_use, parser)


class ToolTurns:
    """Plays responses until one calls no tool.

    Args:
        names: entries of `tools` that can be called.
        parser: of the calls, as `resolve_parser` gives it.

    Raises:
        TemplateError: the chat template rewrites what stood before the results of tools.
    """

    def __init__(
        self, agent: Agent, toolbox: Toolbox | None, names: Sequence[str], use: ToolUseConfig, parser: str
    ) -> None:
        self._agent, self._toolbox, self._use, self._parser = agent, toolbox, use, parser
        self.names, self.specs = tuple(names), () if toolbox is None else toolbox.specs(names)
        self.max_turns, self.thinking_tags = use.max_turns, agent.thought_tags(use.thinking_tags)
        if self.specs:
            agent.check_carries_calls(use.thinking_tags, self.specs)
        self._opened = agent.forced_think_prefix(self.thinking_tags)

    def open(
        self, episode: Episode, names: Sequence[str], kwargs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> EpisodeTools | None:
        """Return the tools of these entries for one episode; close them. None: there are none.

        `kwargs` is what a row says of each.
        """
        if self._toolbox is None or not names:
            return None
        for name in COUNTED:
            episode.count(f"tools/{name}", 0.0)
        return self._toolbox.open(names, episode.task, kwargs or {})

    async def respond(
        self, episode: Episode, prompt: tuple[int, ...], tools: EpisodeTools | None, *, max_turns: int, **changes: Any
    ) -> Responded:
        """Return the response that calls no tool, or the last one there is time for.

        Args:
            max_turns: responses at most; the calls of the last one aren't made.
            changes: of the first `generate`; `max_new_tokens` and `role` of all.
        """
        messages: list[Message] = []
        for turn in range(1, max_turns + 1):
            completion = await episode.generate(prompt, **changes)
            number = episode.number_of(completion)
            changes = {key: changes[key] for key in ("max_new_tokens", "role") if key in changes} | {"after": number}
            parsed = self._read(episode, completion, tools)
            messages.append(Message("assistant", parsed.content, parsed.calls, reasoning=parsed.thought))
            ended: Ended | None = None
            if completion.finish_reason == "length":
                ended = "length"
            elif not parsed.calls and not parsed.problems:
                ended = "answer"
            elif turn == max_turns:
                ended = "turns"
            if ended is None and tools is not None:
                replies = await self._answered(episode, number, parsed, tools)
                messages += replies
                prompt = self._next_prompt(messages[-len(replies) - 1], replies, completion, tools)
                if len(prompt) >= episode.room:
                    ended = "room"
            if ended is not None:
                return Responded(completion, ended, tuple(messages), turn)
        raise AssertionError("max_turns is at least 1")

    def _read(self, episode: Episode, completion: Completion, tools: EpisodeTools | None) -> ParsedResponse:
        """Take a response apart: thought, calls, and what is said besides. Marks of calls may be special tokens."""
        stops = episode.params.stop_strings
        text = self._agent.decode_marked(completion.token_ids, stops) if tools else episode.text(completion)
        thought, content = split_thinking(self._opened + text, self.thinking_tags)
        if tools is None:
            return ParsedResponse(content, thought=thought)
        parsed = parse_calls(content, self._parser, tools=tools.specs, first=tools.num_calls)
        tools.num_calls += len(parsed.calls)
        return replace(
            parsed,
            content=self._agent.marks.strip(parsed.content, completion.token_ids),
            thought=self._agent.marks.strip(thought or parsed.thought, completion.token_ids),
        )

    async def _answered(
        self, episode: Episode, number: int, parsed: ParsedResponse, tools: EpisodeTools
    ) -> list[Message]:
        """Make the calls of a response, count them and pay for them; what the policy is shown."""
        made, beyond = parsed.calls[: self._use.max_parallel_calls], parsed.calls[self._use.max_parallel_calls :]
        with episode.busy("tools"):
            called = await tools.run(made)
        refusal = f"Error: not made: at most {self._use.max_parallel_calls} calls in one response"
        called += [Called(call, refusal, None, counts={"errors": 1.0, "refused": 1.0}) for call in beyond]
        replies = [
            Message("tool", self._cut(episode, one.text, one.max_tokens), tool_call_id=one.call.id, name=one.call.name)
            for one in called
        ]
        for problem in parsed.problems:
            replies.append(Message("tool", f"Error: {problem.message}"))
        episode.count("tools/calls", len(made))
        for one in called:
            for name, value in one.counts.items():
                episode.count(f"tools/{name}", value)
        episode.count("tools/bad_calls", len(parsed.problems))
        episode.count("tools/errors", len(parsed.problems))
        episode.answered(number, "\n".join(reply.content for reply in replies))
        episode.pay(number, sum(one.reward for one in called), {})
        return replies

    def _next_prompt(
        self, response: Message, replies: Sequence[Message], completion: Completion, tools: EpisodeTools
    ) -> tuple[int, ...]:
        try:
            return self._agent.reply(Observation(tuple(replies)), completion.token_ids)
        except TemplateError:  # it takes results only after calls, each with its own
            answered = [reply for reply in replies if reply.tool_call_id]
            if not response.tool_calls or len(answered) < len(replies):
                # A call that couldn't be read has no result in such a template: it is the user who says so.
                replies = [*answered, Message("user", "\n".join(r.content for r in replies if not r.tool_call_id))]
            return self._agent.reply_to_calls(response, replies, completion.token_ids, tools.specs)

    def _cut(self, episode: Episode, text: str, limit: int | None) -> str:
        """Return a reply of at most `limit` tokens, with a note where something is left out."""
        if limit is None or len(text) * 4 <= limit:  # no character has more than four tokens
            return text
        total, room = len(text), limit * _CHARACTERS_PER_TOKEN
        where = self._use.cut_replies
        head, tail = (text, text) if total <= 2 * room else (text[:room], text[-room:])
        if total <= 2 * room:
            ids = self._agent.encode(text)
            if len(ids) <= limit:
                return text
            first, last = ids, ids
        else:
            first, last = self._agent.encode(head), self._agent.encode(tail)
        share = {"left": 0, "middle": (limit + 1) // 2, "right": limit}[where]
        begin = self._agent.decode_response(first[:share], ())
        end = self._agent.decode_response(last[len(last) - (limit - share) :], ())
        begin, end = begin.rstrip("\ufffd"), end.lstrip("\ufffd")
        episode.count("tools/cut_replies")
        return f"{begin}\n[... {max(0, total - len(begin) - len(end))} characters left out ...]\n{end}".strip("\n")
