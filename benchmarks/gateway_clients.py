"""The clients of benchmarks/gateway.py, in a process of their own that loads little; plan in, figures out, as JSON."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

import aiohttp

SAID = "The room has two doors, and behind the left one stands what was asked for. " * 4
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{i}",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
    for i in range(4)
]


async def ask(http: aiohttp.ClientSession, url: str, key: str, body: dict[str, Any]) -> str:
    async with http.post(f"{url}/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}) as reply:
        answer = await reply.json()
        assert reply.status == 200, answer
        return str(answer["choices"][0]["message"]["content"])


async def converse(http: aiohttp.ClientSession, url: str, key: str, plan: dict[str, Any], number: int) -> list[float]:
    """Send one session's requests; return seconds beyond the engine's, of each."""
    await asyncio.sleep(plan["engine_seconds"] * random.Random(number).random())
    costs, messages = [], [{"role": "user", "content": f"task {number}: {SAID}"}]
    for request in range(plan["requests"]):
        if request % plan["turns"] == 0:
            messages = [{"role": "user", "content": f"task {number}, {request}: {SAID}"}]
        began = time.perf_counter()
        answer = await ask(http, url, key, {"model": "policy", "messages": messages, "tools": TOOLS})
        costs.append(time.perf_counter() - began - float(answer.split()[0]))
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "What is in it? " * 8}]
    return costs


async def stream(http: aiohttp.ClientSession, url: str, key: str) -> bool:
    """Return whether a streamed response arrived whole."""
    body = {"model": "policy", "messages": [{"role": "user", "content": SAID}], "stream": True}
    text, ended = "", False
    async with http.post(f"{url}/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}) as reply:
        async for line in reply.content:
            if line.startswith(b"data: [DONE]"):
                ended = True
            elif line.startswith(b"data: "):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    return ended and text.endswith(SAID)


async def clients(plan: dict[str, Any]) -> Any:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as http:
        if plan["streams"]:
            jobs = [stream(http, url, key) for url, key in plan["sessions"]]
            return sum(done is True for done in await asyncio.gather(*jobs, return_exceptions=True))
        talks = [converse(http, url, key, plan, i) for i, (url, key) in enumerate(plan["sessions"])]
        return [cost for costs in await asyncio.gather(*talks) for cost in costs]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(clients(json.load(sys.stdin)))))
