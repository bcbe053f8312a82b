"""The tables of docs/serve.md, written from roll/gateway/protocols and roll/configs/catalog/harness_table.py."""

from __future__ import annotations

from roll.configs.catalog.harness_table import HARNESSES
from roll.gateway.protocols import wire_formats

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
