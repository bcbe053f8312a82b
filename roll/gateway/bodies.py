"""Bodies of requests: read within limits, parsed into plain data that holds no surprise."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, NoReturn

from roll.gateway.base import RefusedCall


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """What a gateway takes of its clients."""

    body_bytes: int = 8 << 20
    body_seconds: float = 60.0
    """For a body to arrive."""
    depth: int = 64
    """Of nested lists and objects."""
    values: int = 200_000
    """Numbers, texts, lists and objects in a body."""
    call_seconds: float = 3600.0
    """For a response."""
    calls: int = 1024
    """Under way, of all sessions."""
    session_calls: int = 256
    """Under way, of one session."""
    idle_seconds: int = 75
    """For a connection to send its next request; then it is closed."""
    keep_alive_seconds: float = 10.0
    """Between signs of life while a streamed response is sampled."""


async def read_json(chunks: AsyncIterator[bytes], limits: GatewayLimits) -> Any:
    """Return what a body holds; raises `RefusedCall`."""
    try:
        async with asyncio.timeout(limits.body_seconds):
            data = await _read(chunks, limits.body_bytes)
    except TimeoutError:
        raise RefusedCall(408, f"the body didn't arrive within {limits.body_seconds:g} s") from None
    return parsed(data, limits)


async def _read(chunks: AsyncIterator[bytes], most: int) -> bytes:
    data = bytearray()
    async for chunk in chunks:
        data += chunk
        if len(data) > most:
            raise RefusedCall(413, f"the body is larger than {most} bytes")
    return bytes(data)


def parsed(data: bytes, limits: GatewayLimits) -> Any:
    """Return JSON as plain data: finite numbers, texts that can be encoded, no deeper and no more than the limits."""
    try:
        body = json.loads(data.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise RefusedCall(400, f"the body is nested deeper than {limits.depth}") from None
    except ValueError as error:
        raise RefusedCall(400, f"the body isn't JSON in UTF-8: {str(error)[:200]}") from None
    _check_size(body, limits)
    if b"\\u" in data:  # nothing else writes halves of surrogate pairs, which no tokenizer takes
        _check_text(body)
    return body


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} isn't a number in JSON")


def _finite(number: str) -> float:
    value = float(number)
    if value in (float("inf"), float("-inf")):
        raise RefusedCall(400, "the body holds a number that is too large")
    return value


def _check_size(body: Any, limits: GatewayLimits) -> None:
    left, level, depth = limits.values, [body], 0
    while level:
        left -= len(level)
        if left < 0:
            raise RefusedCall(400, f"the body holds more than {limits.values} values")
        if depth > limits.depth:
            raise RefusedCall(400, f"the body is nested deeper than {limits.depth}")
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.values()
            elif isinstance(value, list):
                below += value
        level, depth = below, depth + 1


def _check_text(body: Any) -> None:
    try:
        json.dumps(body, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        excerpt = error.object[max(0, error.start - 20) : error.start + 20]
        raise RefusedCall(400, f"the body holds text that isn't valid Unicode: {excerpt!r:.80}") from None
