"""Spans: what was done when, by whom and inside what. They cost nothing while nobody records them.

    with recording_to(SpanLog("controller")):       the process's log, while a run is recorded
        with span("train_actor", step=3):           inside it, and in what it calls on this thread or as this task
            annotate(tokens=512)

A span has the ids of OpenTelemetry: a trace that it belongs to, and a span that it is inside of. A worker gets the id
of the span that calls it (`SpanContext`, as text a W3C `traceparent`) and keeps a log of its own.

No prompt, response or setting is put into a span: names, ids, counts and times alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field

Value = str | int | float | bool

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_LIMIT = 200_000


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Names a span, also in another process."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 of them."""

    @classmethod
    def new(cls, trace_id: str = "") -> SpanContext:
        """Return a new name, by default in a trace of its own. Its digits are no draw of the run's: those are keyed."""
        return cls(trace_id or os.urandom(16).hex(), os.urandom(8).hex())

    @classmethod
    def parse(cls, text: str) -> SpanContext:
        """Read a `traceparent`; raises `ValueError` for anything else."""
        match = _TRACEPARENT.fullmatch(text)
        if match is None:
            raise ValueError(f"expected a traceparent such as 00-<32 digits>-<16 digits>-01, got {text!r}")
        return cls(match[1], match[2])

    @property
    def traceparent(self) -> str:
        """As text: version, trace, span, and that it is sampled (https://www.w3.org/TR/trace-context)."""
        return f"00-{self.trace_id}-{self.span_id}-01"


@dataclass(slots=True)
class Span:
    """A span, finished once `end_ns` is set."""

    name: str
    context: SpanContext
    track: str
    """Whose it is: `controller`, or role and rank such as `actor_train-0`."""
    start_ns: int
    """Nanoseconds since 1970, as all machines tell them."""
    end_ns: int = 0
    parent_id: str = ""
    """Span of the same trace that it is inside of; empty for the first."""
    overlaps: bool = False
    """Whether others run at the same time on the same thread: an episode's and what is inside one."""
    thread: int = 0
    attributes: dict[str, Value] = field(default_factory=dict)
    links: tuple[SpanContext, ...] = ()
    """Spans of other traces that it has to do with."""
    error: str = ""
    """Name of the exception that ended it."""

    @property
    def seconds(self) -> float:
        """Return how long it took."""
        return (self.end_ns - self.start_ns) / 1e9


class SpanLog:
    """The finished spans of one track, from any thread. Beyond `limit` they are counted only."""

    def __init__(self, track: str, limit: int = _LIMIT) -> None:
        self.track = track
        self.base: Span | None = None
        """What spans are inside of that begin in no other: the step under way."""
        self.keeps = limit > 0
        self._limit = limit
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._dropped = 0

    def add(self, span: Span) -> None:
        """Keep a finished span."""
        with self._lock:
            if len(self._spans) < self._limit:
                self._spans.append(span)
            else:
                self._dropped += 1

    def take(self) -> tuple[list[Span], int]:
        """Return the spans since the last call, and how many more there were."""
        with self._lock:
            taken, self._spans = (self._spans, self._dropped), []
            self._dropped = 0
        return taken


_process_log: SpanLog | None = None
_current: ContextVar[tuple[SpanLog, Span] | None] = ContextVar("span", default=None)
_NOTHING: AbstractContextManager[None] = nullcontext()


@contextlib.contextmanager
def recording_to(log: SpanLog) -> Iterator[SpanLog]:
    """Record the spans of this process; those inside a worker's call go to the worker's log."""
    global _process_log
    before, _process_log = _process_log, log
    try:
        yield log
    finally:
        _process_log = before


def is_recording() -> bool:
    """Return whether spans are kept."""
    return _process_log is not None or _current.get() is not None


def is_kept() -> bool:
    """Return whether the span that is open here will be in the log."""
    current = _current.get()
    return current is not None and current[0].keeps


def _open() -> tuple[SpanLog, Span | None] | None:
    """Return where a span goes that begins here, and the one that it is inside of; None while nothing is recorded."""
    current = _current.get()
    if current is not None and not current[1].end_ns:
        return current
    # A task of the event loop may outlive the span that it was begun in.
    return (_process_log, _process_log.base) if _process_log is not None else None


def span(
    name: str, *, links: Sequence[SpanContext] = (), **attributes: Value
) -> AbstractContextManager[Span] | AbstractContextManager[None]:
    """Record the body, inside the span that is open here."""
    opened = _open()
    if opened is None:
        return _NOTHING
    log, parent = opened
    return _recorded(log, name, parent, attributes, links, overlaps=parent is not None and parent.overlaps)


def trace(
    name: str, *, kept: bool = True, **attributes: Value
) -> AbstractContextManager[Span] | AbstractContextManager[None]:
    """Record the body as the first span of a trace of its own; others may run at the same time on this thread.

    It has a link to the span that is open here. Not `kept`: neither it nor what is inside is.
    """
    opened = _open()
    if opened is None:
        return _NOTHING
    log, around = opened
    links = (around.context,) if around is not None else ()
    return _recorded(log if kept else SpanLog(log.track, limit=0), name, None, attributes, links, overlaps=True)


def call_of(log: SpanLog, name: str, caller: SpanContext | None, **attributes: Value) -> AbstractContextManager[Span]:
    """Record the body into a worker's log, inside the span of another process that called it."""
    return _recorded(log, name, caller, attributes, (), overlaps=False)


def annotate(**attributes: Value) -> None:
    """Add attributes to the span that is open here, if there is one."""
    current = _current.get()
    if current is not None:
        current[1].attributes.update(attributes)


def current_context() -> SpanContext | None:
    """Return the name of the span that is open here, or else of the step under way; None while nothing is recorded."""
    opened = _open()
    return opened[1].context if opened is not None and opened[1] is not None else None


def finished(
    name: str, times: tuple[int, int], parent: SpanContext, *, links: Sequence[SpanContext] = (), **attributes: Value
) -> None:
    """Record afterwards what happened to another trace, from `times[0]` to `times[1]` (ns): that it was trained on."""
    if _process_log is not None:
        _process_log.add(
            Span(
                name=name,
                context=SpanContext.new(parent.trace_id),
                track=_process_log.track,
                start_ns=times[0],
                end_ns=times[1],
                parent_id=parent.span_id,
                overlaps=True,
                attributes=dict(attributes),
                links=tuple(links),
            )
        )


@contextlib.contextmanager
def _recorded(
    log: SpanLog,
    name: str,
    parent: Span | SpanContext | None,
    attributes: dict[str, Value],
    links: Sequence[SpanContext],
    *,
    overlaps: bool,
) -> Iterator[Span]:
    above = parent.context if isinstance(parent, Span) else parent
    opened = Span(
        name=name,
        context=SpanContext.new(above.trace_id if above is not None else ""),
        track=log.track,
        start_ns=time.time_ns(),
        parent_id=above.span_id if above is not None else "",
        overlaps=overlaps,
        thread=threading.get_ident(),
        attributes=attributes,
        links=tuple(links),
    )
    token = _current.set((log, opened))
    try:
        yield opened
    except BaseException as error:
        opened.error = type(error).__name__
        raise
    finally:
        _current.reset(token)
        opened.end_ns = time.time_ns()
        log.add(opened)
