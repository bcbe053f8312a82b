"""What every protocol does: read a body, write an answer, write it as server-sent events, write an error."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

from roll.gateway.base import ChatAnswer, ChatCall, RefusedCall
from roll.gateway.protocols.body_fields import Table, items
from roll.types.chat import ToolSpec

MAX_MESSAGES = 10_000
MAX_TOOLS = 512
MAX_CHOICES = 128
TEMPERED = "in training only the run's own value; `roll serve` takes it"
_MAX_CACHED, _MAX_CACHED_BYTES = 64, 64 << 10
_TOOLS: dict[tuple[type, bytes, frozenset[str]], tuple[ToolSpec, ...]] = {}
"""Tools as they were read, by protocol and a hash of what was sent: `_MAX_CACHED` of `_MAX_CACHED_BYTES` at most."""
_PIECE = 48
"""Characters of a piece of a streamed answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolRequest:
    """A request that was read."""

    call: ChatCall
    stream: bool = False
    include_usage: bool = False
    """Chat Completions: whether the stream ends with the number of tokens."""
    groups: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Responses: functions that a client knows by a namespace and a name, by the name that the policy knows."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """The fields that act, for protocols that repeat some of them in the answer."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time."""


class WireFormat(ABC):
    """One protocol, for one session."""

    fields: ClassVar[Table]
    counts: ClassVar[bool] = False
    """Whether only the tokens of the prompt are counted."""

    @abstractmethod
    def read(self, body: Any, ignored: Collection[str]) -> ProtocolRequest:
        """Return what a body asks for; raises `RefusedCall`. `ignored` are fields that are left out."""

    @abstractmethod
    def answer(self, request: ProtocolRequest, answer: ChatAnswer) -> dict[str, Any]:
        """Return the body of the response."""

    @abstractmethod
    def events(self, request: ProtocolRequest, answer: ChatAnswer) -> Iterator[str]:
        """Yield the finished response as server-sent events."""

    @abstractmethod
    def error(self, refused: RefusedCall) -> dict[str, Any]:
        """Return the body of a refusal."""

    def tools_of(
        self, sent: Any, ignored: Collection[str], read: Callable[[Any, str, Collection[str]], Sequence[ToolSpec]]
    ) -> tuple[ToolSpec, ...]:
        """Return the tools of a body: the very same tuple where they were sent before, as clients do with each request
        and the agents of a run all do. Raises `RefusedCall`, also if two have one name.

        Args:
            read: gives the functions of one tool as it was sent: one, those of a group, or none of one that is ignored.
        """
        text = json.dumps(sent).encode()
        key = (type(self), hashlib.sha256(text).digest(), frozenset(ignored))
        if (known := _TOOLS.get(key)) is not None:
            return known
        listed = enumerate(items(sent, "tools", MAX_TOOLS))
        tools = tuple(chain.from_iterable(read(tool, f"tools[{i}]", ignored) for i, tool in listed))
        if len(tools) > MAX_TOOLS:
            raise RefusedCall(400, f"tools: there are {len(tools)} functions, and {MAX_TOOLS} are taken", "tools")
        names = [tool.name for tool in tools]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise RefusedCall(400, f"tools: a second tool with the name {name!r:.80}", "tools")
        if len(text) <= _MAX_CACHED_BYTES:
            if len(_TOOLS) >= _MAX_CACHED:
                _TOOLS.clear()
            _TOOLS[key] = tools
        return tools

    def stream_error(self, refused: RefusedCall) -> str:
        """Return the event of a failure after the stream has begun."""
        return sse(self.error(refused))


def sse(data: Mapping[str, Any] | str, event: str = "") -> str:
    """Return a server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"event: {event}\ndata: {text}\n\n" if event else f"data: {text}\n\n"


def pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces."""
    for start in range(0, len(text), _PIECE):
        yield text[start : start + _PIECE]
