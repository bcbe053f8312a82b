"""OpenAI's Chat Completions.

Source: https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from roll.gateway.base import ChatAnswer, ChatCall, Choice, RefusedCall
from roll.gateway.protocols import body_fields as f
from roll.gateway.protocols import client_options as o
from roll.gateway.protocols.body_fields import Field, table
from roll.gateway.protocols.wire import (
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_TOOLS,
    TEMPERED,
    ProtocolRequest,
    WireFormat,
    pieces,
    sse,
)
from roll.types.chat import Message, Role, ToolCall, ToolSpec

CUSTOM = "custom tools take free text, and calls are made with arguments in JSON: send a function with one text"
_NEUTRAL = {"defer_loading": (False,), "async": (False,), "eager_input_streaming": (True, False)}
"""Fields of functions with the values that change nothing here."""
ONLY_TEXT = "the policy reads and writes text only"
_SAMPLER = "it would change the distribution, and no engine here does it"

FIELDS = table(
    Field("messages", "acts", "the conversation; contents of text"),
    Field("model", "acts", "`policy`, `policy/<role>` or a name of `models`"),
    Field("tools", "acts", "functions; shown by the chat template, calls are parsed out of the response" + o.STRICT),
    Field("tool_choice", "acts", "`auto`; `none` (no tools are shown). `required` and a name are refused"),
    Field("parallel_tool_calls", "acts", "false: at most the first call is returned"),
    Field("n", "acts", "so many responses to one prompt, each a branch of its own"),
    Field("max_tokens", "acts", "at most the run's own limit"),
    Field("max_completion_tokens", "acts", "the same under its newer name"),
    Field("chat_template_kwargs", "acts", "variables that the chat template reads, over the run's own"),
    Field("stop", "acts", "at most 16 texts; the response ends before the first of them"),
    Field("seed", "acts", "mixed into the episode's own key"),
    Field("temperature", "acts", TEMPERED),
    Field("top_p", "acts", TEMPERED),
    Field("top_k", "acts", TEMPERED),
    Field("repetition_penalty", "acts", TEMPERED),
    Field("logprobs", "acts", "those of the sampled tokens, under the distribution that they were drawn from"),
    Field("top_logprobs", "acts", "0 only: engines report the sampled token"),
    Field("stream", "acts", "server-sent events, once the response is whole; comments keep the connection open"),
    Field("stream_options", "acts", "`include_usage`"),
    Field("continue_final_message", "acts", "true: the response goes on from an assistant's last message (vLLM has "
          "this field too); otherwise a new one begins after it"),
    Field("add_generation_prompt", "refused", "prompts end where a response begins; false is fine with "
          "continue_final_message", (True, False)),
    *(
        Field(name, "harmless", "doesn't change the response")
        for name in (
            "metadata", "user", "store", "service_tier", "safety_identifier", "prompt_cache_key",
            "prompt_cache_retention", "prediction",
        )
    ),
    Field("prompt_cache_options", "harmless", "doesn't change the response", expects=dict),
    Field("response_format", "acts", f"`text`; others are refused: {o.NO_GRAMMAR}"),
    Field("reasoning_effort", "acts", o.EFFORT),
    Field("verbosity", "acts", "is checked; the policy writes as it does"),
    Field("frequency_penalty", "refused", _SAMPLER, (0,)),
    Field("presence_penalty", "refused", _SAMPLER, (0,)),
    Field("logit_bias", "refused", _SAMPLER, ({},)),
    Field("min_p", "refused", _SAMPLER, (0,)),
    Field("modalities", "refused", ONLY_TEXT, (["text"],)),
    Field("audio", "refused", ONLY_TEXT),
    Field("functions", "refused", "OpenAI has replaced it by tools", ([],)),
    Field("function_call", "refused", "OpenAI has replaced it by tool_choice", ("auto", "none")),
    Field("moderation", "refused", "nothing is moderated here"),
    Field("web_search_options", "refused", "there is no search"),
)  # fmt: skip

_ROLES: dict[Any, Role] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
}  # fmt: skip
_PARTS: dict[str, tuple[str, ...]] = {"assistant": ("text", "refusal")}
_KNOWN = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "refusal")


class ChatCompletions(WireFormat):
    """See the module docstring."""

    fields = FIELDS

    def read(self, body: Any, ignored: Collection[str]) -> ProtocolRequest:
        checked = f.checked(body, FIELDS, ignored)
        messages = tuple(
            _message(message, f"messages[{i}]", ignored)
            for i, message in enumerate(f.items(checked.get("messages"), "messages", MAX_MESSAGES))
        )
        if not messages:
            raise RefusedCall(400, "messages: is empty, expected at least one", "messages")
        tools = self.tools_of(checked.get("tools", []), ignored, _tool)
        options = checked.get("stream_options", {})
        continues = f.boolean(checked, "continue_final_message")
        if continues and messages[-1].role != "assistant":
            raise RefusedCall(
                400, "continue_final_message: the last message isn't the assistant's", "continue_final_message"
            )
        opens = body.get("add_generation_prompt")
        if opens is continues and "add_generation_prompt" not in ignored:  # a prompt that opens a response, or goes on
            f.refuse_lost("add_generation_prompt", FIELDS["add_generation_prompt"].says)
        o.check_format(checked.get("response_format"), "response_format", "response_format")
        o.verbosity(checked)
        call = ChatCall(
            model=f.text(checked, "model") or "",
            messages=with_tool_names(messages),
            tools=() if chooses_none(checked.get("tool_choice", "auto")) else tools,
            effort=o.effort(checked),
            n=f.integer(checked, "n", 1, MAX_CHOICES) or 1,
            max_tokens=_max_tokens(checked),
            temperature=f.number(checked, "temperature", 0, 2),
            top_p=f.number(checked, "top_p", 0, 1),
            top_k=f.integer(checked, "top_k", -1, 1 << 31),
            repetition_penalty=f.number(checked, "repetition_penalty", 0.01, 100),
            stop=f.texts(checked, "stop", 16),
            seed=f.integer(checked, "seed", -(1 << 63), (1 << 63) - 1),
            parallel_tool_calls=f.boolean(checked, "parallel_tool_calls", True),
            top_logprobs=_top_logprobs(checked),
            template_variables=f.mapping(checked.get("chat_template_kwargs", {}), "chat_template_kwargs"),
            continues=continues,
        )
        usage = f.boolean(f.mapping(options, "stream_options"), "include_usage")
        return ProtocolRequest(call=call, stream=f.boolean(checked, "stream"), include_usage=usage)

    def answer(self, request: ProtocolRequest, answer: ChatAnswer) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{request.id}",
            "object": "chat.completion",
            "created": request.created,
            "model": request.call.model,
            "choices": [
                {
                    "index": i,
                    "message": _assistant_message(choice),
                    "logprobs": _logprobs(request, choice),
                    "finish_reason": choice.reason,
                }
                for i, choice in enumerate(answer.choices)
            ],
            "usage": _usage(answer),
        }

    def events(self, request: ProtocolRequest, answer: ChatAnswer) -> Iterator[str]:
        def chunk(index: int, delta: dict[str, Any], **changes: Any) -> str:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **changes}
            return sse({**head, "choices": [choice]})

        head: dict[str, Any] = {
            "id": f"chatcmpl-{request.id}",
            "object": "chat.completion.chunk",
            "created": request.created,
            "model": request.call.model,
        }
        if request.include_usage:
            head["usage"] = None
        for i, choice in enumerate(answer.choices):
            message = choice.message
            # The log-probs come with the first piece: those of all tokens, tool calls included.
            yield chunk(i, {"role": "assistant", "content": ""}, logprobs=_logprobs(request, choice))
            for piece in pieces(message.reasoning):
                yield chunk(i, {"reasoning_content": piece})
            for piece in pieces(message.content):
                yield chunk(i, {"content": piece})
            for number, tool_call in enumerate(message.tool_calls):
                function = {"name": tool_call.name, "arguments": ""}
                opening = {"index": number, "id": tool_call.id, "type": "function", "function": function}
                yield chunk(i, {"tool_calls": [opening]})
                for piece in pieces(tool_call.arguments):
                    yield chunk(i, {"tool_calls": [{"index": number, "function": {"arguments": piece}}]})
            yield chunk(i, {}, finish_reason=choice.reason)
        if request.include_usage:
            yield sse({**head, "choices": [], "usage": _usage(answer)})
        yield sse("[DONE]")

    def error(self, refused: RefusedCall) -> dict[str, Any]:
        return openai_error(refused)


def openai_error(refused: RefusedCall) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    status = refused.status
    kinds = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 409: "conflict_error"}
    kinds |= {429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": str(refused), "type": kind, "param": refused.field or None, "code": refused.code or None}
    return {"error": error}


def _message(value: Any, where: str, ignored: Collection[str]) -> Message:
    body = f.mapping(value, where)
    role = _ROLES.get(body.get("role")) if isinstance(body.get("role"), str) else None
    if role is None:
        f.wrong(f"{where}.role", body.get("role"), "system, developer, user, assistant or tool")
    if role != "tool" and body.keys() == {"role", "content"} and isinstance(body["content"], str):
        return Message(role, body["content"])  # Most are, and every call brings all of a conversation
    f.only(body, _KNOWN, where, ignored, "messages")
    content = body.get("content")
    if content is None and role != "assistant":
        f.wrong(f"{where}.content", None, "a text")
    text = "" if content is None else f.texts_of_parts(content, f"{where}.content", _PARTS.get(role, ("text",)))
    if role != "assistant" and body.get("tool_calls"):
        f.wrong(f"{where}.tool_calls", body["tool_calls"], "nothing: only the assistant calls tools")
    calls = f.items(body.get("tool_calls") or [], f"{where}.tool_calls", MAX_TOOLS)
    at = f"{where}."
    return Message(
        role,
        text or f.text(body, "refusal", at) or "",
        tool_calls=tuple(_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)),
        tool_call_id=f.needed_text(body, "tool_call_id", at, 512) if role == "tool" else "",
        name=f.text(body, "name", at) or "",
        reasoning=f.text(body, "reasoning_content", at) or f.text(body, "reasoning", at) or "",
    )


def _tool_call(value: Any, where: str) -> ToolCall:
    body = f.mapping(value, where)
    if body.get("type", "function") != "function":
        f.wrong(f"{where}.type", body.get("type"), "function")
    function = f.mapping(body.get("function"), f"{where}.function")
    arguments = f.text(function, "arguments", f"{where}.function.")
    name = f.needed_text(function, "name", f"{where}.function.", 256)
    return ToolCall(f.needed_text(body, "id", f"{where}.", 512), name, arguments if arguments is not None else "")


def _tool(value: Any, where: str, ignored: Collection[str]) -> Sequence[ToolSpec]:
    body = f.mapping(value, where)
    kind = body.get("type", "function")
    if kind != "function":
        why = CUSTOM if kind == "custom" else f"there are no tools but functions, got {kind!r:.80}"
        f.hosted(kind, where, why, ignored)
        return ()
    f.only(body, ("type", "function", "cache_control"), where, ignored, "tools")
    return (function_spec(f.mapping(body.get("function"), f"{where}.function"), f"{where}.function", ignored),)


def function_spec(body: dict[str, Any], where: str, ignored: Collection[str], schema: str = "parameters") -> ToolSpec:
    """Return a tool from its name, description and the JSON schema of its arguments."""
    neutral = [name for name, values in _NEUTRAL.items() if any(body.get(name) is value for value in values)]
    if body.get("allowed_callers") == ["direct"]:
        neutral.append("allowed_callers")
    f.only(body, ("type", "name", "description", schema, "strict", *neutral), where, ignored, "tools")
    f.boolean(body, "strict", where=f"{where}.")
    parameters = f.mapping(body.get(schema) or {"type": "object", "properties": {}}, f"{where}.{schema}")
    name = f.needed_text(body, "name", f"{where}.", 256)
    return ToolSpec(name, f.text(body, "description", f"{where}.") or "", parameters)


def chooses_none(choice: Any) -> bool:
    """Return whether no tool is to be called; raises `RefusedCall` for a choice that only a grammar could enforce."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind == "none":
        return True
    if kind != "auto":
        f.refuse_lost("tool_choice", f"{o.NO_GRAMMAR}, so a call can't be made sure; auto and none are fine")
    return False


def with_tool_names(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the messages, each reply of a tool with the name of the tool that the call it answers has."""
    names: dict[str, str] = {}
    named = []
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        if message.role == "tool" and not message.name:
            message = replace(message, name=names.get(message.tool_call_id, ""))
        named.append(message)
    return tuple(named)


def _max_tokens(body: dict[str, Any]) -> int | None:
    old, new = f.integer(body, "max_tokens", 1), f.integer(body, "max_completion_tokens", 1)
    limits = [limit for limit in (old, new) if limit is not None]
    return min(limits) if limits else None


def _top_logprobs(body: dict[str, Any]) -> int | None:
    top = f.integer(body, "top_logprobs", 0, 20)
    if top:
        f.refuse_lost("top_logprobs", f"engines report the log-prob of the sampled token only, got {top}")
    return 0 if f.boolean(body, "logprobs") else None


def _assistant_message(choice: Choice) -> dict[str, Any]:
    message = choice.message
    message_body: dict[str, Any] = {
        "role": "assistant",
        "content": message.content if message.content or not message.tool_calls else None,
        "refusal": None,
    }
    if message.reasoning:
        message_body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        message_body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return message_body


def _logprobs(request: ProtocolRequest, choice: Choice) -> dict[str, Any] | None:
    if request.call.top_logprobs is None:
        return None
    content = [
        {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "replace")), "top_logprobs": []}
        for token, logprob in zip(choice.tokens, choice.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _usage(answer: ChatAnswer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.sampled,
        "total_tokens": answer.prompt_tokens + answer.sampled,
    }
