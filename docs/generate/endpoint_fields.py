"""The tables of docs/serve.md, written from roll/gateway/protocols.

    python docs/generate/endpoint_fields.py docs/serve.md

A test compares the committed page with what this writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from roll.gateway.protocols import wire_formats

_BEGIN, _END = "<!-- tables: begin (make docs) -->", "<!-- tables: end -->"
_TITLES = {
    "chat/completions": "Chat Completions: `POST /v1/chat/completions`",
    "messages": "Messages: `POST /v1/messages`",
    "responses": "Responses: `POST /v1/responses`",
}


def markdown_tables() -> str:
    """Return a table for each protocol."""
    lines: list[str] = []
    for route, title in _TITLES.items():
        lines += [f"### {title}", "", "| field | | |", "|---|---|---|"]
        fields = wire_formats()[route].fields.values()
        lines += [f"| `{field.name}` | {field.kind} | {field.says} |" for field in fields]
        lines.append("")
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """Return `page` with the text between its markers replaced by the tables."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page needs the markers {_BEGIN!r} and {_END!r}, in this order")
    return f"{before}{_BEGIN}\n\n{markdown_tables()}\n{_END}{after}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
