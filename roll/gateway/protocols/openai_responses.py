"""OpenAI's Responses.

Source: https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from roll.gateway.base import ChatAnswer, ChatCall, Choice, RefusedCall
from roll.gateway.protocols import body_fields as f
from roll.gateway.protocols import client_options as o
from roll.gateway.protocols.body_fields import Field, table
from roll.gateway.protocols.openai_chat import (
    CUSTOM,
    ONLY_TEXT,
    chooses_none,
    function_spec,
    openai_error,
    with_tool_names,
)
from roll.gateway.protocols.wire import MAX_MESSAGES, MAX_TOOLS, TEMPERED, ProtocolRequest, WireFormat, pieces, sse
from roll.types.chat import Message, Role, ToolCall, ToolSpec


def events_of(begun: Mapping[str, Any], final: Mapping[str, Any]) -> Iterator[str]:
    """Yield the events between a response that has begun and the whole one."""
    numbers = itertools.count()

    def event(kind: str, **data: Any) -> str:
        return sse({"type": kind, "sequence_number": next(numbers), **data}, kind)

    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(final["output"]):
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
                indices = {**at, "content_index": number}
                yield event("response.content_part.added", part={**part, "text": ""}, **indices)
                for piece in pieces(part["text"]):
                    yield event(f"response.{name}.delta", delta=piece, **extra, **indices)
                yield event(f"response.{name}.done", text=part["text"], **extra, **indices)
                yield event("response.content_part.done", part=part, **indices)
        yield event("response.output_item.done", output_index=index, item=item)
    kind = "response.incomplete" if final["status"] == "incomplete" else "response.completed"
    yield event(kind, response=final)


def _empty(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item as it begins."""
    if item["type"] == "function_call":
        return {**item, "arguments": "", "status": "in_progress"}
    if item["type"] == "message":
        return {**item, "content": [], "status": "in_progress"}
    return {**item, "content": []}


FIELDS = table(
    Field("input", "acts", "a text, or items: message, function_call, function_call_output and reasoning"),
    Field("instructions", "acts", "the system message; not kept for previous_response_id, as in the original"),
    Field("previous_response_id", "acts", "goes on from a response of this session; the last ones are kept"),
    Field("model", "acts", "`policy`, `policy/<role>` or a name of `models`"),
    Field("tools", "acts", "functions, and namespaces of functions; other types are refused, those that run at OpenAI "
          "and those that clients run (`shell`, `apply_patch`, `custom`, ...), unless `ignore_fields` has "
          "`tools.<type>`: then such a tool isn't shown" + o.STRICT),
    Field("tool_choice", "acts", "`auto`; `none` (no tools are shown). `required` and a name are refused"),
    Field("parallel_tool_calls", "acts", "false: at most the first call is returned"),
    Field("max_output_tokens", "acts", "at most the run's own limit"),
    Field("temperature", "acts", TEMPERED),
    Field("top_p", "acts", TEMPERED),
    Field("stream", "acts", "server-sent events, once the response is whole; comments keep the connection open"),
    Field("store", "acts", "false: the response isn't kept for previous_response_id"),
    Field("metadata", "acts", "is repeated in the response"),
    *(
        Field(name, "harmless", "doesn't change the response")
        for name in (
            "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
            "stream_options",
        )
    ),
    Field("prompt_cache_options", "harmless", "doesn't change the response", expects=dict),
    Field("client_metadata", "harmless", "doesn't change the response", expects=dict),
    Field("include", "acts", "`reasoning.encrypted_content`, and what belongs to hosted tools, of which there are "
          "none; thoughts are shown anyway"),
    Field("text", "acts", f"`verbosity` is checked, the policy writes as it does; the format `text`; other formats are "
          f"refused: {o.NO_GRAMMAR}"),
    Field("reasoning", "acts", f"`effort`: {o.EFFORT}; `summary`: thoughts are shown anyway"),
    Field("truncation", "refused", o.NO_EDITS, ("disabled",)),
    Field("moderation", "refused", "nothing is moderated here"),
    Field("top_logprobs", "refused", "engines report the sampled token only", (0,)),
    Field("background", "refused", "a response is made while its client waits", (False,)),
    Field("max_tool_calls", "refused", "the agent calls tools, the endpoint doesn't"),
    Field("conversation", "refused", "there are no stored conversations; previous_response_id goes on from a response"),
    Field("prompt", "refused", "there are no stored prompts"),
    Field("context_management", "refused", o.NO_EDITS, ([],)),
)  # fmt: skip

_MAX_STORED = 256
_MAX_STORED_CHARACTERS = 32 << 20
_ROLES: dict[Any, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Responses(WireFormat):
    """See the module docstring. It keeps the conversations of its session's last responses."""

    fields = FIELDS

    def __init__(self) -> None:
        self._stored: OrderedDict[str, tuple[Message, ...]] = OrderedDict()
        self._characters = 0

    def read(self, body: Any, ignored: Collection[str]) -> ProtocolRequest:
        checked = f.checked(body, FIELDS, ignored)
        read = self.tools_of(checked.get("tools", []), ignored, _tool)
        instructions = f.text(checked, "instructions")
        messages = (*self._earlier(checked), *_input(checked.get("input"), ignored))
        if not messages:
            raise RefusedCall(400, "input: is empty, expected a text or at least one item", "input")
        if instructions:
            messages = (Message("system", instructions), *messages)
        if len(messages) > MAX_MESSAGES:
            raise RefusedCall(400, f"the conversation has more than {MAX_MESSAGES} messages", "input")
        f.boolean(checked, "store", True)
        f.mapping(checked.get("metadata", {}), "metadata")
        o.check_text(checked)
        o.check_include(checked)
        call = ChatCall(
            model=f.text(checked, "model") or "",
            messages=with_tool_names(messages),
            tools=() if chooses_none(checked.get("tool_choice", "auto")) else read,
            max_tokens=f.integer(checked, "max_output_tokens", 1),
            temperature=f.number(checked, "temperature", 0, 2),
            top_p=f.number(checked, "top_p", 0, 1),
            parallel_tool_calls=f.boolean(checked, "parallel_tool_calls", True),
            effort=o.reasoning(checked),
        )
        groups = {} if _NAMESPACE in ignored else _groups(checked.get("tools", []))
        return ProtocolRequest(call=call, stream=f.boolean(checked, "stream"), body=checked, groups=groups)

    def answer(self, request: ProtocolRequest, answer: ChatAnswer) -> dict[str, Any]:
        choice = answer.choices[0]
        self._keep(request, choice)
        return response(request, items_of(request, choice), choice, _usage(answer))

    def events(self, request: ProtocolRequest, answer: ChatAnswer) -> Iterator[str]:
        choice = answer.choices[0]
        self._keep(request, choice)
        begun = response(request, [], None, None)
        final = response(request, items_of(request, choice), choice, _usage(answer))
        return events_of(begun, final)

    def error(self, refused: RefusedCall) -> dict[str, Any]:
        return openai_error(refused)

    def stream_error(self, refused: RefusedCall) -> str:
        error = {"message": str(refused), "param": refused.field or None, "code": refused.code or str(refused.status)}
        return sse({"type": "error", "sequence_number": 0, **error}, "error")

    def _earlier(self, body: dict[str, Any]) -> tuple[Message, ...]:
        name = f.text(body, "previous_response_id")
        if name is None:
            return ()
        messages = self._stored.get(name)
        if messages is None:
            raise RefusedCall(
                400,
                f"previous_response_id: there is no response {name[:80]!r} of this session; the last {_MAX_STORED} are "
                "kept, those with store: false aren't",
                "previous_response_id",
                code="previous_response_not_found",
            )
        return messages

    def _keep(self, request: ProtocolRequest, choice: Choice) -> None:
        if request.body.get("store") is False:
            return
        messages = request.call.messages
        if request.body.get("instructions"):
            messages = messages[1:]
        self._stored[f"resp_{request.id}"] = stored_messages = (*messages, choice.message)
        self._characters += _size(stored_messages)
        while len(self._stored) > _MAX_STORED or (self._characters > _MAX_STORED_CHARACTERS and len(self._stored) > 1):
            self._characters -= _size(self._stored.popitem(last=False)[1])


def _size(messages: tuple[Message, ...]) -> int:
    calls = sum(len(call.arguments) for message in messages for call in message.tool_calls)
    return calls + sum(len(message.content) + len(message.reasoning) for message in messages)


def _input(value: Any, ignored: Collection[str]) -> list[Message]:
    """Return items as messages: what the assistant thinks, says and calls in a row is one message."""
    if value is None:
        return []
    if isinstance(value, str):
        return [Message("user", value)]
    messages: list[Message] = []
    growing = False  # Whether the last message is the assistant's, and goes on
    for i, item in enumerate(f.items(value, "input", MAX_MESSAGES)):
        where = f"input[{i}]"
        message = _item(f.mapping(item, where), where, ignored)
        if message.role != "assistant":
            messages.append(message)
        elif growing and (joined := _joined(messages[-1], message)) is not None:
            messages[-1] = joined
        else:
            messages.append(message)
        growing = message.role == "assistant"
    return messages


def _joined(first: Message, then: Message) -> Message | None:
    """Return two pieces of what the assistant said as one message; None: the second begins another one."""
    if then.reasoning and (first.content or first.tool_calls):
        return None
    if then.content and (first.content or first.tool_calls):
        return None
    return replace(
        first,
        content=first.content + then.content,
        reasoning=first.reasoning + then.reasoning,
        tool_calls=(*first.tool_calls, *then.tool_calls),
    )


def _item(body: dict[str, Any], where: str, ignored: Collection[str]) -> Message:
    kind, at = body.get("type", "message"), f"{where}."
    if kind == "message":
        f.only(body, ("type", "role", "content", "id", "status", "phase"), where, ignored, "input")
        role = _ROLES.get(body.get("role")) if isinstance(body.get("role"), str) else None
        if role is None:
            f.wrong(f"{at}role", body.get("role"), "system, developer, user or assistant")
        parts = ("output_text", "text", "refusal") if role == "assistant" else ("input_text", "text")
        return Message(role, f.texts_of_parts(body.get("content"), f"{at}content", parts))
    if kind == "function_call":
        group = f.text(body, "namespace", at)
        name = f.needed_text(body, "name", at, 256)
        call = ToolCall(
            f.needed_text(body, "call_id", at, 512),
            name if group is None else _in_group(group, name),
            f.text(body, "arguments", at) or "",
        )
        return Message("assistant", "", tool_calls=(call,))
    if kind == "function_call_output":
        text = f.texts_of_parts(body.get("output"), f"{at}output", ("input_text", "output_text", "text"))
        return Message("tool", text, tool_call_id=f.needed_text(body, "call_id", at, 512))
    if kind == "reasoning":
        shown = [part for key in ("content", "summary") for part in f.items(body.get(key) or [], f"{at}{key}", 2048)]
        return Message("assistant", "", reasoning=f.texts_of_parts(shown, where, ("reasoning_text", "summary_text")))
    return f.wrong(f"{at}type", kind, f"message, function_call, function_call_output or reasoning: {ONLY_TEXT}")


_NAMESPACE = "tools.namespace"
"""Leaves out namespaces, in `ignore_fields`."""
_AT_OPENAI = (
    "web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp",
    "programmatic_tool_calling",
)  # fmt: skip
_BY_CLIENTS = ("local_shell", "shell", "apply_patch", "computer", "computer_use_preview", "tool_search")
"""Types of openai 3.57.0, without the dates of some."""


def _tool(value: Any, where: str, ignored: Collection[str]) -> Sequence[ToolSpec]:
    """Return the function that a tool is, or those of a group of them."""
    body = f.mapping(value, where)
    kind = body.get("type")
    if kind == "function":
        return (function_spec(body, where, ignored),)
    if kind != "namespace":
        f.hosted(re.sub(r"_20[0-9_]+$", "", kind) if isinstance(kind, str) else kind, where, _why(kind), ignored)
        return ()
    if _NAMESPACE in ignored:
        return ()
    f.only(body, ("type", "name", "description", "tools"), where, ignored, "tools")
    group, about = f.needed_text(body, "name", f"{where}.", 256), f.text(body, "description", f"{where}.")
    specs: list[ToolSpec] = []
    for i, tool in enumerate(f.items(body.get("tools"), f"{where}.tools", MAX_TOOLS)):
        at = f"{where}.tools[{i}]"
        if f.mapping(tool, at).get("type") == "namespace":
            f.wrong(f"{at}.type", "namespace", "function: a namespace holds functions")
        for spec in _tool(tool, at, ignored):
            description = f"{about}\n{spec.description}" if about and not specs else spec.description
            specs.append(ToolSpec(_in_group(group, spec.name), description, spec.parameters))
    return specs


def _why(kind: Any) -> str:
    """Return why a tool of a type that isn't a function isn't taken."""
    name = re.sub(r"_20[0-9_]+$", "", kind) if isinstance(kind, str) else ""
    if name == "custom":
        return CUSTOM
    if name in _BY_CLIENTS:
        return f"{kind!r} is run by the client, but its arguments are known to OpenAI's models alone: it has no schema"
    return f"{kind!r:.80} " + ("runs at OpenAI, not here" if name in _AT_OPENAI else "isn't a type that is known here")


def _in_group(group: str, name: str) -> str:
    """Return the name by which the policy knows a function of a namespace."""
    return f"{group}{name}" if group.endswith("__") else f"{group}__{name}"


def _groups(tools: Any) -> dict[str, tuple[str, str]]:
    """Return the namespace and the name of functions, by the name that the policy knows, of tools that were read."""
    return {
        _in_group(group["name"], tool["name"]): (group["name"], tool["name"])
        for group in tools
        if group["type"] == "namespace"
        for tool in group["tools"]
        if tool["type"] == "function"
    }


def items_of(request: ProtocolRequest, choice: Choice) -> list[dict[str, Any]]:
    """Return what the assistant thought, said and calls, as items."""
    message, items = choice.message, []
    status = "incomplete" if choice.reason == "length" else "completed"
    if message.reasoning:
        content = [{"type": "reasoning_text", "text": message.reasoning}]
        items.append({"id": f"rs_{request.id}", "type": "reasoning", "summary": [], "content": content})
    if message.content or not message.tool_calls:
        part = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        output = {
            "id": f"msg_{request.id}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [part],
        }
        items.append(output)
    for i, call in enumerate(message.tool_calls):
        group, name = request.groups.get(call.name, (None, call.name))
        named = {"call_id": call.id, "name": name, "arguments": call.arguments}
        if group is not None:
            named["namespace"] = group
        items.append({"id": f"fc_{request.id}_{i}", "type": "function_call", "status": "completed", **named})
    return items


def response(
    request: ProtocolRequest, output: list[dict[str, Any]], choice: Choice | None, usage: dict[str, Any] | None
) -> dict[str, Any]:
    """Return a response object; without a choice it is under way."""
    call, body = request.call, request.body
    status = "in_progress" if choice is None else "incomplete" if choice.reason == "length" else "completed"
    return {
        "id": f"resp_{request.id}",
        "object": "response",
        "created_at": request.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.get("instructions"),
        "max_output_tokens": call.max_tokens,
        "metadata": body.get("metadata", {}),
        "model": call.model,
        "output": output,
        "parallel_tool_calls": call.parallel_tool_calls,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": call.effort, "summary": None},
        "store": body.get("store", True),
        "temperature": call.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools", []),
        "top_p": call.top_p,
        "truncation": "disabled",
        "usage": usage,
    }


def _usage(answer: ChatAnswer) -> dict[str, Any]:
    sampled = answer.sampled
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + sampled,
    }
