"""What stands between the protocols of clients and what answers them.

client --HTTP--> protocol (chat, anthropic, responses) --ChatCall--> Session --> message graph, engines
       <--------                                       <-ChatAnswer-
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from roll.types.chat import Message, ToolSpec

AnswerReason = Literal["stop", "length", "tool_calls"]


class RefusedCall(ValueError):
    """A request that isn't served, with what the client is told.

    Args:
        status: of HTTP: 400 for a field that is wrong or would lose its meaning, 401 without a key, 404, 408 for a
            limit of time, 409 when the episode was given up, 413, 429 when its budget is spent, 503 without an engine.
        field: of the request, e.g. `response_format`; empty: none.
        code: OpenAI's short name of the reason, e.g. `context_length_exceeded`; empty: there is none.
        again: whether the same request may succeed later, so that clients try once more.
    """

    def __init__(self, status: int, message: str, field: str = "", *, code: str = "", again: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.field = field
        self.code = code
        self.again = again


class ContextFull(RefusedCall):
    """There is no room for a response. Clients know it by its code or by OpenAI's very words; Anthropic's has others
    (`anthropic.py`).

    Args:
        tokens: of the prompt.
        limit: tokens that a prompt and its response may have.
    """

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            400,
            f"This model's maximum context length is {limit} tokens, and the messages have {tokens}, which leaves no "
            "room for a response. Please reduce the length of the messages (context_length_exceeded).",
            "messages",
            code="context_length_exceeded",
        )
        self.tokens, self.limit = tokens, limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A request for a response, whatever protocol it came by. None: the client left it to us."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    parallel_tool_calls: bool = True
    top_logprobs: int | None = None
    """None: no log-probs are asked for; 0: those of the sampled tokens."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Of the chat template, over the run's (`chat_template_kwargs`)."""
    continues: bool = False
    """Whether the last message, which is the assistant's, is the beginning of the response."""
    effort: str | None = None
    """How long to think; acts where the chat template has a variable for it."""
    body_hash: bytes = b""
    """Of the request, where its client says whether it repeats one; empty: it doesn't say."""
    repeated: bool = False
    """Whether the client repeats a request, since no answer reached it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One response."""

    message: Message
    reason: AnswerReason
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tokens: tuple[str, ...] = ()
    """Text of each token, where log-probs were asked for."""
    stop_string: str = ""
    """The client's stop string that ended it, if one did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """The responses to a call, in the order of their number."""

    choices: tuple[Choice, ...]
    prompt_tokens: int
    """Of the whole context."""
    completion_tokens: int | None = None
    """Where the choices don't show their tokens: how many they have. None: as many as they show."""

    @property
    def sampled(self) -> int:
        """Return tokens of all responses."""
        shown = sum(len(choice.token_ids) for choice in self.choices)
        return shown if self.completion_tokens is None else self.completion_tokens


class Session(Protocol):
    """Who answers the calls that come with one key: an episode under way, or `roll serve`."""

    @property
    def models(self) -> Sequence[str]:
        """Return names that a call may give as its model, the usual one first."""

    async def complete(self, call: ChatCall) -> ChatAnswer:
        """Return the responses. Raises `RefusedCall`. Cancelled when the client disconnects."""

    async def count(self, call: ChatCall) -> int:
        """Return how many tokens the call's messages and tools are. Raises `RefusedCall`."""
