"""What stands between many episodes and few engines: the interface that episodes and schedulers use.

    episode --generate--> EngineDriver --submit/poll/abort--> engine 0..E-1 (`EngineRanks`, a cluster's ranks)
            <--Completion--

`LockstepDriver` (lockstep_driver.py) decides when engines compute; `ContinuousDriver` (continuous_driver.py) is for
engines that compute on their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from roll.strategies.base import Completion, Request
from roll.types.metrics import Metrics

T = TypeVar("T")


class RolloutStalled(RuntimeError):
    """Nobody made progress within the time limit; the message names who was waited for."""


def aborted_completion(request_id: str) -> Completion:
    """Return what an abort gives for a request that no engine has seen."""
    return Completion(id=request_id, token_ids=(), logprobs=(), versions=(), finish_reason="abort")


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What engines and episodes do at a moment."""

    running: tuple[int, ...]
    """Requests that each engine has, by rank."""
    waiting: int
    """Requests that no engine has got so far."""
    down: tuple[int, ...] = ()
    """Engines that are being replaced."""
    busy: Mapping[str, int] = field(default_factory=dict)
    """Episodes that wait for no tokens, by what they do."""


class EngineRanks(Protocol):
    """What a driver needs of the inference cluster."""

    @property
    def world_size(self) -> int:
        """Return the number of engines."""

    async def submit(self, rank: int, requests: Sequence[Request]) -> None:
        """Queue requests on one engine."""

    async def poll(self, rank: int, budget: float) -> list[Completion]:
        """Let one engine work, and take what has finished."""

    async def abort(self, rank: int, request_ids: Sequence[str]) -> list[Completion]:
        """Stop requests on one engine."""


class EngineDriver(ABC):
    """Hands the requests of episodes to engines, and the completions back."""

    @abstractmethod
    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that plays episodes on these engines, from synchronous code."""

    @abstractmethod
    def close(self) -> None:
        """End the event loop."""

    @abstractmethod
    def mark_busy(self, episode: str, doing: str) -> None:
        """Note that this episode is live and not waiting for tokens, but `doing` something."""

    @abstractmethod
    def mark_waiting(self, episode: str) -> None:
        """Note that what this episode was busy with is over; it is busy no longer if it has calls under way."""

    @abstractmethod
    def mark_blocked(self, episode: str) -> None:
        """Note that this episode waits for another one to end: nothing waits for it until `mark_busy`."""

    @abstractmethod
    def mark_ended(self, episode: str) -> None:
        """Note that this episode is over."""

    @abstractmethod
    async def generate(self, episode: str, request: Request) -> Completion:
        """Return one response; its finish reason is `abort` when the scheduler stopped it.

        An episode may have several calls under way: it is busy while it has none. A call that is cancelled stops its
        request in the engine.
        """

    @abstractmethod
    async def wait_idle(self) -> None:
        """Wait until the scheduler may decide about groups."""

    @abstractmethod
    async def advance(self) -> None:
        """Wait for progress."""

    @abstractmethod
    async def abort(self, episodes: Collection[str]) -> int:
        """Stop what these episodes wait for; returns how many requests that were."""

    @abstractmethod
    def give_up(self, episode: str) -> None:
        """Stop what this episode waits for without waiting for the engines: its calls end at once with `abort`."""

    async def wait_all_up(self) -> None:
        """Wait until every engine can take new weights. Default: they can."""

    async def mark_dead(self, rank: int, error: BaseException) -> None:
        """Replace an engine that somebody found dead by this error. Default: nothing is replaced, raise the error."""
        del rank
        raise error

    @abstractmethod
    def load(self) -> EngineLoad:
        """Return what is under way, from any thread and at any time; not exact to the moment."""

    def take_metrics(self) -> Metrics:
        """Return what happened to engines and requests since the last call. Default: nothing is counted."""
        return Metrics()
