"""From the messages that a client sends, whole each time, to the turns that they continue.

    client: [system, user]                                      a root: the whole prompt
    client: [system, user, response 0, user]                    continues node 0 with what follows its response
    client: [system, user, response 0, user]                    again, a retry: a sibling of node 1
    client: [system, user, response 0 as edited, user]          branches off before node 0

A node is a response as it was sampled. It stays as it was sampled in all contexts that continue it, or isn't in them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Literal, get_args

from roll.data.templates import TemplateError
from roll.envs.base import Message
from roll.envs.wrappers import without_thoughts
from roll.rollout.plain_text import PlainText
from roll.rollout.tool_text import parsed_arguments
from roll.types.chat import THINK_TAGS, ToolSpec

History = Literal["carried", "rendered"]
"""How later prompts show a response that the client sends back as it was. `carried`: as it was sampled, whatever the
template would write. `rendered`: as the template writes it; where that isn't as it was sampled, a branch begins."""

Mismatch = Literal["template", "retokenised", "edited", "dropped_thinking", "dropped_response"]
"""How what the client sends back differs from what was sampled.

template: sent back as it was, but the template writes it otherwise.
retokenised: the text is the same, but its tokens would be others. The sampled ones are carried.
dropped_thinking: what the response thought was left out. Where it stood apart from the content it is carried still.
edited: it was changed otherwise, or what stood before it was.
dropped_response: it isn't there at all, though the conversation that it answered goes on.
"""
MISMATCHES: tuple[Mismatch, ...] = get_args(Mismatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a request for a response stands in the graph."""

    parent: int | None
    """Node that it continues; None: it begins a context."""
    prompt_ids: tuple[int, ...]
    """Tokens to add to the parent's."""
    context_ids: tuple[int, ...]
    """All tokens of the prompt: those up to the end of the parent, then `prompt_ids`."""
    change: Mismatch | None
    """How what the client sent differs; None: not at all, or as `retokenised` says."""
    retokenised: Callable[[], bool]
    """Says whether the text of the parent's response has other tokens than were sampled."""
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    text: str
    """Of `context_ids`."""
    key: bytes
    """Of the conversation that the response will end."""
    begun: Message | None = None
    """What the client has the response begin with; part of the prompt."""

    @property
    def mismatches(self) -> Mapping[Mismatch, int]:
        """Return mismatches of this request by class, mostly none. Takes a while: a response is tokenised for it."""
        kind = self.change or ("retokenised" if self.retokenised() else None)
        return {} if kind is None else {kind: 1}


@dataclass(slots=True)
class _Node:
    parent: int | None
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    num_messages: int  # Messages of the request
    message: Message  # The response, as the client was told
    text: str  # What it adds to its parent's, the response as it was sampled included
    response_text: str  # The response as it was sampled
    retokenised: bool | None = None  # The text of the response has other tokens; None: nobody asked yet
    children: list[int] = field(default_factory=list)


class MessageGraph:
    """The responses of one agent, or of several that share a conversation.

    Args:
        chat: how messages become tokens.
        thinking_tags: around what a response thinks, where that is part of its content.
    """

    def __init__(
        self, chat: PlainText, history: History = "carried", *, thinking_tags: tuple[str, str] = THINK_TAGS
    ) -> None:
        if history not in get_args(History):
            raise ValueError(f"history {history!r} is none of {', '.join(get_args(History))}")
        self._chat = chat
        self._history: History = history
        self._tags = thinking_tags
        self._nodes: dict[int, _Node] = {}
        self._roots: list[int] = []
        self._ends: dict[bytes, int] = {}  # By conversation with the response: the node that came last
        self._by_prompt: dict[bytes, list[int]] = {}  # By conversation before the response
        self._responses: set[bytes] = set()  # Responses by themselves
        self._tools: tuple[tuple[ToolSpec, ...] | None, bytes] = (None, b"")  # The last ones, and their key

    def __len__(self) -> int:
        return len(self._nodes)

    def tokens(self, node: int | None) -> tuple[int, ...]:
        """Return all tokens up to the end of a node's response; nothing for None."""
        return tuple(
            chain.from_iterable(part for each in self._walk(node) for part in (each.prompt_ids, each.response_ids))
        )

    def _text(self, node: int | None) -> str:
        """Return all text up to the end of a node's response; nothing for None."""
        return "".join(each.text for each in self._walk(node))

    def _walk(self, node: int | None) -> list[_Node]:
        walk = []
        while node is not None:
            walk.append(self._nodes[node])
            node = walk[-1].parent
        return walk[::-1]

    def place(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, continues: bool = False
    ) -> Placement:
        """Return where a request stands. Nothing changes: a response may never come.

        Args:
            continues: whether the last message is what the response is to begin with.

        Raises:
            TemplateError: the template doesn't take such a conversation, or leaves out what an assistant said in it.
        """
        messages, tools = tuple(messages), tuple(tools)
        begun = messages[-1] if continues else None
        sent = messages[:-1] if continues else messages
        keys = list(_keys(self._tools_key(tools), sent))
        known, shown = self._known(keys)
        sent = self._as_sampled(sent, keys)
        self._chat.check_history(sent, tools, since=shown if self._history == "carried" else 0)
        messages = sent if begun is None else (*sent, begun)
        rendered = self._chat.text(messages, tools) if begun is None else self._chat.begun_text(messages, tools)
        parent, added = known, None
        before, before_text = self._nodes.get(-1 if known is None else known), self._text(known)
        if before is not None and self._history == "carried":
            if rendered.startswith(before_text):  # All is written as it was: one rendering says what follows
                added = self._chat.closing_text(before.response_ids) + rendered[len(before_text) :]
            elif begun is None:
                added = self._continuation(before, messages, tools)
        if before is not None and added is not None:
            added, prompt = self._chat.follow(added, before.response_ids)
            text = before_text + added
        else:
            is_root = known is None and self._history == "carried"
            parent, text = None if is_root else self._prefix(rendered), rendered
            if parent is None:
                prompt = self._chat.encode_prompt(rendered)
            else:
                prompt = self._chat.encode_after(rendered[len(self._text(parent)) :])
        change = self._change(sent, keys, known, shown)
        if change is None and before is not None and not (text == rendered and rendered.startswith(before_text)):
            change = "template"
        return Placement(
            parent=parent,
            prompt_ids=prompt,
            context_ids=(*self.tokens(parent), *prompt),
            change=change,
            retokenised=partial(self._retokenised, parent),
            messages=sent,
            tools=tools,
            text=text,
            key=keys[-1],
            begun=begun,
        )

    def grow(
        self, placement: Placement, token_ids: Sequence[int], message: Message, *, number: int | None = None
    ) -> int:
        """Add a response, and return its node.

        Args:
            token_ids: as they were sampled.
            message: as the client is told: without special tokens, tool calls and thinking set apart.
            number: of its turn in the episode (`Episode.number_of`), to name the node by; None: the next free one.
        """
        node = len(self._nodes) if number is None else number
        if node in self._nodes:
            raise ValueError(f"there is a node {node} already")
        ids = tuple(token_ids)
        sampled = self._chat.sampled_text(ids)
        if placement.begun is not None:  # clients send back one message, with both in it
            begun = placement.begun
            message = replace(
                message, content=begun.content + message.content, reasoning=begun.reasoning + message.reasoning
            )
        self._nodes[node] = _Node(
            parent=placement.parent,
            prompt_ids=placement.prompt_ids,
            response_ids=ids,
            num_messages=len(placement.messages),
            message=message,
            text=placement.text[len(self._text(placement.parent)) :] + sampled,
            response_text=sampled,
        )
        siblings = self._roots if placement.parent is None else self._nodes[placement.parent].children
        siblings.append(node)
        self._by_prompt.setdefault(placement.key, []).append(node)
        self._ends[_key(placement.key, message)] = node
        self._responses.add(_key(b"", message))
        return node

    def _tools_key(self, tools: tuple[ToolSpec, ...]) -> bytes:
        """Return the key of a conversation without messages; most requests bring the very tools of the one before."""
        if tools is not self._tools[0]:
            canonical = _canonical([tool.for_template() for tool in tools])
            self._tools = (tools, hashlib.blake2b(canonical).digest())
        return self._tools[1]

    def _retokenised(self, node: int | None) -> bool:
        if node is None:
            return False
        turn = self._nodes[node]
        if turn.retokenised is None:
            turn.retokenised = self._chat.encode_after(turn.response_text) != turn.response_ids
        return turn.retokenised

    def _known(self, keys: Sequence[bytes]) -> tuple[int | None, int]:
        """Return the node whose conversation, response included, is the longest that the messages begin with, and how
        many messages that is."""
        for count in range(len(keys) - 2, 0, -1):  # something has to follow the response
            if (node := self._ends.get(keys[count])) is not None:
                return node, count
        return None, 0

    def _as_sampled(self, messages: Sequence[Message], keys: Sequence[bytes]) -> tuple[Message, ...]:
        """Return the messages with responses that came back as they were as the client was told them: it may have
        taken off blanks, or written arguments anew."""
        messages_of_policy = []
        for index, message in enumerate(messages):
            node = self._ends.get(keys[index + 1]) if message.role == "assistant" else None
            if node is not None:
                sampled = self._nodes[node].message
                message = (
                    sampled if sampled.reasoning == message.reasoning else replace(sampled, reasoning=message.reasoning)
                )
            messages_of_policy.append(message)
        return tuple(messages_of_policy)

    def _continuation(self, node: _Node, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]) -> str | None:
        """Return what follows a node's response; None where the template doesn't say."""
        count = node.num_messages
        try:
            return self._chat.continuation(messages[:count], messages[count], messages[count + 1 :], tools)
        except TemplateError:
            return None

    def _prefix(self, text: str) -> int | None:
        """Return the deepest node whose text this one begins with."""
        deepest, level, at = None, self._roots, 0
        while True:
            fits = [node for node in level if at + len(self._nodes[node].text) < len(text)]
            fits = [node for node in fits if text.startswith(self._nodes[node].text, at)]
            if not fits:
                return deepest
            deepest = max(fits, key=lambda node: (len(self._nodes[node].text), node))
            level, at = self._nodes[deepest].children, at + len(self._nodes[deepest].text)

    def _change(
        self, messages: Sequence[Message], keys: Sequence[bytes], known: int | None, shown: int
    ) -> Mismatch | None:
        """Return what the client did to a response that it sends back otherwise than it was; None: to none."""
        if known is not None and self._nodes[known].message.reasoning and not messages[shown - 1].reasoning:
            return "dropped_thinking"
        for index in range(shown, len(messages)):
            if messages[index].role != "assistant":
                if keys[index] in self._by_prompt:
                    return "dropped_response"
                continue
            sampled = [self._nodes[node].message for node in self._by_prompt.get(keys[index], ())]
            sent = _key(b"", messages[index])
            if any(_key(b"", self._without_thoughts(message)) == sent for message in sampled):
                return "dropped_thinking"  # one that thought nothing would have been found as it is
            if sampled or sent in self._responses:
                return "edited"
        return None

    def _without_thoughts(self, message: Message) -> Message:
        return replace(message, content=without_thoughts(message.content, self._tags))


def _content(message: Message) -> str:
    """Return content without the blanks around it, which clients and templates may take off."""
    return message.content.strip() if message.role == "assistant" else message.content


def _keys(first: bytes, messages: Sequence[Message]) -> Iterator[bytes]:
    """Yield a key for the first 0, 1, ... messages: equal conversations have equal ones."""
    key = first
    yield key
    for message in messages:
        key = _key(key, message)
        yield key


def _key(before: bytes, message: Message) -> bytes:
    """Return the content, and calls by name and arguments: ids and what was thought may differ."""
    named = repr((message.role, _content(message))).encode()
    if message.tool_calls:
        named += _canonical([[call.name, parsed_arguments(call)] for call in message.tool_calls])
    return hashlib.blake2b(before + named).digest()


def _canonical(value: object) -> bytes:
    return _ENCODER.encode(value).encode()


_ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=True, default=str)
"""One for all: `json.dumps` makes one for every call, and a long conversation has many messages."""
