"""A finished response of the protocol Responses as the events of a stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from roll.gateway.protocols.wire import pieces, sse


def events_of(begun: Mapping[str, Any], whole: Mapping[str, Any]) -> Iterator[str]:
    """Yield the events between a response that has begun and the whole one."""
    numbers = itertools.count()

    def event(kind: str, **data: Any) -> str:
        return sse({"type": kind, "sequence_number": next(numbers), **data}, kind)

    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        at = {"item_id": item["id"], "output_index": index}
        yield event("response.output_item.added", output_index=index, item=_empty(item))
        if item["type"] == "function_call":
            for piece in pieces(item["arguments"]):
                yield event("response.function_call_arguments.delta", delta=piece, **at)
            named = {"name": item["name"], "arguments": item["arguments"]}
            yield event("response.function_call_arguments.done", **named, **at)
        else:
            name = "output_text" if item["type"] == "message" else "reasoning_text"
            extra: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            for number, part in enumerate(item["content"]):
                place = {**at, "content_index": number}
                yield event("response.content_part.added", part={**part, "text": ""}, **place)
                for piece in pieces(part["text"]):
                    yield event(f"response.{name}.delta", delta=piece, **extra, **place)
                yield event(f"response.{name}.done", text=part["text"], **extra, **place)
                yield event("response.content_part.done", part=part, **place)
        yield event("response.output_item.done", output_index=index, item=item)
    kind = "response.incomplete" if whole["status"] == "incomplete" else "response.completed"
    yield event(kind, response=whole)


def _empty(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item as it begins."""
    if item["type"] == "function_call":
        return {**item, "arguments": "", "status": "in_progress"}
    if item["type"] == "message":
        return {**item, "content": [], "status": "in_progress"}
    return {**item, "content": []}
