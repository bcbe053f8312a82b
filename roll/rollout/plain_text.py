"""Messages as token ids without a chat template, and what a chat template (`chat.py`) is asked for likewise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from roll.data.templates import TemplateError
from roll.envs.base import Message
from roll.rollout.tokenizing import decode, encode
from roll.types.chat import ToolSpec


class PlainText:
    """How messages become tokens without a chat template: their contents as they are, joined."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def with_variables(self, variables: Mapping[str, Any]) -> PlainText:
        """Return the same with further variables of the chat template (`chat_template_kwargs`).

        Raises `TemplateError` for one that the template doesn't read.
        """
        if variables:
            raise TemplateError("chat_template_kwargs need a chat template, and the tokenizer has none")
        return self

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        """Return a whole prompt, up to where the response begins; it begins with the token that the tokenizer itself
        puts before a text, if any."""
        return self.encode_prompt(self.text(messages, tools))

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        """Return the text of a conversation, up to where the response begins. Raises `TemplateError`."""
        if tools or any(message.tool_calls for message in messages):
            raise TemplateError("tools need a chat template, and the tokenizer has none")
        return "".join(message.content for message in messages)

    def begun_text(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        """Return the text of a conversation up to the end of its last message, which a response goes on from.

        Raises `TemplateError`, also where that message isn't an assistant's text at the end of what is written.
        """
        return self.text(messages, tools)

    def check_history(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, since: int = 0) -> None:
        """Raise `TemplateError` if something that an assistant said isn't shown as that, of the messages from `since`
        on: those before are carried as they were sampled."""

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

    def encode_prompt(self, text: str) -> tuple[int, ...]:
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

    def end_tokens(self) -> tuple[int, ...]:
        """Return the tokens that end a response, besides the tokenizer's own."""
        return ()

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text as it stands."""
        return encode(self._tokenizer, text)

    @cached_property
    def _begin(self) -> tuple[int, ...]:
        empty = tuple(self._tokenizer("", add_special_tokens=True).input_ids)
        return empty[:1] if empty and empty[0] == self._tokenizer.bos_token_id else ()
