"""An agent that is written with the plain `openai` client and knows nothing of who trains the model behind it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

sys.path.insert(0, str(Path(__file__).parent))
from boxes import INSTRUCTIONS, TOOLS, Boxes

MAX_CALLS = 5


def play(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Answer one question; return the score of the answer."""
    boxes, client = Boxes(task), OpenAI(base_url=base_url, api_key=api_key)
    tools: list[Any] = [
        {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}
        for name, (description, schema) in TOOLS.items()
    ]
    messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": boxes.question}]
    for _ in range(MAX_CALLS):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
        if not reply.tool_calls:
            return boxes.score(reply.content)
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls:
            result = boxes.call(call.function.name, parsed(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return boxes.score(None)


def parsed(arguments: str) -> Any:
    """Return the arguments of a call; nothing where they aren't JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}
