"""A small OpenEnv server: an echo environment that asks for a word of the seed's, and a countdown with two fields."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import WSMsgType, web

WORDS = ("red", "green", "blue")
SESSIONS = web.AppKey("sessions", list)


class Echo:
    """Says a word; who says it back gets 1 and the episode ends. Three tries."""

    schema = {"action": {"properties": {"message": {"type": "string"}, "metadata": {"type": "object"}}}}

    def reset(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self.word, self.tries = WORDS[arguments.get("seed", 0) % 3], 0
        self.greeting = arguments.get("greeting", "")
        return self.seen(f"{self.greeting}say {self.word}", None, False)

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        if set(action) != {"message"} or not isinstance(action["message"], str):
            raise KeyError("message")
        self.tries += 1
        right = action["message"] == self.word
        return self.seen(f"you said {action['message']}", float(right), right or self.tries == 3)

    def seen(self, text: str, reward: float | None, done: bool) -> dict[str, Any]:
        return {"observation": {"echoed_message": text, "metadata": {}}, "reward": reward, "done": done}


async def socket(request: web.Request) -> web.WebSocketResponse:
    """A session; an action that doesn't fit is answered with the code of the real servers."""
    answers = web.WebSocketResponse()
    await answers.prepare(request)
    request.app[SESSIONS].append(1)
    env = Echo()
    async for message in answers:
        if message.type is not WSMsgType.TEXT:
            break
        asked = message.json()
        if asked["type"] == "close":
            break
        try:
            if asked.get("data", {}).get("message") == "hang":
                await asyncio.sleep(1)
            data = env.reset(asked["data"]) if asked["type"] == "reset" else env.step(asked["data"])
            await answers.send_json({"type": "observation", "data": data})
        except KeyError as error:
            said = {"message": f"field required: {error}", "code": "VALIDATION_ERROR"}
            await answers.send_json({"type": "error", "data": said})
    request.app[SESSIONS].pop()
    return answers


def application() -> web.Application:
    """Schema, WebSocket, and a single episode over HTTP."""
    app, single = web.Application(), Echo()
    app[SESSIONS] = []

    async def schema(_: web.Request) -> web.Response:
        return web.json_response(Echo.schema)

    async def reset(request: web.Request) -> web.Response:
        return web.json_response(single.reset(await request.json()))

    async def step(request: web.Request) -> web.Response:
        try:
            return web.json_response(single.step((await request.json())["action"]))
        except KeyError as error:
            return web.json_response({"detail": f"field required: {error}"}, status=422)

    app.add_routes([web.get("/schema", schema), web.get("/ws", socket)])
    app.add_routes([web.post("/reset", reset), web.post("/step", step)])
    return app


@contextmanager
def serving() -> Iterator[tuple[str, list[int]]]:
    """The address, and a list with an entry for each open session."""
    loop, app, started = asyncio.new_event_loop(), application(), threading.Event()
    address: list[str] = []

    async def start() -> web.AppRunner:
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        address.append(f"http://127.0.0.1:{port}")
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield address[0], app[SESSIONS]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
