"""Between text and tokens: observations become prompt tokens, sampled tokens become the text of an action.

Tokens are carried, never re-made: a later turn adds only the tokens that the environment's reply brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from roll.envs.base import Message, Observation
from roll.strategies.base import Completion, SamplingParams
from roll.types.episode import Task

_MARK = "<~sampled response~>"


class PromptTooLong(ValueError):
    """A first prompt exceeds the limit and the configuration says to leave such tasks out."""


class FirstPrompt(Protocol):
    """Renders the first prompt of a task; `data.PromptEncoder` does it for dataset rows."""

    def __call__(self, task: Task, observation: Observation, /) -> tuple[int, ...]:
        """Token ids; raises `PromptTooLong`."""


class Agent:
    """How the policy meets an environment.

    Args:
        tokenizer: of the policy.
        first_prompt: renders the first observation.
        chat: True when prompts use the tokenizer's chat template; replies then do too.
        keep_stop_string: whether the action's text includes the stop string that ended it.
    """

    def __init__(self, tokenizer: Any, first_prompt: FirstPrompt, *, chat: bool, keep_stop_string: bool = True) -> None:
        self._tokenizer = tokenizer
        self._first_prompt = first_prompt
        self._chat = chat
        self._keep_stop_string = keep_stop_string

    def start(self, task: Task, observation: Observation) -> tuple[int, ...]:
        """Tokens of the first prompt."""
        return self._first_prompt(task, observation)

    def reply(self, observation: Observation, sampled: Sequence[int]) -> tuple[int, ...]:
        """Tokens that the environment's reply adds after the `sampled` response: its turn's closing, the reply, and
        the opening of the next response."""
        if not self._chat:
            text = "".join(m.content for m in observation.messages)
            return self.encode(text)
        ids = self.encode(self._after_response(observation.messages))
        # The response usually ends with the very token that closes an assistant message: don't close it twice.
        if ids and sampled and ids[0] == sampled[-1]:
            ids = ids[1:]
        return ids

    def _after_response(self, messages: Sequence[Message]) -> str:
        history = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK}]
        history += [{"role": m.role, "content": m.content} for m in messages]
        text = self._tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
        _, mark, suffix = text.partition(_MARK)
        if not mark:
            raise ValueError(
                "the chat template doesn't show earlier assistant messages as they were, so a multi-turn episode can't "
                "carry its sampled tokens; use another template"
            )
        return suffix

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text as it stands."""
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)

    def action(self, completion: Completion, params: SamplingParams) -> str:
        """Text of a response, without special tokens."""
        text = self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        if self._keep_stop_string:
            return text
        ends = [at for at in (text.find(stop) for stop in params.stop_strings) if at >= 0]
        return text[: min(ends)] if ends else text
