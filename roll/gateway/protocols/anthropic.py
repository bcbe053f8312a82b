"""Anthropic's Messages.

Source: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from roll.gateway.base import ChatAnswer, ChatCall, Choice, ContextFull, RefusedCall
from roll.gateway.protocols import body_fields as f
from roll.gateway.protocols import client_options as o
from roll.gateway.protocols.body_fields import Field, table
from roll.gateway.protocols.openai_chat import function_spec, with_tool_names
from roll.gateway.protocols.wire import MAX_MESSAGES, TEMPERED, ProtocolRequest, WireFormat, pieces, sse
from roll.types.chat import Message, ToolCall, ToolSpec

FIELDS = table(
    Field("messages", "acts", "the conversation; blocks text, tool_use, tool_result and thinking; the response goes on "
          "from an assistant's last message"),
    Field("model", "acts", "`policy`, `policy/<role>` or a name of `models`"),
    Field("max_tokens", "acts", "needed, as in the original; at most the run's own limit"),
    Field("system", "acts", "the system message"),
    Field("tools", "acts", "with an input_schema; types of Anthropic's own have none and are refused, those that run "
          "there and those that clients run (`bash`, `text_editor`, `computer`, `memory`, `browser`), unless "
          "`ignore_fields` has `tools.<type without its date>`: then such a tool isn't shown" + o.STRICT),
    Field("tool_choice", "acts", "`auto`, `none`, `disable_parallel_tool_use`; `any` and `tool` are refused"),
    Field("stop_sequences", "acts", "at most 16 texts; the response ends before the first of them"),
    Field("temperature", "acts", TEMPERED),
    Field("top_p", "acts", TEMPERED),
    Field("top_k", "acts", TEMPERED),
    Field("stream", "acts", "server-sent events, once the response is whole; comments keep the connection open"),
    Field("metadata", "harmless", "doesn't change the response"),
    Field("service_tier", "harmless", "doesn't change the response"),
    Field("inference_geo", "harmless", "doesn't change the response"),
    Field("cache_control", "harmless", "caching doesn't change the response; nor in blocks and tools"),
    *(
        Field(name, "harmless", "doesn't change the response", expects=kind)
        for name, kind in (("speed", str), ("user_profile_id", str), ("workspace_id", str), ("diagnostics", dict),
                           ("billing_policy", (str, dict)))
    ),
    Field("thinking", "acts", "`adaptive` and `disabled`: the policy thinks as it does, and what it thinks is shown; "
          "`enabled`, with its budget, is refused"),
    Field("output_config", "acts", f"`effort`: {o.EFFORT}; a `format` is refused: {o.NO_GRAMMAR}"),
    Field("context_management", "acts", "edits that keep everything (`clear_thinking` with `keep: all`); others are "
          f"refused: {o.NO_EDITS}"),
    Field("output_format", "refused", o.NO_GRAMMAR),
    Field("container", "refused", "nothing is run here"),
    Field("mcp_servers", "refused", "the agent calls tools, the endpoint doesn't", ([],)),
    Field("fallbacks", "refused", "there is one model", ([],)),
)  # fmt: skip

_RUN_BY_CLIENTS = ("bash", "text_editor", "computer", "memory", "browser_toolset", "computer_toolset")
_RUN_AT_ANTHROPIC = (
    "web_search", "web_fetch", "code_execution", "mcp_toolset", "advisor", "tool_search_tool_bm",
    "tool_search_tool_regex",
)  # fmt: skip
"""Types of anthropic 2.14.0 without their dates (`tool_search_tool_bm25`: and without its number)."""

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class AnthropicMessages(WireFormat):
    """See the module docstring."""

    fields = FIELDS

    def read(self, body: Any, ignored: Collection[str]) -> ProtocolRequest:
        checked = f.checked(body, FIELDS, ignored)
        messages = _system(checked)
        for i, message in enumerate(f.items(checked.get("messages"), "messages", MAX_MESSAGES)):
            messages += _messages(message, f"messages[{i}]", ignored)
        if not any(message.role != "system" for message in messages):
            raise RefusedCall(400, "messages: is empty, expected at least one", "messages")
        read = self.tools_of(checked.get("tools", []), ignored, _tool)
        o.check_thinking(checked)
        o.check_context_management(checked)
        shows, parallel = _tool_choice(checked.get("tool_choice"))
        max_tokens = f.integer(checked, "max_tokens", 1)
        if max_tokens is None and not self.counts:
            f.wrong("max_tokens", None, "a whole number >= 1")
        call = ChatCall(
            model=f.text(checked, "model") or "",
            messages=with_tool_names(tuple(messages)),
            tools=read if shows else (),
            max_tokens=max_tokens,
            temperature=f.number(checked, "temperature", 0, 2),
            top_p=f.number(checked, "top_p", 0, 1),
            top_k=f.integer(checked, "top_k", 0, 1 << 31),
            stop=f.texts(checked, "stop_sequences", 16),
            parallel_tool_calls=parallel,
            continues=messages[-1].role == "assistant",
            effort=o.output_config(checked),
        )
        return ProtocolRequest(call=call, stream=f.boolean(checked, "stream"))

    def answer(self, request: ProtocolRequest, answer: ChatAnswer) -> dict[str, Any]:
        choice = answer.choices[0]
        return {
            **_head(request),
            "content": [*_blocks(choice)],
            "stop_reason": _reason(choice),
            "stop_sequence": choice.stop_string or None,
            "usage": _usage(answer, answer.sampled),
        }

    def events(self, request: ProtocolRequest, answer: ChatAnswer) -> Iterator[str]:
        def event(kind: str, **data: Any) -> str:
            return sse({"type": kind, **data}, kind)

        choice = answer.choices[0]
        opening = {**_head(request), "content": [], "stop_reason": None, "stop_sequence": None}
        yield event("message_start", message={**opening, "usage": _usage(answer, 0)})
        for i, block in enumerate(_blocks(choice)):
            empty, deltas = _deltas(block)
            yield event("content_block_start", index=i, content_block=empty)
            for delta in deltas:
                yield event("content_block_delta", index=i, delta=delta)
            yield event("content_block_stop", index=i)
        end = {"stop_reason": _reason(choice), "stop_sequence": choice.stop_string or None}
        yield event("message_delta", delta=end, usage=_usage(answer, answer.sampled))
        yield event("message_stop")

    def error(self, refused: RefusedCall) -> dict[str, Any]:
        message = str(refused)  # the form has no place for a field and a code; clients look for these words
        if isinstance(refused, ContextFull):
            message = f"prompt is too long: {refused.tokens} tokens > {refused.limit - 1} maximum"
        elif refused.code == "context_length_exceeded":  # a frozen model's
            message = f"prompt is too long: {message}"
        kind = _ERRORS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}

    def stream_error(self, refused: RefusedCall) -> str:
        return sse(self.error(refused), "error")


class AnthropicTokenCount(AnthropicMessages):
    """The same for the route that counts tokens, which takes no `max_tokens`."""

    counts = True


def _system(body: dict[str, Any]) -> list[Message]:
    system = body.get("system")
    text = "" if system is None else f.texts_of_parts(system, "system", ("text",))
    return [Message("system", text)] if text else []


def _messages(value: Any, where: str, ignored: Collection[str]) -> list[Message]:
    """Return a message of theirs as ours: a user's message may hold the results of several tools."""
    body = f.mapping(value, where)
    f.only(body, ("role", "content"), where, ignored, "messages")
    role, content = body.get("role"), body.get("content")
    if role not in ("user", "assistant", "system"):
        f.wrong(f"{where}.role", role, "user, assistant or system")
    if isinstance(content, str):
        return [Message(role, content)]
    blocks = [
        (f.mapping(block, f"{where}.content[{i}]"), f"{where}.content[{i}]")
        for i, block in enumerate(f.items(content, f"{where}.content", 4096))
    ]
    if role == "assistant":
        return [_assistant_message(blocks)]
    results: list[Message] = []
    texts: list[str] = []
    for block, at in blocks:
        if block.get("type") == "tool_result" and role == "user":
            results.append(_tool_result(block, at))
        else:
            texts.append(_text(block, at, "text or tool_result"))
    # Results answer the calls before them, so they come first, as the original demands too.
    return [*results, Message(role, "".join(texts))] if texts or not results else results


def _assistant_message(blocks: list[tuple[dict[str, Any], str]]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block, at in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            arguments = f.mapping(block.get("input"), f"{at}.input")
            name = f.needed_text(block, "name", f"{at}.", 256)
            text = json.dumps(arguments, ensure_ascii=False)
            calls.append(ToolCall(f.needed_text(block, "id", f"{at}.", 512), name, text))
        elif kind == "thinking":
            thoughts.append(f.text(block, "thinking", f"{at}.") or "")
        elif kind != "redacted_thinking":
            texts.append(_text(block, at, "text, tool_use or thinking"))
    return Message("assistant", "".join(texts), tool_calls=tuple(calls), reasoning="".join(thoughts))


def _tool_result(block: dict[str, Any], where: str) -> Message:
    content = block.get("content")
    text = "" if content is None else f.texts_of_parts(content, f"{where}.content", ("text",))
    if f.boolean(block, "is_error") and not text:
        text = "error"
    return Message("tool", text, tool_call_id=f.needed_text(block, "tool_use_id", f"{where}.", 512))


def _text(block: dict[str, Any], where: str, kinds: str) -> str:
    if block.get("type") != "text":
        f.wrong(f"{where}.type", block.get("type"), f"{kinds}: the policy reads text only")
    text = f.text(block, "text", f"{where}.")
    return text if text is not None else f.wrong(f"{where}.text", None, "a text")


def _tool(value: Any, where: str, ignored: Collection[str]) -> Sequence[ToolSpec]:
    body = f.mapping(value, where)
    kind = body.get("type", "custom")
    if kind not in ("custom", None):
        name = re.sub(r"_?[0-9]*$", "", kind) if isinstance(kind, str) else ""
        f.hosted(name or kind, where, f"{kind!r:.80} {_of_their_own(name)}", ignored)
        return ()
    known = {name: entry for name, entry in body.items() if name not in ("cache_control", "type")}
    return (function_spec(known, where, ignored, "input_schema"),)


def _of_their_own(name: str) -> str:
    """Return why a type of tool that has no input_schema isn't taken."""
    if name in _RUN_BY_CLIENTS:
        return "is run by the client, but its arguments are known to Anthropic's models alone: there is no input_schema"
    return "runs at Anthropic, not here" if name in _RUN_AT_ANTHROPIC else "isn't a type of tool that is known here"


def _tool_choice(value: Any) -> tuple[bool, bool]:
    """Return whether tools are shown, and whether several may be called at once."""
    if value is None:
        return True, True
    body = f.mapping(value, "tool_choice")
    kind = body.get("type")
    if kind not in ("auto", "none"):
        f.refuse_lost("tool_choice", f"{o.NO_GRAMMAR}, so a call can't be made sure; auto and none are fine")
    return kind == "auto", not f.boolean(body, "disable_parallel_tool_use")


def _head(request: ProtocolRequest) -> dict[str, Any]:
    return {"id": f"msg_{request.id}", "type": "message", "role": "assistant", "model": request.call.model}


def _reason(choice: Choice) -> str:
    return "stop_sequence" if choice.stop_string and choice.reason == "stop" else _REASONS[choice.reason]


def _usage(answer: ChatAnswer, sampled: int) -> dict[str, Any]:
    return {"input_tokens": answer.prompt_tokens, "output_tokens": sampled}


def _blocks(choice: Choice) -> Iterator[dict[str, Any]]:
    message = choice.message
    if message.reasoning:
        yield {"type": "thinking", "thinking": message.reasoning, "signature": ""}
    if message.content or not message.tool_calls:
        yield {"type": "text", "text": message.content, "citations": None}
    for call in message.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}


def _input(arguments: str) -> dict[str, Any]:
    """Return arguments as the object that this protocol shows; what isn't one is shown under a name of its own."""
    try:
        value = json.loads(arguments or "{}")
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        value = arguments
    return value if isinstance(value, dict) else {"arguments": arguments}


def _deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block as it begins, and what is added to it."""
    kind = block["type"]
    if kind == "tool_use":
        text = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(text)]
    deltas = [{"type": f"{kind}_delta", kind: piece} for piece in pieces(block[kind])]
    return {**block, kind: ""}, deltas
