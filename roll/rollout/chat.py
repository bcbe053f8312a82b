"""Messages as token ids: whole prompts, and what a reply adds to tokens that are carried.

    prompt(messages)            sampled ...            reply(messages, sampled)           sampled ...
    [template of the messages]  [what the policy said] [closing, messages, next opening]  [what it said then]

Carried tokens are right only under a template that writes a conversation by adding to it. `check_template` finds those
that don't. A template that knows nothing of tools, of calls or of their results gets them as text (`tool_text.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

from jinja2.exceptions import TemplateError as JinjaError

from roll.data.templates import TemplateError, missing_from, render_chat
from roll.envs.base import Message
from roll.rollout.tokenizing import decode, encode
from roll.rollout.tool_text import call_as_text, results_as_user, specs_text, template_message, with_specs
from roll.types.chat import ToolCall, ToolSpec

_KEPT_SPECS = 64  # sets of tools whose text is kept
_MARK = "<~sampled response~>"
_ANCHOR = "a"
"""Text in front of a piece while it is tokenised: some tokenizers put a space before the first word of a text."""
_PROBE = "probe_of_tools"
_WITHOUT_SYSTEM = (
    "set system_template to null where an environment wrote it (custom_envs.<tag>), write that of a row into the "
    "user's message, and for tools take a template with tools or a system role"
)
_RESULT = Message("tool", "probe of results", tool_call_id="a00000000", name=_PROBE)
_THINK = ("<think>", "</think>")
_WAY_OUT = (
    "Tokens can't be carried from turn to turn under it. Set sample_unit: step, where every prompt is rendered again, "
    "or use another chat template"
)


class PlainText:
    """How messages become tokens without a chat template: their contents as they are, joined."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        """Return a whole prompt, up to where the response begins; it begins with the token that the tokenizer itself
        puts before a text, if any."""
        return self.encode_whole(self.text(messages, tools))

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        """Return the text of a conversation, up to where the response begins. Raises `TemplateError`."""
        if tools or any(message.tool_calls for message in messages):
            raise TemplateError("tools need a chat template, and the tokenizer has none")
        return "".join(message.content for message in messages)

    def reply(self, messages: Sequence[Message], sampled: Sequence[int]) -> tuple[int, ...]:  # noqa: ARG002
        """Return what stands between the `sampled` response and the next: its closing, the messages, an opening."""
        return self.encode(self.reply_text(messages))

    def reply_text(self, messages: Sequence[Message]) -> str:
        """Return the same as text, with the closing."""
        return "".join(message.content for message in messages)

    def continuation(
        self,
        before: Sequence[Message],  # noqa: ARG002
        response: Message,  # noqa: ARG002
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> str:
        """Return what is written after a response to the conversation `before`, when `messages` follow it.

        Whatever would be written for the response itself. Raises `TemplateError` where that can't be told apart.
        """
        return self.text(messages, tools)

    def follow(self, text: str, sampled: Sequence[int]) -> tuple[str, tuple[int, ...]]:  # noqa: ARG002
        """Return what a `continuation` adds to a sampled response, as text and as token ids."""
        return text, self.encode(text)

    def encode_whole(self, text: str) -> tuple[int, ...]:
        """Return the token ids of the text of a whole prompt."""
        return (*self._begin, *self.encode(text))

    def encode_after(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text that has something before it."""
        return self.encode(text)

    def closing_text(self, sampled: Sequence[int]) -> str:  # noqa: ARG002
        """Return what of a sampled response's text is its closing; nothing without a chat template."""
        return ""

    def sampled_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled tokens as it stands in a context, special tokens included."""
        return decode(self._tokenizer, token_ids, skip_special_tokens=False)

    def opens_with(self, tags: tuple[str, str]) -> bool:  # noqa: ARG002
        """Return whether every prompt ends inside a thought that the template itself has opened."""
        return False

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text as it stands."""
        return encode(self._tokenizer, text)

    @cached_property
    def _begin(self) -> tuple[int, ...]:
        empty = tuple(self._tokenizer("", add_special_tokens=True).input_ids)
        return empty[:1] if empty and empty[0] == self._tokenizer.bos_token_id else ()


class ChatTemplate(PlainText):
    """The same by a chat template. A reply costs the same however long the conversation is."""

    def encode_whole(self, text: str) -> tuple[int, ...]:
        """The template itself writes the token that begins a text."""
        return self.encode(text)

    def reply(self, messages: Sequence[Message], sampled: Sequence[int]) -> tuple[int, ...]:
        """A response that ends with the very token that closes it isn't closed twice."""
        return self.follow(self.reply_text(messages), sampled)[1]

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        """Return the template's text of a conversation, up to where the response begins.

        Raises `TemplateError`, also when it leaves out a message that isn't the assistant's.
        """
        text = self.unchecked(messages, tools)
        _check_shown(text, messages)
        return text

    def unchecked(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, opens: bool = True) -> str:
        """Return `text`, whatever it leaves out; with `opens` off up to the end of the last message."""
        shown = list(messages)
        if tools and not self._knows_tools:
            shown, tools = with_specs(shown, self._specs_text(tools)), ()
        if any(message.tool_calls for message in shown) and not self._knows_calls:
            shown = [call_as_text(message) if message.tool_calls else message for message in shown]
        if any(message.role == "tool" for message in shown) and not self._knows_results:
            shown = results_as_user(shown)
        return self._render(shown, tools, opens=opens)

    @cached_property
    def _specs(self) -> dict[int, tuple[Sequence[ToolSpec], str]]:
        """By the identity of tools: they, and their text. Requests bring the very same ones again and again."""
        return {}

    def _specs_text(self, tools: Sequence[ToolSpec]) -> str:
        kept = self._specs.get(id(tools))  # held here, so that nothing else gets their identity
        if kept is None:
            if len(self._specs) >= _KEPT_SPECS:
                self._specs.clear()
            kept = self._specs[id(tools)] = (tools, specs_text(tools))
        return kept[1]

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, opens: bool = True) -> str:
        history, specs = [template_message(message) for message in messages], [tool.for_template() for tool in tools]
        try:
            return render_chat(self._tokenizer, history, opens_answer=opens, tools=specs)
        except (JinjaError, TypeError) as error:  # TypeError: what filters do with values that they don't take
            roles = ", ".join(message.role for message in messages)
            raise TemplateError(
                f"the tokenizer's chat template refuses a conversation of {roles}: {error}. If it is the system "
                f"message, {_WITHOUT_SYSTEM}"
            ) from error

    def _shows(self, word: str, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> bool:
        try:
            return word in self._render(messages, tools)
        except TemplateError:
            return False

    @cached_property
    def _knows_tools(self) -> bool:
        tool = ToolSpec(_PROBE, "-", {"type": "object", "properties": {}})
        return self._shows(_PROBE, [Message("user", "-")], [tool])

    @cached_property
    def _knows_calls(self) -> bool:
        asked = [Message("user", "-"), Message("assistant", "", tool_calls=(ToolCall("a00000000", _PROBE, "{}"),))]
        return self._shows(_PROBE, asked) or self._shows(_PROBE, [*asked, _RESULT])

    @cached_property
    def _knows_results(self) -> bool:
        call = ToolCall("a00000000", _PROBE, "{}")
        asked = Message("assistant", "", tool_calls=(call,)) if self._knows_calls else Message("assistant", "-")
        return self._shows(_RESULT.content, [Message("user", "-"), asked, _RESULT])

    def continuation(
        self, before: Sequence[Message], response: Message, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> str:
        """Read off the conversation with a mark in the response's place. A template that takes results of tools only
        after calls gets the calls, and what it writes for the whole must begin with what it writes up to them."""
        try:
            after = self._after_mark(before, messages, partial(self.text, tools=tools))
        except TemplateError:
            if not response.tool_calls:
                raise
            after = None
        if after is not None:
            return after
        closing = self._after_mark(before, (), partial(self.unchecked, tools=tools, opens=False))
        upto = self.unchecked([*before, response], tools, opens=False)
        whole = self.text([*before, response, *messages], tools)
        if closing is None or not upto.endswith(closing) or not whole.startswith(upto):
            raise TemplateError(f"the chat template doesn't show earlier responses as they were. {_WAY_OUT}")
        return closing + whole[len(upto) :]

    def _after_mark(
        self, before: Sequence[Message], messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
    ) -> str | None:
        """Return what is written after a mark in the response's place; None where it isn't to be seen once."""
        for make_mark in (lambda: _MARK, lambda: _other_mark(before, messages)):  # messages may hold the first
            mark = make_mark()
            _, *after = render([*before, Message("assistant", mark), *messages]).split(mark)
            if len(after) == 1:
                return after[0]
        return None

    def follow(self, text: str, sampled: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """A response that ends with the very token that closes it isn't closed twice."""
        ids = self.encode_after(text)
        closing = self._closing(ids)
        if closing and sampled and sampled[-1] in (ids[closing - 1], self._end_of_call):
            return text.partition(self._token_text(ids[closing - 1]))[2], ids[closing:]
        return text, ids

    def closing_text(self, sampled: Sequence[int]) -> str:
        closes = bool(sampled) and sampled[-1] in self._special
        return self._token_text(sampled[-1]) if closes else ""

    def sampled_text(self, token_ids: Sequence[int]) -> str:
        """Behind something: some tokenizers leave out the space before the first word of a text."""
        whole = decode(self._tokenizer, (*self._anchor, *token_ids), skip_special_tokens=False)
        return whole[len(_ANCHOR) :] if whole.startswith(_ANCHOR) else super().sampled_text(token_ids)

    def reply_text(self, messages: Sequence[Message]) -> str:
        """Return what the template writes after a response, when these messages follow it.

        Read off a conversation of a word and a mark in the response's place, so the template does with the messages
        whatever it does (strip them, wrap them, join several) and adds to the first exchange what it likes.
        """
        text = self.text([Message("user", "-"), Message("assistant", _MARK), *messages])
        _, mark, after = text.partition(_MARK)
        if not mark:
            raise TemplateError(f"the chat template doesn't show earlier responses as they were. {_WAY_OUT}")
        return after

    def opens_with(self, tags: tuple[str, str]) -> bool:
        text = self.text([Message("user", "-")])
        return text.rfind(tags[0]) > text.rfind(tags[1])

    def encode_after(self, text: str) -> tuple[int, ...]:
        ids, anchor = self.encode(_ANCHOR + text), self._anchor
        return ids[len(anchor) :] if ids[: len(anchor)] == anchor else self.encode(text)

    @cached_property
    def _anchor(self) -> tuple[int, ...]:
        return self.encode(_ANCHOR)

    def _token_text(self, token: int) -> str:
        text = self._token_texts.get(token)
        if text is None:
            text = self._token_texts[token] = decode(self._tokenizer, (token,), skip_special_tokens=False)
        return text

    @cached_property
    def _token_texts(self) -> dict[int, str]:
        """What closes responses is asked for at each of them."""
        return {}

    def _closing(self, ids: Sequence[int]) -> int:
        """Count the tokens that close a response: up to its special token; 0 if there is none."""
        for i, token in enumerate(ids):
            if token in self._special:
                return i + 1
            if self._token_text(token).strip():
                break
        return 0

    @cached_property
    def _end_of_call(self) -> int | None:
        """What closes a response of Llama's that calls a tool, in place of the end of a turn."""
        return self._tokenizer.get_vocab().get("<|eom_id|>")

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self._tokenizer.all_special_ids) | frozenset(self._tokenizer.added_tokens_decoder)


def _other_mark(*said: Sequence[Message]) -> str:
    whole = repr(said).encode("utf-8", "backslashreplace")
    return f"<~{hashlib.blake2b(whole, digest_size=16).hexdigest()}~>"


def _check_shown(text: str, messages: Sequence[Message]) -> None:
    """Refuse a template without a branch for a role: it writes nothing for it."""
    shown = [{"role": m.role, "content": m.content} for m in messages if m.role != "assistant"]
    lost = missing_from(text, shown)
    if lost is not None:
        role, content = shown[lost]["role"], shown[lost]["content"]
        fix = _WITHOUT_SYSTEM if role == "system" else "give the message role user"
        raise TemplateError(
            f"the tokenizer's chat template leaves out a message of role {role}: {content!r:.80}; the policy would "
            f"never see it. Choose another template, or {fix}"
        )


def check_template(tokenizer: Any, thinking_tags: tuple[str, str] | None = None) -> None:
    """Raise `TemplateError` if tokens can't be carried under the tokenizer's chat template.

    Compares the template's text of conversations, at every length, with the text that is made by adding to the one
    before. Templates fail that leave out what earlier responses thought, number the messages, or open a response in
    another way than they show it later.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise TemplateError("the tokenizer has no chat template")
    template = ChatTemplate(tokenizer)
    plain = ("red", "green and blue", "white", "black")
    _check(template, plain, "earlier messages")
    for opening, closing in dict.fromkeys([_THINK, thinking_tags or _THINK]):
        thoughts = tuple(f"{opening}\na {word} thought\n{closing}\n\n{word}" for word in plain)
        _check(template, thoughts, f"what earlier responses thought ({opening} ... {closing})")


def _check(template: ChatTemplate, responses: Sequence[str], what: str) -> None:
    for begin in ([Message("system", "Play well.")], []):
        history = [*begin, Message("user", "Which colour is it?")]
        try:
            carried = template.text(history)
        except TemplateError:
            continue  # it takes no system message
        for response in responses:
            news = Message("user", "And the next?")
            history += [Message("assistant", response), news]
            carried += response + template.reply_text([news])
            rendered = template.unchecked(history)
            if rendered != carried:
                raise TemplateError(f"the chat template rewrites {what}: {_difference(rendered, carried)}. {_WAY_OUT}")


def check_calls(template: PlainText, thinking_tags: tuple[str, str] | None, tools: Sequence[ToolSpec]) -> None:
    """Raise `TemplateError` if the results of tools can't be added to carried tokens, as `check_template` does it.

    A template may leave out the thoughts of earlier questions: between a question and its answer nothing may change.
    """
    opening, closing = thinking_tags or _THINK
    asked, said, calls, news = [Message("user", "Which colour is it?")], [], [], []
    for number, word in enumerate(("red", "green")):
        said.append(f"{opening}\na {word} thought\n{closing}\n\n{word}" if thinking_tags else word)
        calls.append(ToolCall(f"call{number:05d}", tools[0].name, "{}"))
        news.append(Message("tool", f"result {number}", tool_call_id=calls[-1].id, name=tools[0].name))
    history = [*asked, Message("assistant", said[0]), news[0], Message("assistant", said[1]), news[1]]
    try:
        rendered = template.text(history, tools)
    except TemplateError:
        # It takes results only after calls, which it writes in its own way: they must at least be what it adds.
        template.continuation(asked, Message("assistant", said[0], (calls[0],)), news[:1], tools)
        return
    carried = template.text(asked, tools)
    for response, reply in zip(said, news, strict=True):
        carried += response + template.reply_text([reply])
    if rendered != carried:
        raise TemplateError(
            f"the chat template rewrites what stood before the results of tools: {_difference(rendered, carried)}. "
            "Use another chat template"
        )


def _difference(rendered: str, carried: str) -> str:
    """Return where two texts differ first."""
    at = next(i for i, (a, b) in enumerate(zip_longest(rendered, carried)) if a != b)
    start = max(0, at - 20)
    return f"where the policy saw {carried[start : at + 40]!r} it writes {rendered[start : at + 40]!r} later"
