"""Whether tokens can be carried under a chat template: what it writes of a conversation adds to what it wrote before.

    the template's text of the conversation  ==  prompt + response + reply + response + reply

The responses are those that a model of the template's family would give: it begins where the prompt ends, so a thought
that the prompt has opened isn't opened again, and what it thinks stands where the template puts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from roll.data.templates import TemplateError
from roll.envs.base import Message
from roll.rollout.chat_format import WAY_OUT, ChatTemplate
from roll.rollout.plain_text import PlainText
from roll.types.chat import THINK_TAGS, ToolCall, ToolSpec

_ASKED = Message("user", "Which colour is it?")
_KEEPS_THOUGHTS = (("preserve_thinking", True), ("truncate_history_thinking", False))
"""Variables that templates have for it: Qwen3.6's and Gemma 4's, Nemotron 3's."""
_WORDS = ("red", "green and blue", "white", "black")

Say = Callable[[Sequence[Message], Message], tuple[str, Message]]
"""From a conversation and a message with thought and content apart: what the policy says, and the message that stands
for it in the conversation."""


def thought_tags(template: PlainText, thinking_tags: tuple[str, str] | None) -> tuple[str, str] | None:
    """Return the tags around thoughts: where none are given, those of a thought that the template itself opens."""
    if thinking_tags is not None:
        return thinking_tags
    try:
        return THINK_TAGS if template.opens_with(THINK_TAGS) else None
    except TemplateError:  # it takes no text of a user's, which whoever renders one is told
        return None


def check_template(
    tokenizer: Any, thinking_tags: tuple[str, str] | None = None, variables: Mapping[str, Any] | None = None
) -> None:
    """Raise `TemplateError` if tokens can't be carried under the tokenizer's chat template.

    Compares the template's text of conversations, at every length, with the text that is made by adding to the one
    before. Templates fail that leave out what earlier responses thought, number the messages, or open a response in
    another way than they show it later.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise TemplateError("the tokenizer has no chat template")
    template = ChatTemplate(tokenizer, variables)
    pairs = list(dict.fromkeys([THINK_TAGS, thinking_tags or THINK_TAGS]))
    opened = any(template.opens_with(tags) for tags in pairs)
    if not opened:
        _check(template, None, "earlier messages")
    for tags in pairs:
        if tags[1] not in template.opening:  # else the prompt has thought already, and the model doesn't any more
            _check(template, tags, f"what earlier responses thought ({tags[0]} ... {tags[1]})")


def check_calls(template: PlainText, thinking_tags: tuple[str, str] | None, tools: Sequence[ToolSpec]) -> None:
    """Raise `TemplateError` if the results of tools can't be added to carried tokens, as `check_template` does it.

    A template may leave out the thoughts of earlier questions: between a question and its answer nothing may change.
    """
    if not isinstance(template, ChatTemplate):
        raise TemplateError("tools need a chat template, and the tokenizer has none")
    tags = thought_tags(template, thinking_tags)
    thinks = tags is not None and tags[1] not in template.opening
    calls = [ToolCall(f"call{number:05d}", tools[0].name, "{}") for number in range(2)]
    messages = [
        Message("assistant", "", (call,), reasoning=f"a {word} thought" if thinks else "")
        for call, word in zip(calls, _WORDS, strict=False)
    ]
    news = [
        Message("tool", f"result {number}", tool_call_id=call.id, name=call.name) for number, call in enumerate(calls)
    ]
    in_text = [Message("assistant", word, reasoning=m.reasoning) for word, m in zip(_WORDS, messages, strict=False)]
    faults = []
    # As text without calls; with calls, where the template writes those; with the thought in the content of calls.
    for response, say in (
        (in_text, _as_content(template, tags)),
        (messages, _as_written(template, tools)),
        (messages, _with_thought_in_content(template, tags, tools)),
    ):
        fault = _fault(template, [_ASKED], response, say, news, tools)
        if not fault:
            return
        faults.append(fault)
    raise TemplateError(
        f"the chat template rewrites what stood before the results of tools: {faults[0]}. Use another chat template"
    )


def _check(template: ChatTemplate, tags: tuple[str, str] | None, what: str) -> None:
    fault = _conversation_fault(template, tags)
    if fault:
        raise TemplateError(f"the chat template rewrites {what}: {fault}. {WAY_OUT}{_keeps_with(template, tags)}")


def _conversation_fault(template: ChatTemplate, tags: tuple[str, str] | None) -> str:
    """Return what is wrong with a conversation of questions and answers, with a thought in each if there are tags."""
    messages = [Message("assistant", word, reasoning=f"a {word} thought" if tags else "") for word in _WORDS]
    news = [Message("user", "And the next?")] * len(messages)
    for begin in ([Message("system", "Play well."), _ASKED], [_ASKED]):
        try:
            template.text(begin)
        except TemplateError:
            continue  # it takes no system message
        faults = []
        for say in (_as_content(template, tags), _as_written(template, ())):
            fault = _fault(template, begin, messages, say, news, ())
            if not fault:
                break
            faults.append(fault)
        else:
            return faults[0]
    return ""


def _keeps_with(template: ChatTemplate, tags: tuple[str, str] | None) -> str:
    """Return the variable with which the template keeps earlier thoughts, as the end of a sentence; found by trying."""
    for name, value in _KEEPS_THOUGHTS if tags else ():
        try:
            other = template.with_variables({name: value})
        except TemplateError:  # it doesn't read that
            continue
        if isinstance(other, ChatTemplate) and not _conversation_fault(other, tags):
            return f"; with chat_template_kwargs: {{{name}: {str(value).lower()}}} this one keeps them"
    return ""


def _fault(
    template: ChatTemplate,
    begin: Sequence[Message],
    messages: Iterable[Message],
    say: Say,
    news: Iterable[Message],
    tools: Sequence[ToolSpec],
) -> str:
    """Return how the template's text of a conversation isn't what is made by adding to it; nothing if it is."""
    history = list(begin)
    try:
        carried = template.text(history, tools)
        for message, reply in zip(messages, news, strict=True):
            text, shown = say(history, message)
            if any(part not in text for part in (message.reasoning, message.content)):
                return f"it leaves out {message.reasoning or message.content!r}"
            history += [shown, reply]
            carried += text + _reply(template, shown, reply, tools)
            rendered = template.unchecked(history, tools)
            if rendered != carried:
                return _difference(rendered, carried)
    except TemplateError as error:
        return str(error).removesuffix(f". {WAY_OUT}")
    return ""


def _reply(template: ChatTemplate, response: Message, news: Message, tools: Sequence[ToolSpec]) -> str:
    try:
        return template.reply_text([news])
    except TemplateError:
        if not response.tool_calls:
            raise
        # It takes results only after calls.
        return template.continuation([Message("user", "-")], response, [news], tools)


def _as_content(template: ChatTemplate, tags: tuple[str, str] | None) -> Say:
    """Return the response as content alone: a thought between its tags, less what the prompt has of it already."""

    def say(_: Sequence[Message], message: Message) -> tuple[str, Message]:
        content = _thought_text(tags, message) + message.content
        opened = tags is not None and bool(message.reasoning) and template.opens_with(tags)
        begun = template.opening[template.opening.rfind(tags[0]) :] if opened and tags is not None else ""
        if content.startswith(begun):
            return content.removeprefix(begun), Message("assistant", content)
        return content.partition(f"{tags[0]}\n")[2] if tags else content, Message("assistant", content)

    return say


def _as_written(template: ChatTemplate, tools: Sequence[ToolSpec]) -> Say:
    """Return thought, content and calls apart, as the template itself writes a response that was just given."""

    def say(history: Sequence[Message], message: Message) -> tuple[str, Message]:
        return template.response_text(history, message, tools), message

    return say


def _with_thought_in_content(template: ChatTemplate, tags: tuple[str, str] | None, tools: Sequence[ToolSpec]) -> Say:
    def say(history: Sequence[Message], message: Message) -> tuple[str, Message]:
        shown = Message("assistant", _thought_text(tags, message) + message.content, message.tool_calls)
        return template.response_text(history, shown, tools), shown

    return say


def _thought_text(tags: tuple[str, str] | None, message: Message) -> str:
    if tags is None or not message.reasoning:
        return ""
    return f"{tags[0]}\n{message.reasoning}\n{tags[1]}\n\n"


def _difference(rendered: str, carried: str) -> str:
    """Return where two texts differ first."""
    at = next(i for i, (a, b) in enumerate(zip_longest(rendered, carried)) if a != b)
    start = max(0, at - 20)
    return f"where the policy saw {carried[start : at + 40]!r} it writes {rendered[start : at + 40]!r} later"
