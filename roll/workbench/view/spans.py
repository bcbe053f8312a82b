"""The spans of one episode, out of a run's `spans.jsonl`: OTLP in JSON, a line for each step."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

SPANS_FILE = "spans.jsonl"
_TRACE = re.compile(rb'"traceId": ?"([0-9a-f]{32})"')
_MAX_SPANS = 2000


class SpanIndex:
    """Finds traces by their id without holding the spans: only where in the file the lines are. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._lines: dict[bytes, list[tuple[int, int]]] = {}
        self._offset = 0

    def trace(self, trace: str) -> list[dict[str, Any]]:
        """Return the spans of a trace in the order of their beginnings; none if it isn't recorded.

        Each has `id`, `parent` (None: the trace begins with it), `name`, `scope`, `start` and `seconds` (both in
        seconds, from the beginning of the first), `failed` and `attributes`.
        """
        with self._lock:
            self._read()
            locations = list(self._lines.get(trace.encode("ascii", "replace"), ()))
        spans = [span for location in locations for span in self._spans(*location, trace)]
        spans.sort(key=lambda span: (span["start"], -span["seconds"]))
        begin = spans[0]["start"] if spans else 0
        for span in spans:
            span["start"], span["seconds"] = (span["start"] - begin) / 1e9, span["seconds"] / 1e9
        return spans[:_MAX_SPANS]

    def _read(self) -> None:
        """Take in the lines that are new. A file that was replaced or cut is read from its start."""
        try:
            with self._path.open("rb") as file:
                if self._path.stat().st_size < self._offset:
                    self._offset, self._lines = 0, {}
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    for trace in set(_TRACE.findall(line)):
                        self._lines.setdefault(trace, []).append((self._offset, len(line)))
                    self._offset += len(line)
        except OSError:
            return

    def _spans(self, offset: int, size: int, trace: str) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(offset)
                parts = json.loads(file.read(size))["resourceSpans"]
            return [
                _plain(span, scope.get("scope", {}).get("name", ""))
                for part in parts
                for scope in part["scopeSpans"]
                for span in scope["spans"]
                if span.get("traceId") == trace
            ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return []  # of another program, or cut


def _plain(span: dict[str, Any], scope: str) -> dict[str, Any]:
    begin, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
    return {
        "id": span["spanId"],
        "parent": span.get("parentSpanId") or None,
        "name": str(span["name"]),
        "scope": str(scope),
        "start": begin,
        "seconds": max(end - begin, 0),
        "failed": span.get("status", {}).get("code") == 2,
        "attributes": {one["key"]: next(iter(one["value"].values()), None) for one in span.get("attributes", ())},
    }


def trace_id(context: str) -> str:
    """Return the id of a trace from its W3C `traceparent`; empty if it is none."""
    parts = context.split("-")
    return parts[1] if len(parts) == 4 and len(parts[1]) == 32 else ""
