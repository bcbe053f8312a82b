"""The tables of docs/serve.md, written from roll/gateway/protocols and roll/configs/catalog/harness_table.py.

    python docs/generate/endpoint_fields.py docs/serve.md

A test compares the committed page with what this writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from marked import with_part

from roll.configs.catalog.harness_table import HARNESSES
from roll.gateway.protocols import wire_formats

_BEGIN, _END = "<!-- tables: begin (make docs) -->", "<!-- tables: end -->"
_TITLES = {
    "chat/completions": "Chat Completions: `POST /v1/chat/completions`",
    "messages": "Messages: `POST /v1/messages`",
    "responses": "Responses: `POST /v1/responses`",
}


def markdown_tables() -> str:
    """Return a table for each protocol, and one of harnesses."""
    lines: list[str] = []
    for route, title in _TITLES.items():
        lines += [f"### {title}", "", "| field | | |", "|---|---|---|"]
        fields = wire_formats()[route].fields.values()
        lines += [f"| `{field.name}` | {field.kind} | {field.says} |" for field in fields]
        lines.append("")
    lines += ["### Harnesses in `ignore_fields`", "", "| harness | stands for |", "|---|---|"]
    for name, fields_of in HARNESSES.items():
        field_list = ", ".join(f"`{field}`" for field in fields_of) or "nothing: all that it sends by itself is taken"
        lines.append(f"| `{name}` | {field_list} |")
    lines.append("")
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """Return `page` with the text between its markers replaced by the tables."""
    return with_part(page, _BEGIN, markdown_tables(), _END)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
