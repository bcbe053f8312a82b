"""What an episode may spend on an agent's calls, and when an agent goes on asking though there is nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from roll.gateway.base import ChatAnswer, ChatCall, ContextFull, RefusedCall

_SAME_MOMENT_S = 0.5
"""Between refusals that count as one: calls that were sent together are refused together."""
_REMEMBERED = 32


class Budget:
    """Calls and tokens of one episode.

    Args:
        max_calls: answered calls; None: no limit.
        max_tokens: sampled tokens; None: no limit.
    """

    def __init__(self, max_calls: int | None, max_tokens: int | None) -> None:
        self._max_calls, self._max_tokens = max_calls, max_tokens
        self.calls = 0
        """Answered, or under way."""
        self.sampled_tokens = 0
        self._reserved = 0  # Tokens that calls under way may sample
        self.spent = ""
        """Why a call was refused; empty: none was."""

    def left(self, n: int, most: int) -> int:
        """Return how many tokens each of `n` responses may have, at most `most`. Raises `RefusedCall` when the budget
        is spent, what calls under way may still sample included."""
        tokens = self._max_tokens
        left = None if tokens is None else (tokens - self.sampled_tokens - self._reserved) // n
        if self._max_calls is not None and self.calls >= self._max_calls:
            self.spent = f"the episode's {self._max_calls} calls are spent (max_calls)"
        elif left is None:
            return most
        elif left >= 1:
            return min(most, left)
        elif self._reserved:
            raise RefusedCall(429, f"calls under way may need what is left of {tokens} tokens (max_tokens)", again=True)
        else:
            self.spent = f"the episode's {tokens} tokens are spent (max_tokens)"
        raise RefusedCall(429, self.spent, code="insufficient_quota")

    @contextlib.contextmanager
    def call(self, tokens: int) -> Iterator[list[int]]:
        """Count a call that may sample so many tokens, unless it ends without a response: yields the list that the
        number of each response's tokens has to be added to."""
        sampled: list[int] = []
        self.calls += 1
        self._reserved += tokens
        try:
            yield sampled
        finally:
            self._reserved -= tokens
            self.calls -= not sampled  # it was cancelled, or the episode was given up
            self.sampled_tokens += sum(sampled)


class Insistence:
    """Whether an agent asks on though it was refused for good: for its budget, or again for a context that it hasn't
    made shorter."""

    def __init__(self) -> None:
        self.is_set = asyncio.Event()
        self._budget_at: float | None = None
        self._full_at: float | None = None
        self._full_tokens = 0

    def refused(self, refusal: RefusedCall) -> None:
        """Note a call that was refused."""
        now = time.monotonic()
        if isinstance(refusal, ContextFull):
            if self._full_at is None or refusal.tokens < self._full_tokens:
                self._full_at, self._full_tokens = now, refusal.tokens
            elif now - self._full_at >= _SAME_MOMENT_S:
                self.is_set.set()
        elif self._budget_at is None:
            self._budget_at = now
        elif now - self._budget_at >= _SAME_MOMENT_S:
            self.is_set.set()

    def made_room(self) -> None:
        """Note that the agent goes on with a shorter context."""
        self._full_at = None
        if self._budget_at is None:
            self.is_set.clear()

    async def lasts(self, seconds: float) -> None:
        """Wait until the agent has insisted, and hasn't gone on for so long since."""
        while True:
            await self.is_set.wait()
            await asyncio.sleep(seconds)
            if self.is_set.is_set():
                return


@dataclass(slots=True)
class _SentRequest:
    times: int = 0  # Without repetitions
    answers: list[ChatAnswer] = field(default_factory=list)


class LastAnswers:
    """The last answers of an episode, for clients that repeat a request because its answer was lost on its way."""

    def __init__(self) -> None:
        self._requests: OrderedDict[bytes, _SentRequest] = OrderedDict()  # By the hash of a request

    def lost(self, call: ChatCall) -> ChatAnswer | None:
        """Return the answer to a request that is repeated; None: it has to be answered anew.

        Where a client asks the same several times on purpose, and not all of them were answered, it is one of those
        that weren't.
        """
        if not call.body_hash:
            return None
        request = self._requests.setdefault(call.body_hash, _SentRequest())
        if len(self._requests) > _REMEMBERED:
            self._requests.popitem(last=False)
        request.times += not call.repeated
        return request.answers[-1] if call.repeated and len(request.answers) >= max(request.times, 1) else None

    def add(self, call: ChatCall, answer: ChatAnswer) -> None:
        """Note an answer."""
        if call.body_hash in self._requests:
            self._requests[call.body_hash].answers.append(answer)
