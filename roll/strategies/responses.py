"""One response on its way through an engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from roll.strategies.base import Completion, Request
from roll.strategies.stopping import ResponseRules
from roll.types.episode import FinishReason


class Response:
    """A request, and what has been sampled for it so far."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []

    def completion(self, reason: FinishReason) -> Completion:
        """Return what has been sampled, as a finished response."""
        return Completion(
            id=self.request.id,
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish_reason=reason,
        )

    def record(
        self, tokens: Sequence[int], logprobs: Sequence[float], version: int, rules: ResponseRules
    ) -> FinishReason | None:
        """Keep new tokens up to the one that ends the response, if there is one; why it ends there.

        Raises `FloatingPointError` for a log-prob that is no number.
        """
        if len(tokens) != len(logprobs):
            raise RuntimeError(f"the engine gave {len(tokens)} tokens with {len(logprobs)} log-probs")
        for token, logprob in zip(tokens, logprobs, strict=True):
            if not math.isfinite(logprob):
                raise FloatingPointError(
                    f"the log-probs under weights of version {version} are infinite or not a number; the last updates "
                    "went wrong: lower the learning rate, or resume from an earlier checkpoint"
                )
            self.tokens.append(int(token))
            self.logprobs.append(float(logprob))
            self.versions.append(version)
            reason = rules.finish_reason(self.request, self.tokens)
            if reason is not None:
                return reason
        return None

    def restart(self) -> int:
        """Forget what was sampled; number of tokens lost."""
        lost = len(self.tokens)
        self.tokens, self.logprobs, self.versions = [], [], []
        return lost


class InFlightResponse(Response):
    """With the stream that samples it, on an engine that computes on its own. Once submitted, it is the loop's."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.stream_id: str | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        self.aborted = False
        self.task: asyncio.Task[None] | None = None
