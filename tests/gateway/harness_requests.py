"""What agent harnesses send by themselves: `harness_requests.json` has the requests of an episode of each, shortened.

Names, types and shapes are as they were sent (tests/evidence/test_evidence_harnesses.py records them); prompts, schemas
and descriptions are texts of our own, as long as nothing of them matters.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from roll.configs.catalog.harness_table import SIDE_PROMPTS

SIDE = tuple(text for texts in SIDE_PROMPTS.values() for text in texts)
FILE = Path(__file__).with_suffix(".json")

_NAMES = frozenset({
    "type", "role", "model", "status", "effort", "reasoning_effort", "summary", "tool_choice", "keep", "namespace",
    "format", "phase", "verbosity", "detail", "name", "object", "mode", "ttl",
})  # fmt: skip
"""Keys whose texts are part of a protocol, or of what was called."""
_IDS = frozenset({"call_id", "tool_call_id", "tool_use_id", "id"})
_LISTS = frozenset({"stop", "stop_sequences", "include"})
_SAID = frozenset({"content", "text", "output", "thinking"})
_TEXT = "Add."
_LONG = 400


def read_requests() -> list[dict[str, Any]]:
    """Return the recordings: `harness`, `protocol`, `says`, and `requests` with `route` and `body`."""
    recorded: list[dict[str, Any]] = json.loads(FILE.read_text())
    return recorded


def write_requests(recorded: list[dict[str, Any]]) -> None:
    ordered = sorted(recorded, key=lambda one: (one["harness"], one["protocol"]))
    FILE.write_text("[\n" + ",\n".join(json.dumps(one, ensure_ascii=False) for one in ordered) + "\n]\n")


def _holds(value: str, text: str) -> bool:
    """Return whether a text of ours stands in another; a number also stands in the dates of long ones."""
    return (len(text) > 4 or len(value) < _LONG) and bool(re.search(rf"(?<!\w){re.escape(text)}(?!\w)", value))


class Shortened:
    """Bodies of an episode without what a harness wrote into its prompts.

    Args:
        kept: texts of ours, which stand wherever they were sent: the question, what the policy said, results of tools.
    """

    def __init__(self, kept: tuple[str, ...]) -> None:
        self._kept = kept
        self._ids: dict[str, str] = {}

    def body(self, sent: dict[str, Any]) -> dict[str, Any]:
        """Return a body; tools of the same shape stand for each other, but for those that are called."""
        return {key: self._tools(value) if key == "tools" else self._value(key, value) for key, value in sent.items()}

    def _value(self, key: str, value: Any) -> Any:
        if isinstance(value, dict):
            short = {name: self._value(name, inner) for name, inner in value.items()}
            if value.get("type") == "tool_use":  # what a call is made with are the policy's words
                short["input"] = value["input"]
            return short
        if isinstance(value, list):
            return [self._value(key, inner) for inner in value]
        if not isinstance(value, str):
            return value
        if key in _IDS:
            return self._ids.setdefault(value, f"call {len(self._ids)}")
        if key in _NAMES or key in _LISTS or not value:
            return value
        if key == "arguments" or any(value.strip() == text for text in self._kept):
            return value
        if side := [text for text in SIDE if text in value]:
            return side[0]
        held = [text for text in self._kept if key in _SAID and _holds(value, text)]
        return max(held, key=len) if held else _TEXT

    def _tools(self, tools: list[Any]) -> list[Any]:
        shapes: dict[str, Any] = {}
        for tool in tools:
            short = self._tool(tool, len(shapes))
            shape = re.sub(r'"name": "[^"]*"', "", json.dumps(short))
            name = short.get("name") or short.get("function", {}).get("name", "")
            called = any(f'"{name}"' in text for text in self._kept)
            shapes.setdefault(shape + (name if called else ""), short)
        return list(shapes.values())

    def _tool(self, tool: dict[str, Any], number: int) -> dict[str, Any]:
        short: dict[str, Any] = {}
        for key, value in tool.items():
            if key == "function":
                short[key] = self._tool(value, number)
            elif key == "tools":
                short[key] = self._tools(value)
            elif key in ("parameters", "input_schema"):
                short[key] = self._schema(value)
            elif key == "name":
                called = any(f'"{value}"' in text for text in self._kept)
                short[key] = value if called else f"tool_{number}"
            else:
                short[key] = value if key in _NAMES or not isinstance(value, (str, dict, list)) else _TEXT
        return short

    def _schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        shown = {key: schema[key] for key in ("type", "additionalProperties", "$schema") if key in schema}
        return {**shown, "properties": {"a": {"type": "string"}}, **({"required": []} if "required" in schema else {})}
