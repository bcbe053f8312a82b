"""Where the time of a step goes: nested spans, and the controller's own share.

`with timers.span("step"):` around a step and `with timers.span("generate", waits=True):` around the calls in it that
wait for workers give seconds by name, with and without the spans inside, and what was left to the controller.

Spans belong to the controller's one thread and to synchronous code. Time spent inside one episode (generation, reward)
overlaps with that of others, so it belongs to `Trajectory.spans`, not here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from roll.tracking import spans

STEP = "step"
"""The span that a share is a share of."""
OUTSIDE_STEP = ("validate", "save")
"""Spans of a run that lie between two steps."""


@dataclass
class _Frame:
    """An open span."""

    name: str
    start: float
    inside: float = 0.0
    """Seconds of the spans directly inside this one."""
    waited: float = 0.0
    """Seconds of waiting inside this one."""


@dataclass
class _Total:
    """What the closed spans of one name add up to."""

    inclusive: float = 0.0
    exclusive: float = 0.0
    waited: float = 0.0
    has_inside: bool = False


class Timers:
    """Seconds by span name since the last `result`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.on_change: Callable[[Sequence[str]], None] | None = None
        """Called with the names of the open spans, outermost first, when one begins or ends."""
        self._totals: dict[str, _Total] = {}
        self._open: list[_Frame] = []

    @contextmanager
    def span(self, name: str, *, waits: bool = False, event_loop: bool = False) -> Iterator[None]:
        """Time the body, also one that raises; spans of one name (a word) add up within a step.

        It is also a span of the run's recording, if there is one (spans.py).

        `waits`: the body waits for workers, so its time isn't the controller's own. `event_loop`: it runs an event
        loop on this thread, which waited for workers while it wasn't computing.
        """
        assert name.isidentifier(), f"a span name is one word, got {name!r}"
        frame = _Frame(name, self._clock())
        computed = time.thread_time()
        self._open.append(frame)
        self._tell()
        try:
            with spans.span(name):
                yield
        finally:
            seconds = self._clock() - frame.start
            inner = self._open[-1]
            assert inner is frame, f"span {name!r} closed before {inner.name!r}; spans don't cross coroutines"
            self._open.pop()
            if event_loop:
                frame.waited = max(frame.waited, seconds - (time.thread_time() - computed))
            self._close(frame, seconds, seconds if waits else frame.waited)
            self._tell()

    def result(self) -> dict[str, float]:
        """Return the seconds since the last call, by metric name, and start again at 0.

        `time/<span>` includes the spans inside; `time/<span>/self`, present where there were any,
        doesn't. When a `step` span was closed, `time/controller` is the part of it not spent waiting, and
        `time/controller_share` that part as a fraction.
        """
        assert not self._open, f"result() inside the open span {self._open[-1].name!r}"
        totals, self._totals = self._totals, {}
        values: dict[str, float] = {}
        for name, total in sorted(totals.items()):
            values[f"time/{name}"] = total.inclusive
            if total.has_inside:
                values[f"time/{name}/self"] = total.exclusive
        step = totals.get(STEP)
        if step is not None:
            own = step.inclusive - step.waited
            values["time/controller"] = own
            values["time/controller_share"] = own / step.inclusive if step.inclusive > 0 else 0.0
        return values

    def _tell(self) -> None:
        if self.on_change is not None:
            self.on_change([frame.name for frame in self._open])

    def _close(self, frame: _Frame, seconds: float, waited: float) -> None:
        if self._open:
            self._open[-1].inside += seconds
            self._open[-1].waited += waited
        total = self._totals.setdefault(frame.name, _Total())
        total.exclusive += seconds - frame.inside
        total.has_inside |= frame.inside > 0
        # A span inside one of its own name is already in the outer one's inclusive time.
        if all(outer.name != frame.name for outer in self._open):
            total.inclusive += seconds
            total.waited += waited
