"""Responses on their way through an engine: what is checked on a request, what was sampled, and when it is over.

One place, so that engines can't differ.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

import numpy as np

from roll.strategies.base import Completion, Request, SamplingParams
from roll.types.trajectory import FinishReason

_NEIGHBOURS = 8  # tokens before a stop string that are decoded with it: a tokenizer may join them into other characters


@dataclass(frozen=True)
class ResponseRules:
    """What an engine's model and tokenizer say about requests and the end of responses."""

    eos_token_ids: frozenset[int]
    """Tokens that end a response (kept as its last token)."""
    max_context: int
    """Prompt plus response tokens the model can hold."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Token ids -> text; needed only for stop strings."""
    vocab_size: int | None = None
    """Tokens that the model has embeddings of. None: requests aren't held against it."""
    reads_pictures: bool = False
    """Whether the engine gives its model what prompts show."""

    def check(self, request: Request, known: Container[str]) -> None:
        """Raise `ValueError` for a request that no engine can run; `known`: ids that are on their way."""
        if not request.prompt_ids:
            raise ValueError(f"request {request.id!r} has an empty prompt; the model needs at least one token")
        if len(request.prompt_ids) >= self.max_context:
            raise ValueError(
                f"request {request.id!r} has {len(request.prompt_ids)} prompt tokens; the model holds "
                f"{self.max_context} with the response"
            )
        if request.pictures and not self.reads_pictures:
            raise ValueError(
                f"request {request.id!r} shows pictures, and this engine gives its model none: it'd be blind"
            )
        if request.id in known:
            raise ValueError(f"request id {request.id!r} is already running; ids must be unique")
        if request.params.max_new_tokens < 1:
            got = request.params.max_new_tokens
            raise ValueError(f"request {request.id!r}: max_new_tokens must be >= 1, got {got}")
        if request.params.stop_strings and self.decode is None:
            raise ValueError(f"request {request.id!r} has stop strings, which need a tokenizer: pass `decode`")
        _check_numbers(request.id, request.params)
        if self.vocab_size is not None:
            self._check_prompt(request, self.vocab_size)

    def _check_prompt(self, request: Request, vocab_size: int) -> None:
        low, high = min(request.prompt_ids), max(request.prompt_ids)
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(
                f"request {request.id!r} has token {wrong} in its prompt; the model has embeddings of tokens 0 to "
                f"{vocab_size - 1}"
            )

    def stop_token_ids(self, request: Request) -> tuple[int, ...]:
        """Return every token that ends this request's response, and that the model can sample: engines refuse others.

        Tokenizers may have tokens that the model has no embeddings of.
        """
        ends = sorted(self._ends(request))
        return tuple(token for token in ends if self.vocab_size is None or 0 <= token < self.vocab_size)

    def top_k(self, request: Request) -> int:
        """Return the request's top-k; -1 where that cuts nothing: engines refuse more tokens than there are."""
        top_k = request.params.top_k
        return -1 if top_k < 1 or (self.vocab_size is not None and top_k >= self.vocab_size) else top_k

    def stream_params(self, request: Request, num_sampled: int) -> SamplingParams:
        """Return the parameters of a stream that goes on after `num_sampled` tokens; see `EngineBackend.stream`."""
        return replace(
            request.params,
            max_new_tokens=self.tokens_left(request, num_sampled),
            stop_token_ids=self.stop_token_ids(request),
            top_k=self.top_k(request),
            stop_strings=(),
            ignore_eos=True,
        )

    def tokens_left(self, request: Request, num_sampled: int) -> int:
        """Return how many more tokens the response may get."""
        room = self.max_context - len(request.prompt_ids)
        return min(request.params.max_new_tokens, room) - num_sampled

    def finish_reason(self, request: Request, tokens: Sequence[int]) -> FinishReason | None:
        """Return why the response is over after the last of `tokens`; None: it isn't."""
        params, token = request.params, tokens[-1]
        if (token in self.eos_token_ids and not params.ignore_eos) or token in params.stop_token_ids:
            return "stop"
        if params.stop_strings and self._ends_with_stop(request, tokens):
            return "stop"
        return "length" if self.tokens_left(request, len(tokens)) <= 0 else None

    def taken(self, request: Request, num_sampled: int, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Return how many of the next `tokens` the response takes, and why it ends there (None: it goes on); for one
        without stop strings, after `num_sampled` tokens."""
        ends, room = self._ends(request), self.tokens_left(request, num_sampled)
        # A set goes through tokens faster than a loop, and where one is an end, it is mostly the last.
        last = len(tokens) - (len(tokens) > 0 and tokens[-1] in ends)
        if not ends.isdisjoint(tokens[:-1]):
            last = next(i for i, token in enumerate(tokens) if token in ends)
        if last < min(len(tokens), room):
            return last + 1, "stop"
        return min(len(tokens), room), "length" if len(tokens) >= room else None

    def _ends(self, request: Request) -> frozenset[int]:
        stops = request.params.stop_token_ids
        eos = frozenset() if request.params.ignore_eos else self.eos_token_ids
        return eos.union(stops) if stops else eos

    def _ends_with_stop(self, request: Request, tokens: Sequence[int]) -> bool:
        assert self.decode is not None
        stops = request.params.stop_strings
        # A token holds at least one byte, so this many tokens always cover the longest stop string and its neighbours.
        window = max(len(stop.encode()) for stop in stops) + _NEIGHBOURS
        text = self.decode(list(tokens[-window:]))
        return any(stop in text for stop in stops)


def _check_numbers(name: str, params: SamplingParams) -> None:
    """Raise `ValueError` for numbers by which no engine can draw."""
    for field, right, expected in (
        ("temperature", 0 <= params.temperature < math.inf, "0 or a finite number above"),
        ("top_p", 0 < params.top_p <= 1, "above 0, at most 1"),
        ("top_k", params.top_k >= -1, "-1 (off) or more"),
        ("repetition_penalty", 0 < params.repetition_penalty < math.inf, "a finite number above 0"),
    ):
        if not right:
            raise ValueError(f"request {name!r} has {field} {getattr(params, field)}; expected {expected}")


class Response:
    """A request, and what has been sampled for it so far."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens, self.logprobs, self.versions = array("q"), array("d"), array("q")
        self.experts: np.ndarray | None = None

    def completion(self, reason: FinishReason) -> Completion:
        """Return what has been sampled, as a finished response."""
        return Completion(
            id=self.request.id,
            token_ids=self.tokens,
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=reason,
            routed_experts=self._routed(),
        )

    def route(self, experts: np.ndarray) -> None:
        """Keep the experts [n, L, K] of the first n tokens of prompt and response.

        Of a token that several streams have read, the first one counts: it has drawn what comes after it.
        """
        known = self.experts
        self.experts = experts if known is None else np.concatenate([known, experts[len(known) :]])

    def _routed(self) -> np.ndarray | None:
        """Return `Completion.routed_experts`: -1 at the last token, which no engine reads, and where none has told."""
        if self.experts is None:
            return None
        size = len(self.request.prompt_ids) + len(self.tokens)
        routed = np.full((size, *self.experts.shape[1:]), -1, np.int16)
        known = self.experts[: size - 1]  # behind a stop string the engine may have read on
        routed[: len(known)] = known
        return routed

    def record(
        self, tokens: Sequence[int], logprobs: Sequence[float], version: int, rules: ResponseRules
    ) -> FinishReason | None:
        """Keep new tokens up to the one that ends the response, if there is one; why it ends there.

        Raises `FloatingPointError` for a log-prob that is no number.
        """
        if len(tokens) != len(logprobs):
            raise RuntimeError(f"the engine gave {len(tokens)} tokens with {len(logprobs)} log-probs")
        if not math.isfinite(sum(logprobs)):  # the sum of finite log-probs is; looking at each takes longer
            raise FloatingPointError(
                f"the log-probs under weights of version {version} are infinite or not a number; the last updates "
                "went wrong: lower the learning rate, or resume from an earlier checkpoint"
            )
        if not self.request.params.stop_strings:
            taken, reason = rules.taken(self.request, len(self.tokens), tokens)
            self._append(tokens[:taken], logprobs[:taken], version)
            return reason
        for token, logprob in zip(tokens, logprobs, strict=True):
            self._append((token,), (logprob,), version)
            reason = rules.finish_reason(self.request, self.tokens)
            if reason is not None:
                return reason
        return None

    def _append(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        self.tokens += array("q", tokens)
        self.logprobs += array("d", logprobs)
        self.versions += array("q", (version,)) * len(tokens)

    def restart(self) -> int:
        """Forget what was sampled; number of tokens lost."""
        lost = len(self.tokens)
        self.tokens, self.logprobs, self.versions, self.experts = array("q"), array("d"), array("q"), None
        return lost


def refused_completion(request_id: str, why: str) -> Completion:
    """Return what an engine gives for a request that it refuses: no tokens, and the reason."""
    return Completion(id=request_id, token_ids=(), logprobs=(), versions=(), finish_reason="abort", refused=why)


class InFlightResponse(Response):
    """With the stream that samples it, on an engine that computes on its own. Once submitted, it is the loop's."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.stream_id: str | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        self.aborted = False
        self.task: asyncio.Task[None] | None = None
