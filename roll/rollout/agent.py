"""Between text and tokens: observations become prompt tokens, sampled tokens become the text of an action.

Tokens are carried, never re-made: a later turn adds only the tokens that the environment's reply brings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roll.envs.base import Message, Observation
from roll.rollout.chat_checks import check_calls, check_template, thought_tags
from roll.rollout.chat_format import ChatTemplate
from roll.rollout.plain_text import PlainText
from roll.rollout.tokenizing import Marks, decode
from roll.types.chat import THINK_TAGS, ToolSpec
from roll.types.trajectory import Task

_END_TOKENS = 32
"""Tokens of a prompt that are looked at for an opened thought: a tag has one to eight, and white space may follow."""


class PromptTooLong(ValueError):
    """A first prompt exceeds the limit and the configuration says to leave such tasks out."""


FirstPrompt = Callable[[Task, Observation], tuple[int, ...]]
"""Renders the first prompt of a task; `data.PromptEncoder` does it for dataset rows. Raises `PromptTooLong`."""


class Agent:
    """How the policy meets an environment.

    Args:
        first_prompt: renders the first observation; None: like any messages.
        chat: whether prompts use the tokenizer's chat template; replies then do too. None: if it has one.
        keep_stop_string: whether the action's text includes the stop string that ended it.
        variables: of the chat template (`chat_template_kwargs`).
    """

    def __init__(
        self,
        tokenizer: Any,
        first_prompt: FirstPrompt | None = None,
        *,
        chat: bool | None = None,
        keep_stop_string: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._first_prompt = first_prompt
        self._chat = bool(getattr(tokenizer, "chat_template", None)) if chat is None else chat
        self._variables = dict(variables or {})
        self._rendering = (
            ChatTemplate(tokenizer, self._variables)
            if self._chat
            else PlainText(tokenizer).with_variables(self._variables)
        )
        self._keep_stop_string = keep_stop_string
        self.marks = Marks(tokenizer, self._rendering.end_tokens)

    @property
    def chat(self) -> PlainText:
        """Return how messages become tokens."""
        return self._rendering

    def start(self, task: Task, observation: Observation) -> tuple[int, ...]:
        """Return the tokens of the first prompt."""
        if self._first_prompt is None:
            return self.prompt(observation.messages)
        return self._first_prompt(task, observation)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        """Return the tokens of a conversation, up to where the response begins; raises `TemplateError`."""
        return self._rendering.prompt(messages, tools)

    def reply(self, observation: Observation, sampled: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that the environment's reply adds after the `sampled` response.

        They are its turn's closing, the reply, and the opening of the next response.
        """
        return self._rendering.reply(observation.messages, sampled)

    def reply_to_calls(
        self, response: Message, messages: Sequence[Message], sampled: Sequence[int], tools: Sequence[ToolSpec]
    ) -> tuple[int, ...]:
        """Return the tokens that the results of a response's calls add after it."""
        text = self._rendering.continuation([Message("user", "-")], response, messages, tools)
        return self._rendering.follow(text, sampled)[1]

    def check_carries_calls(self, thinking_tags: tuple[str, str] | None, tools: Sequence[ToolSpec]) -> None:
        """Raise `TemplateError` if the chat template takes no results of tools, or writes what stood before them
        otherwise than it was."""
        check_calls(self._rendering, thinking_tags, tools)

    def check_carries(self, thinking_tags: tuple[str, str] | None = None) -> None:
        """Raise `TemplateError` if the chat template writes earlier messages otherwise than they were: tokens can't be
        carried then."""
        if self._chat:
            check_template(self._tokenizer, thinking_tags, self._variables)

    def thought_tags(self, thinking_tags: tuple[str, str] | None) -> tuple[str, str] | None:
        """Return the tags around thoughts: where none are given, those of a thought that the template itself opens, if
        a response's text shows them."""
        tags = thought_tags(self._rendering, thinking_tags)
        return tags if tags is None or thinking_tags is not None or self._hidden(tags) is None else None

    def forced_think_prefix(self, thinking_tags: tuple[str, str] | None) -> str:
        """Return the opening tag, if the chat template writes it at the end of every prompt; else nothing.

        Raises `ValueError` for tags that a response's text doesn't show.
        """
        if thinking_tags is None:
            return ""
        if (tag := self._hidden(thinking_tags)) is not None:
            raise ValueError(
                f"thinking_tags: {tag!r} is a special token of this tokenizer, which is left out of a response's "
                "text: what is thought would be taken for the answer; expected tags of plain text, or null"
            )
        return thinking_tags[0] if self._rendering.opens_with(thinking_tags) else ""

    def _hidden(self, tags: tuple[str, str]) -> str | None:
        """Return the first tag that a response's text doesn't show."""
        return next((tag for tag in tags if tag not in self.decode_response(self.encode(tag), ())), None)

    def opening_tag(self, thinking_tags: tuple[str, str] | None, variables: Mapping[str, Any]) -> str:
        """Return `forced_think_prefix` of prompts with further variables of the chat template."""
        opens = thinking_tags is not None and self._rendering.with_variables(variables).opens_with(thinking_tags)
        return thinking_tags[0] if thinking_tags is not None and opens else ""

    def opens_thought(self, prompt_ids: Sequence[int], response_ids: Sequence[int], text: str) -> bool:
        """Return whether a prompt ends with `<think>`, so that a response without `</think>` has no answer.

        `text` is the response's. Where the tag is a special token, which a text doesn't show, the tokens tell whether
        the thought was ended.
        """
        end = decode(self._tokenizer, prompt_ids[-_END_TOKENS:], skip_special_tokens=False)
        if not end.rstrip().endswith(THINK_TAGS[0]):
            return False
        closing = THINK_TAGS[1]
        return closing in text or closing not in decode(self._tokenizer, response_ids, skip_special_tokens=False)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text as it stands."""
        return self._rendering.encode(text)

    def decode_response(self, token_ids: Sequence[int], stop_strings: Sequence[str]) -> str:
        """Return the text of a response, without special tokens."""
        return self._up_to_stop(decode(self._tokenizer, token_ids, skip_special_tokens=True), stop_strings)

    def decode_marked(self, token_ids: Sequence[int], stop_strings: Sequence[str]) -> str:
        """Return the text of a response with its special tokens, but those that end it: marks of calls may be some."""
        return self._up_to_stop(self.marks.decode(token_ids), stop_strings)

    def _up_to_stop(self, text: str, stop_strings: Sequence[str]) -> str:
        if self._keep_stop_string:
            return text
        ends = [at for at in (text.find(stop) for stop in stop_strings) if at >= 0]
        return text[: min(ends)] if ends else text
