"""The table of docs/metrics.md, written from roll/tracking/names.py.

    python docs/generate/metrics_page.py docs/metrics.md

A test compares the committed page with what this writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from marked import with_part

from roll.tracking.names import GROUPS

_BEGIN, _END = "<!-- table: begin (make docs) -->", "<!-- table: end -->"


def markdown_table() -> str:
    """Return the table as `docs/metrics.md` shows it."""
    lines: list[str] = []
    for title, group in GROUPS.items():
        lines += [f"### {title}", "", "| name | unit | meaning | aggregation |", "|---|---|---|---|"]
        lines += [f"| `{m.pattern}` | {m.unit} | {m.meaning} | {m.aggregation} |" for m in group]
        lines.append("")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """Return `page` with the text between its markers replaced by the table."""
    return with_part(page, _BEGIN, markdown_table(), _END)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
