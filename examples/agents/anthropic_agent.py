"""The agent of openai_agent.py, written with the plain `anthropic` client."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from anthropic import Anthropic

sys.path.insert(0, str(Path(__file__).parent))
from boxes import INSTRUCTIONS, TOOLS, Boxes

MAX_CALLS = 5


def play(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Answer one question; return the score of the answer."""
    boxes = Boxes(task)
    client = Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)  # which it adds itself
    tools: list[Any] = [
        {"name": name, "description": description, "input_schema": schema}
        for name, (description, schema) in TOOLS.items()
    ]
    messages: list[Any] = [{"role": "user", "content": boxes.question}]
    for _ in range(MAX_CALLS):
        reply = client.messages.create(
            model="policy", max_tokens=48, system=INSTRUCTIONS, messages=messages, tools=tools
        )
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return boxes.score("".join(block.text for block in reply.content if block.type == "text"))
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": boxes.call(call.name, call.input)}
            for call in calls
        ]
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
    return boxes.score(None)
