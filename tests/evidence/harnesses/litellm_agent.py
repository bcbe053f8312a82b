"""litellm: a loop over its completion, Chat Completions or Messages."""

from __future__ import annotations

import json

import litellm

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def play(task, base_url, api_key):
    """Pay for the right sum."""
    name = "anthropic/policy" if task.get("protocol") == "messages" else "openai/policy"
    address = base_url[:-3] if name.startswith("anthropic") else base_url
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(4):
        reply = litellm.completion(model=name, messages=messages, tools=[ADD], api_base=address, api_key=api_key)
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return float(task["answer"] in message.content)
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            total = str(arguments["a"] + arguments["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": total})
    return 0.0
