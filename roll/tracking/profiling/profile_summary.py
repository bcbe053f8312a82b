"""The numbers of a profiled step: seconds by phase of the controller, by call of each rank, by operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roll.tracking.profiling.chrome import CONTROLLER
from roll.tracking.profiling.recorder import RankRecord
from roll.tracking.spans import Span

OTHER = "outside any phase"


def summary_name(step: int) -> str:
    """Return the name of the file with the numbers."""
    return f"step-{step:06d}.summary.json"


@dataclass(slots=True)
class _Node:
    """A phase, with what is inside."""

    depth: int
    seconds: float = 0.0
    inside: float = 0.0
    count: int = 0


def phases_of(root: Span, spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return the controller's phases as a table of contents: each with its seconds, those that none inside has, and how
    often it came. The own seconds of all rows add up to the step."""
    children: dict[str, list[Span]] = {}
    for each in sorted(spans, key=lambda s: s.start_ns):
        if each.track == CONTROLLER and not each.overlaps:
            children.setdefault(each.parent_id, []).append(each)
    nodes: dict[tuple[str, ...], _Node] = {}

    def walk(above: Span, path: tuple[str, ...]) -> None:
        node = nodes.setdefault(path, _Node(len(path)))
        node.seconds += above.seconds
        node.count += 1
        for child in children.get(above.context.span_id, ()):
            node.inside += child.seconds
            walk(child, (*path, child.name))

    walk(root, ())
    return [
        {
            "name": path[-1] if path else OTHER,
            "depth": node.depth,
            "seconds": round(node.seconds, 6),
            "own_seconds": round(node.seconds - node.inside, 6),
            "count": node.count,
        }
        for path, node in nodes.items()
    ]


def calls_of(track: str, spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return the calls of one rank by method: how many, seconds together, the longest, memory after the last."""
    by_method: dict[str, list[Span]] = {}
    for each in spans:
        if each.track == track and "role" in each.attributes:
            by_method.setdefault(each.name, []).append(each)
    rows = [
        {
            "name": name,
            "count": len(own),
            "seconds": round(sum(s.seconds for s in own), 6),
            "longest": round(max(s.seconds for s in own), 6),
            "rss_mib": own[-1].attributes.get("rss_after_mib"),
        }
        for name, own in by_method.items()
    ]
    return sorted(rows, key=lambda row: -row["seconds"])


def summary_of(step: int, root: Span, spans: Sequence[Span], records: Sequence[RankRecord]) -> dict[str, Any]:
    """Return all of it, as JSON values."""
    return {
        "step": step,
        "seconds": round(root.seconds, 6),
        "phases": phases_of(root, spans),
        "ranks": {
            record.track: {
                "host": record.host,
                "calls": calls_of(record.track, spans),
                **record.operators,
                "files": list(record.files),
            }
            for record in records
        },
    }
