"""Forms in which policies write tool calls: values of `tool_parser`."""

from __future__ import annotations

from roll.catalog.entries import Entry

TOOL_PARSERS: dict[str, Entry] = {
    "hermes": Entry(path="roll.tools.parsing.hermes:parse"),
    "qwen_coder": Entry(path="roll.tools.parsing.qwen_coder:parse"),
    "llama": Entry(path="roll.tools.parsing.llama:parse"),
    "json": Entry(path="roll.tools.parsing.plain_json:parse"),
}
"""`(text, tools) -> Found`; a new one is a file and a line here. `auto`: whichever of them the chat template writes."""
