"""`http`: ask a server of your own for the score. docs/rewards.md has the protocol."""

from __future__ import annotations

import asyncio
import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from roll.rewards.base import Reward
from roll.types.trajectory import FinishReason, Task

PROTOCOL = 1
MAX_REPLY_BYTES = 1_000_000
_TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_PAUSE_S, _MAX_PAUSE_S = 0.5, 8.0
_OWN_KEYS = ("prompt", "messages", "ground_truth")


class RewardServerError(RuntimeError):
    """The server didn't answer, or not with a score."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Report a redirect as what it is: a POST would arrive at the other address without its body."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


async def http(
    response: str,
    task: Task,
    *,
    url: str,
    headers: Mapping[str, str] | None = None,
    request_timeout_s: float = 10.0,
    attempts: int = 3,
    finish_reason: FinishReason = "stop",
) -> Reward:
    """POST the response and its task as JSON; the reply is `{"score": 0.5, "parts": {"name": 1.0}}`.

    A server that can't be reached, is busy (429) or fails (5xx) is asked again, with a growing pause, or the one that
    `Retry-After` names. Any other answer raises `RewardServerError`: it says nothing about the response.
    """
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ValueError(f"http: url must be http://host:port/path or https://..., got {url!r}")
    if attempts < 1 or request_timeout_s <= 0:
        raise ValueError(
            f"http: attempts is at least 1, request_timeout_s above 0, got {attempts}, {request_timeout_s}"
        )
    body = json.dumps(_question(response, task, finish_reason), default=_json_form).encode("utf-8")
    request = urllib.request.Request(
        url, body, {"Content-Type": "application/json", "Accept": "application/json", **(headers or {})}, method="POST"
    )
    problem = ""
    for attempt in range(attempts):
        pause: float | None
        try:
            ask = asyncio.to_thread(_post, request, request_timeout_s)
            return read_reply(await asyncio.wait_for(ask, request_timeout_s + 1.0), url)
        except urllib.error.HTTPError as error:
            problem = f"status {error.code}: {error.read(300).decode('utf-8', 'replace')}"
            if error.code not in _TRY_AGAIN:
                break
            pause = _seconds(error.headers.get("Retry-After"))
        except (OSError, TimeoutError) as error:
            problem, pause = f"{type(error).__name__}: {error}", None
        if attempt + 1 < attempts:
            await asyncio.sleep(min(_PAUSE_S * 2**attempt if pause is None else pause, _MAX_PAUSE_S))
    raise RewardServerError(f"the reward server {url} gave no score after {attempt + 1} attempt(s): {problem}")


def _question(response: str, task: Task, finish_reason: str) -> dict[str, Any]:
    columns = dict(task.payload)
    asked = {key: columns.pop(key, None) for key in _OWN_KEYS}
    about = {"protocol": PROTOCOL, "id": task.id, "domain": task.domain, "tag": task.tag}
    return {**about, "response": response, "finish_reason": finish_reason, **asked, "columns": columns}


def _json_form(value: Any) -> str:
    """Return what stands in JSON for a value that JSON hasn't: a picture as a data URL, so that the server sees it."""
    from roll.types.picture import Picture

    return value.data_url() if isinstance(value, Picture) else str(value)


def _post(request: urllib.request.Request, timeout: float) -> bytes:
    with _OPENER.open(request, timeout=timeout) as reply:
        return bytes(reply.read(MAX_REPLY_BYTES + 1))


def _seconds(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:  # none, or a date
        return None
    return value if math.isfinite(value) and value >= 0 else None


def read_reply(body: bytes, url: str) -> Reward:
    """Return the score in a reply; raises `RewardServerError` for anything else than finite numbers."""
    try:
        reply = json.loads(body) if len(body) <= MAX_REPLY_BYTES else None
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict) or "score" not in reply:
        shown = body[:200].decode("utf-8", "replace")
        raise RewardServerError(f'the reward server {url} must answer with {{"score": a number}}, got {shown!r}')
    parts = reply.get("parts") or {}
    numbers = {"score": reply["score"], **parts} if isinstance(parts, dict) else {"parts": parts}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise RewardServerError(f"the reward server {url} gave {name} = {value!r}, expected a finite number")
    stated = reply.get("answer")
    if stated is not None and not isinstance(stated, str):
        raise RewardServerError(f"the reward server {url} gave answer = {stated!r:.80}, expected a text")
    return Reward(float(reply["score"]), {name: float(value) for name, value in parts.items()}, stated)
