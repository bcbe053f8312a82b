"""What `ContinuousDriver` holds about requests on their way, and about the engines that have them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from roll.strategies.base import Completion, Request


@dataclass(eq=False, slots=True)
class InFlightRequest:
    """A request that somebody waits for."""

    request: Request
    episode: str
    future: asyncio.Future[Completion]
    rank: int | None = None
    placed: float = 0.0  # When it was given to that engine, by the loop's clock


@dataclass(eq=False)
class EngineState:
    """What the driver holds about one engine."""

    rank: int
    outbox: list[Request] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    work: asyncio.Event = field(default_factory=asyncio.Event)
    submitting: asyncio.Task[None] | None = None
    polling: asyncio.Task[None] | None = None
    restarts: int = 0
