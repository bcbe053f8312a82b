"""The interface of engine libraries that compute on their own: what vLLM and SGLang fill in below `AsyncEngine`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from torch import Tensor

from roll.strategies.base import EnginePart, Request, SamplingParams
from roll.types.trajectory import FinishReason

WeightStream: TypeAlias = AsyncIterator[tuple[str, Tensor]]
Loader: TypeAlias = Callable[[int, WeightStream], Coroutine[Any, Any, None]]


class Sampled(NamedTuple):
    """What a stream gives next."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    """Of these tokens."""
    ended: FinishReason | None
    """Why the stream ends with them; None: it goes on."""
    experts: np.ndarray | None = None
    """int16 [n, L, K], to which experts each of the L layers sent the first n tokens of prompt and response together;
    None: the engine wasn't asked, or hasn't told yet."""


class EngineBackend(ABC):
    """One engine library behind `AsyncEngine`. Every coroutine runs on the one event loop of its `AsyncEngine`.

    An exception from any of them, or from a stream, means that the engine is of no more use; but `RequestRefused` from
    a stream: the engine goes on with all other requests.
    """

    @abstractmethod
    async def start(self) -> None:
        """Start the engine and its processes."""

    def check(self, request: Request) -> None:
        """Raise `ValueError` for a request that this engine can't run as asked. From any thread. Default: it can."""
        del request

    @abstractmethod
    def stream(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, seed: int, *, final_only: bool
    ) -> AsyncGenerator[Sampled, None]:
        """Sample one response, as an async generator.

        `final_only`: nobody looks at it before its end, so all tokens may come at once; also when it is aborted.

        `request_id` is new for every stream. `params` is ready for use: its `stop_token_ids` hold the end-of-sequence
        tokens, `ignore_eos` is set, `stop_strings` are empty (both are `AsyncEngine`'s business), `max_new_tokens` fits
        the context. `seed` has 63 bits. When it is cancelled or closed early, the request must end inside the engine.
        """

    @abstractmethod
    async def abort_running(self, request_ids: Sequence[str]) -> None:
        """Make these streams end soon, with `abort` or without a word; unknown ids are ignored.

        Called again until they have ended.
        """

    @abstractmethod
    async def load(self, version: int, weights: WeightStream) -> None:
        """Load weights (Hugging Face names) and forget every key and value computed before. No stream is open.

        Raises `ValueError` for an unknown or missing name.
        """

    async def sleep(self, parts: Sequence[EnginePart]) -> int:
        """Free these parts of the device's memory; bytes freed. No stream is open."""
        del parts
        return 0

    async def wake(self, parts: Sequence[EnginePart]) -> None:
        """Bring these parts back."""
        del parts

    @abstractmethod
    async def health(self) -> None:
        """Raise when the engine or one of its processes is gone. Fast; called every second."""

    @abstractmethod
    async def shutdown(self) -> None:
        """End the engine and its processes; works on one that died or never finished its start."""

    @abstractmethod
    def kill(self) -> None:
        """End what is left of the engine's processes at once. Called last, from any thread."""


class AdapterBackend(EngineBackend):
    """One that was made for LoRA adapters: after base weights (`load`) it samples only with those."""

    @abstractmethod
    async def load_adapters(self, version: int, adapters: WeightStream) -> None:
        """Go on with these adapters (peft's names, B scaled) and forget those before; otherwise as `load`."""
