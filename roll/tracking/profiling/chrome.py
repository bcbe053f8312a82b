"""Trace files in Chrome's JSON format, which Perfetto (https://ui.perfetto.dev) opens by drag and drop.

Format: "Trace Event Format" of the Chromium project. A track is a process of its own there, named by role and rank, so
that files of several ranks can be looked at together. Times are microseconds after the beginning of the step.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.tracking.spans import Span

Event = dict[str, Any]

CONTROLLER = "controller"


def label(track: str) -> str:
    """Return a track's name as people read it: `actor_train-0` is `actor_train rank 0`."""
    role, dash, rank = track.rpartition("-")
    return f"{role} rank {rank}" if dash and rank.isdigit() else track


def named(pid: int, name: str, threads: Mapping[int, str]) -> list[Event]:
    """Return the events that name a process and its threads, and put it into its place."""
    events: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}},
    ]
    return events + [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}}
        for tid, thread in sorted(threads.items())
    ]


def span_events(spans: Sequence[Span], start_ns: int) -> list[Event]:
    """Return spans as events: a process for each track, a thread's spans nested, those that overlap by their trace."""
    tracks = sorted({span.track for span in spans}, key=lambda track: (track != CONTROLLER, track))
    events: list[Event] = []
    for pid, track in enumerate(tracks, 1):
        own = sorted((s for s in spans if s.track == track), key=lambda s: (s.start_ns, -s.end_ns))
        threads = {thread: tid for tid, thread in enumerate(dict.fromkeys(s.thread for s in own if not s.overlaps), 1)}
        what = "phases" if track == CONTROLLER else "calls"
        events += named(pid, label(track), {t: what if t == 1 else f"{what} {t}" for t in threads.values()})
        for span in own:
            events += _overlapping(span, pid, start_ns) if span.overlaps else [_nested(span, pid, threads, start_ns)]
            events += _memory(span, pid, start_ns)
    return events


def micros(time_ns: int, start_ns: int) -> float:
    """Return a time as microseconds after the start, to the nanosecond."""
    return (time_ns - start_ns) / 1000


def _args(span: Span) -> dict[str, Any]:
    return {**span.attributes, **({"error": span.error} if span.error else {})}


def _nested(span: Span, pid: int, threads: Mapping[int, int], start_ns: int) -> Event:
    return {
        "ph": "X",
        "name": span.name,
        "cat": "span",
        "pid": pid,
        "tid": threads[span.thread],
        "ts": micros(span.start_ns, start_ns),
        "dur": (span.end_ns - span.start_ns) / 1000,
        "args": _args(span),
    }


def _overlapping(span: Span, pid: int, start_ns: int) -> list[Event]:
    shared = {"name": span.name, "cat": "episode", "pid": pid, "tid": 0, "id": span.context.trace_id[:16]}
    return [
        {"ph": "b", **shared, "ts": micros(span.start_ns, start_ns), "args": _args(span)},
        {"ph": "e", **shared, "ts": micros(span.end_ns, start_ns)},
    ]


def _memory(span: Span, pid: int, start_ns: int) -> list[Event]:
    """Return resident memory around a worker's call as a curve."""
    points = [("rss_before_mib", span.start_ns), ("rss_after_mib", span.end_ns)]
    return [
        {
            "ph": "C",
            "name": "resident memory",
            "pid": pid,
            "tid": 0,
            "ts": micros(time_ns, start_ns),
            "args": {"MiB": span.attributes[key]},
        }
        for key, time_ns in points
        if key in span.attributes
    ]


def write_trace(path: Path, events: Iterable[Event], about: Mapping[str, Any]) -> None:
    """Write a trace file, whole or not at all; `about` is for programs, Perfetto shows it as metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    with gzip.open(temporary, "wt", encoding="utf-8", compresslevel=5) as file:
        file.write('{"displayTimeUnit":"ms","otherData":')
        file.write(json.dumps(about))
        file.write(',"traceEvents":[')
        for i, event in enumerate(events):
            file.write(",\n" if i else "\n")
            file.write(json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")
    temporary.replace(path)


def read_trace(path: Path) -> dict[str, Any]:
    """Return what a trace file says; raises `ValueError`, which names it, for one that is broken."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            trace: dict[str, Any] = json.load(file)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path} can't be read as a trace: {error}") from error
    return trace
