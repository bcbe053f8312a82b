"""The table of docs/metrics.md, written from roll/tracking/names.py."""

from __future__ import annotations

from roll.tracking.names import GROUPS


def markdown_table() -> str:
    """Return the table as `docs/metrics.md` shows it."""
    lines: list[str] = []
    for title, group in GROUPS.items():
        lines += [f"### {title}", "", "| name | unit | meaning | aggregation |", "|---|---|---|---|"]
        lines += [f"| `{m.pattern}` | {m.unit} | {m.meaning} | {m.aggregation} |" for m in group]
        lines.append("")
    return "\n".join(lines)
