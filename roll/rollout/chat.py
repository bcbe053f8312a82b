"""Messages as token ids: whole prompts, and what a reply adds to tokens that are carried.

    prompt(messages)            sampled ...            reply(messages, sampled)           sampled ...
    [template of the messages]  [what the policy said] [closing, messages, next opening]  [what it said then]

Carried tokens are right only under a template that writes a conversation by adding to it. `check_template` finds those
that don't.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any

from jinja2.exceptions import TemplateError as JinjaError

from roll.data.templates import TemplateError, missing_from, render_chat
from roll.envs.base import Message

_MARK = "<~sampled response~>"
_ANCHOR = "a"
"""Text in front of a piece while it is tokenised: some tokenizers put a space before the first word of a text."""
_THINK = ("<think>", "</think>")
_WAY_OUT = (
    "Tokens can't be carried from turn to turn under it. Set sample_unit: step, where every prompt is rendered again, "
    "or use another chat template"
)


class PlainText:
    """How messages become tokens without a chat template: their contents as they are, joined."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return a whole prompt, up to where the response begins; it begins with the token that the tokenizer itself
        puts before a text, if any."""
        return (*self._begin, *self.reply(messages, ()))

    def reply(self, messages: Sequence[Message], sampled: Sequence[int]) -> tuple[int, ...]:  # noqa: ARG002
        """Return what stands between the `sampled` response and the next: its closing, the messages, an opening."""
        return self.encode("".join(message.content for message in messages))

    def opens_with(self, tags: tuple[str, str]) -> bool:  # noqa: ARG002
        """Return whether every prompt ends inside a thought that the template itself has opened."""
        return False

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text as it stands."""
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)

    @cached_property
    def _begin(self) -> tuple[int, ...]:
        empty = tuple(self._tokenizer("", add_special_tokens=True).input_ids)
        return empty[:1] if empty and empty[0] == self._tokenizer.bos_token_id else ()


class ChatTemplate(PlainText):
    """The same by a chat template. A reply costs the same however long the conversation is."""

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self.encode(self.text(messages))

    def reply(self, messages: Sequence[Message], sampled: Sequence[int]) -> tuple[int, ...]:
        """A response that ends with the very token that closes it isn't closed twice."""
        ids = self._encode_after(self.reply_text(messages))
        closing = self._closing(ids)
        if closing and sampled and sampled[-1] == ids[closing - 1]:
            return ids[closing:]
        return ids

    def text(self, messages: Sequence[Message]) -> str:
        """Return the template's text of a conversation, up to where the response begins.

        Raises `TemplateError`, also when it leaves out a message that isn't the assistant's.
        """
        text = self.unchecked(messages)
        _check_shown(text, messages)
        return text

    def unchecked(self, messages: Sequence[Message]) -> str:
        """Return `text`, whatever it leaves out."""
        history = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return render_chat(self._tokenizer, history, opens_answer=True)
        except JinjaError as error:
            roles = ", ".join(message.role for message in messages)
            raise TemplateError(
                f"the tokenizer's chat template refuses a conversation of {roles}: {error}. If it is the system "
                "message, set system_template to null"
            ) from error

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

    def _encode_after(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text that has something before it."""
        ids, anchor = self.encode(_ANCHOR + text), self._anchor
        return ids[len(anchor) :] if ids[: len(anchor)] == anchor else self.encode(text)

    @cached_property
    def _anchor(self) -> tuple[int, ...]:
        return self.encode(_ANCHOR)

    def _closing(self, ids: Sequence[int]) -> int:
        """Count the tokens that close a response: up to its special token; 0 if there is none."""
        for i, token in enumerate(ids):
            if token in self._special:
                return i + 1
            if self._tokenizer.decode([token]).strip():
                break
        return 0

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self._tokenizer.all_special_ids) | frozenset(self._tokenizer.added_tokens_decoder)


def _check_shown(text: str, messages: Sequence[Message]) -> None:
    """Refuse a template without a branch for a role: it writes nothing for it."""
    shown = [{"role": m.role, "content": m.content} for m in messages if m.role != "assistant"]
    lost = missing_from(text, shown)
    if lost is not None:
        role, content = shown[lost]["role"], shown[lost]["content"]
        fix = "set system_template to null" if role == "system" else "give the message role user"
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


def _difference(rendered: str, carried: str) -> str:
    """Return where two texts differ first."""
    at = next(i for i, (a, b) in enumerate(zip_longest(rendered, carried)) if a != b)
    start = max(0, at - 20)
    return f"where the policy saw {carried[start : at + 40]!r} it writes {rendered[start : at + 40]!r} later"
