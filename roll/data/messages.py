"""Chat messages as data sets have them: two spellings, contents in parts, and keys beside the content.

`parse_conversation` returns them as chat templates take them: `role`, `content` as text, and every other key that the
row has a value for (`tool_calls`, `reasoning_content`, `name`, ...). Whether the template writes those is looked at
where it is known (`roll/data/rendered_keys.py`). `learning_flags` reads the keys that say which messages are learnt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from roll.data.rendered_keys import SAYING_KEYS
from roll.types.chat import Message, ToolCall
from roll.utils.pictures import is_media_part, no_pictures
from roll.utils.rows import BadRowError

RowMessage: TypeAlias = Mapping[str, Any]
"""`role` and `content` as texts, and what else is said."""

_SHAREGPT_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "observation": "tool", "function_response": "tool", "tool_response": "tool",
    "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
_SHAREGPT_CALLS = ("function_call", "tool_call")
_TEXT_PARTS = ("text", "input_text", "output_text")

LEARNING_FLAGS = ("loss", "loss_mask", "train", "trainable", "training", "weight", "loss_weight", "train_detail")
"""Keys by which others say whether a message is learnt: ms-swift's `loss`, axolotl's `train` and `train_detail`,
OpenAI's and Together's `weight`, tinker's `trainable`."""
_MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios", "pictures")
_CHAT_KEYS = ("tool_calls", "name", "reasoning_content", "reasoning", "thinking")
_FLAG_WORDS = {"true": True, "1": True, "false": False, "0": False}


def parse_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Parse chat messages from a list or a JSON string; raises `BadRowError` unless a model could answer them."""
    messages = parse_conversation(value, where)
    if messages[-1]["role"] == "assistant":
        raise BadRowError(f"{where}: the last message is the assistant's, so there is nothing to answer; drop it")
    return [without_flags(message) for message in messages]


def parse_conversation(value: Any, where: str, column: str = "messages") -> list[dict[str, Any]]:
    """Parse chat messages from a list or a JSON string, whoever speaks last; raises `BadRowError`.

    A message is `{role, content}` or ShareGPT's `{from, value}`; its content is a text, a list of text parts, or
    nothing where it has tool calls. Keys without a value are left out: Arrow has every key in every message.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (json.JSONDecodeError, RecursionError) as error:
            raise BadRowError(f"{where}: {column} is a string but not JSON: {error}") from error
    if not isinstance(value, Sequence) or not value:
        raise BadRowError(f"{where}: {column} is {value!r:.80}, expected a non-empty list of {{role, content}}")
    return [_parsed(message, where, f"{column}[{position}]") for position, message in enumerate(value)]


def _parsed(message: Any, where: str, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRowError(f"{where}: {name} is {message!r:.80}, {_EXPECTED}")
    fields = {
        str(key): item
        for key, item in message.items()
        if item is not None and not (isinstance(item, list) and not item)
    }
    if "role" not in fields and "from" in fields:
        fields = _of_sharegpt(fields, where, name)
    media = next((key for key in _MEDIA_KEYS if fields.get(key)), None) if len(fields) > 2 else None
    if media is not None and not _is_read(fields[media]):
        raise no_pictures(where, f"{name} has {media!r}, which")
    role, content = fields.pop("role", None), _content(fields.pop("content", None), where, name)
    if content is None and (fields.get("tool_calls") or fields.get("function_call")):
        content = ""  # OpenAI's form of a message that only calls; templates write `None` for null
    if not isinstance(role, str) or content is None:
        raise BadRowError(f"{where}: {name} is {message!r:.80}, {_EXPECTED}")
    if "tool_calls" in fields:
        fields["tool_calls"] = _calls(fields["tool_calls"], where, name)
    return {"role": role, "content": encodable(content, where), **fields}


def _is_read(value: Any) -> bool:
    """Return whether a value of a message is what `roll/data/row_pictures.py` puts there; None is a place."""
    from roll.types.picture import Picture

    return isinstance(value, tuple) and all(item is None or isinstance(item, Picture) for item in value)


_EXPECTED = (
    "expected {'role': ..., 'content': ...} with strings (or ShareGPT's from and value); content may be a list of "
    "{'type': 'text', 'text': ...}, and null beside tool_calls"
)


def _of_sharegpt(message: Mapping[str, Any], where: str, name: str) -> dict[str, Any]:
    role, value = message["from"], message.get("value")
    others = {key: item for key, item in message.items() if key not in ("from", "value")}
    if role in _SHAREGPT_CALLS:
        return {"role": "assistant", "content": "", "tool_calls": _calls(value, where, name), **others}
    return {"role": _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role, "content": value, **others}


def _content(content: Any, where: str, name: str) -> str | None:
    """Return a message's text, written as a string or as a list of text parts; None for anything else."""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return content if isinstance(content, str) else None
    texts = []
    for part in content:
        if not isinstance(part, Mapping):
            return None
        if is_media_part(part):
            raise no_pictures(where, f"{name} has a part of type {part.get('type')!r}, which")
        if part.get("type", "text") not in _TEXT_PARTS:
            raise BadRowError(
                f"{where}: {name} has a part of type {part.get('type')!r:.40}, expected parts of type text alone; "
                "write what it says as text or in a key of the message"
            )
        if not isinstance(part.get("text"), str):
            return None
        texts.append(part["text"])
    return "".join(texts) if texts else None


def _calls(calls: Any, where: str, name: str) -> list[dict[str, Any]]:
    """Return tool calls in OpenAI's form with arguments as values; they may be JSON text, alone, or bare functions."""
    try:
        calls = json.loads(calls) if isinstance(calls, str) else calls
        calls = [calls] if isinstance(calls, Mapping) else calls
        return [_call(call) for call in calls]
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRowError(
            f"{where}: {name} has the tool calls {calls!r:.80}, expected a list of "
            f"{{'type': 'function', 'function': {{'name': ..., 'arguments': {{...}}}}}}: {error}"
        ) from error


def _call(call: Any) -> dict[str, Any]:
    call = {key: item for key, item in call.items() if item is not None}
    function = dict(call["function"]) if isinstance(call.get("function"), Mapping) else call
    if not isinstance(function.get("name"), str):
        raise ValueError("a call has no name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with_values = json.loads(arguments) if arguments.strip() else {}
        arguments = with_values if isinstance(with_values, Mapping) else arguments
    beside = {key: item for key, item in call.items() if key not in ("function", "name", "arguments")}
    return {"type": "function", **beside, "function": {"name": function["name"], "arguments": arguments}}


def parse_tools(value: Any, where: str, column: str = "tools") -> list[dict[str, Any]]:
    """Return the tools of a row in OpenAI's form, written so, as bare functions or JSON text; raise `BadRowError`."""
    tools = value
    if isinstance(value, str):
        try:
            tools = json.loads(value) if value.strip() else []
        except (json.JSONDecodeError, RecursionError) as error:
            raise BadRowError(f"{where}: {column!r} is a string but not JSON: {error}") from error
    if isinstance(tools, Mapping):
        tools = [tools]
    if not isinstance(tools, Sequence) and tools is not None:
        raise BadRowError(f"{where}: {column!r} is {value!r:.80}, {_TOOLS_EXPECTED}")
    parsed = []
    for tool in tools or ():
        if isinstance(tool, str):  # a list of JSON texts, which Arrow can hold
            return parse_tools(f"[{', '.join(str(each) for each in tools or ())}]", where, column)
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRowError(f"{where}: {column!r} has {tool!r:.80}, {_TOOLS_EXPECTED}")
        parsed.append(dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)})
    return parsed


_TOOLS_EXPECTED = (
    "expected a list of tools as {'type': 'function', 'function': {'name': ..., 'parameters': {...}}}, or its JSON "
    "text; rename the column if it holds something else"
)


def learning_flags(messages: Sequence[RowMessage], where: str) -> dict[int, bool]:
    """Return which messages a row says are learnt (True) or not (False), by position; the others it leaves open.

    Raises `BadRowError` for what isn't yes or no, and for words of others than the assistant that shall be learnt.
    """
    flags: dict[int, bool] = {}
    for position, message in enumerate(messages):
        for key in LEARNING_FLAGS:
            if key not in message:
                continue
            value = message[key]
            flag = value if isinstance(value, bool) else _FLAG_WORDS.get(str(value).strip().lower().removesuffix(".0"))
            if flag is None:
                raise BadRowError(
                    f"{where}: messages[{position}] has {key} {value!r:.60}, and a message is learnt or it isn't; "
                    "expected true or false, 1 or 0"
                )
            if flag and message["role"] != "assistant":
                if key == "weight":  # OpenAI: of the assistant's alone
                    continue
                raise BadRowError(
                    f"{where}: messages[{position}] has {key} {value!r} and is of the {message['role']}; only the "
                    "assistant's messages are learnt"
                )
            if flags.setdefault(position, flag) is not flag:
                raise BadRowError(f"{where}: messages[{position}] has flags that contradict each other; keep one")
    return {position: flag for position, flag in flags.items() if messages[position]["role"] == "assistant"}


def without_flags(message: RowMessage) -> dict[str, Any]:
    """Return a message without the keys that say whether it is learnt."""
    return {key: value for key, value in message.items() if key not in LEARNING_FLAGS}


def encodable(text: str, where: str) -> str:
    """Return `text`, unless it holds what no tokenizer takes: JSON can spell half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise BadRowError(f"{where}: the text has {half!r} at {error.start}, half of a surrogate pair") from None
    return text


def refuse_beyond_chat(messages: Sequence[RowMessage], tools: Any, where: str) -> None:
    """Raise `BadRowError` for what `as_chat` can't hold: keys that say something, and tools of a row's own."""
    keys = [key for message in messages for key in message if key in SAYING_KEYS and key not in _CHAT_KEYS]
    what = "a column 'tools'" if tools else f"{keys[0]!r} in a message" if keys else None
    if what is not None:
        raise BadRowError(f"{where} has {what}, which can't be carried here; write it in content, or drop it")


def as_chat(messages: Sequence[RowMessage]) -> tuple[Message, ...]:
    """Return parsed messages in the form that conversations with tools and environments carry."""
    return tuple(
        Message(
            message["role"],
            message["content"],
            tool_calls=tuple(
                ToolCall(str(call.get("id", f"call_{n}")), call["function"]["name"], _as_text(call["function"]))
                for n, call in enumerate(message.get("tool_calls", ()))
            ),
            tool_call_id=str(message.get("tool_call_id", "")),
            name=str(message.get("name", "")),
            reasoning=str(
                message.get("reasoning_content") or message.get("reasoning") or message.get("thinking") or ""
            ),
        )
        for message in messages
    )


def _as_text(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
