"""From a conversation to token ids, and which of them a model is taught to write.

A chat template says nothing about where the assistant's words begin and end, so this asks it: a conversation is
rendered up to and including each assistant message, and these texts must be beginnings of the whole.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                                          ^^^^^^^^^^^^^^^ taught

The message begins where the generation prompt ends, so it is what the model itself would have to write. It ends with
the first special token after its content, or without one with all that the template writes there. Token boundaries are
those of the whole text, found by the offsets of a fast tokenizer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from roll.data.rendered_keys import RenderedKeys, beside_text, unwritten
from roll.data.templates import (
    EmbeddingRows,
    PromptEncoder,
    TemplateError,
    is_plain,
    missing_from,
    refuse_two_starts,
    render_chat,
    resolve_template,
)
from roll.types.episode import Task

TrainOn: TypeAlias = Literal["last", "all"]
Messages: TypeAlias = Sequence[Mapping[str, Any]]

_PROBES = ("Aa", "Bb")
"""Contents that share neither beginning nor end: what their renderings share is the template's."""


class MarkedTokens(NamedTuple):
    """A tokenised conversation."""

    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]
    """True for a token that is taught; never the first, which nothing predicts."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Characters of one assistant message."""

    start: int
    content_end: int
    end: int


class ConversationEncoder:
    """Marks what the assistant says. One tokenizer, one template."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str = "native",
        train_on: TrainOn = "last",
        embedding: EmbeddingRows | None = None,
    ) -> None:
        """Check the template, in the words of `roll.data.templates`, against a Hugging Face tokenizer, which must be a
        fast one for chat templates; raises `TemplateError`. `embedding` is that of the model which meets the tokens."""
        self._tokenizer, self._embedding = tokenizer, embedding
        self._template = resolve_template(template, tokenizer)
        self._all = train_on == "all"
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._keys = RenderedKeys()
        self._prompts: PromptEncoder | None = None
        if is_plain(self._template):
            self._prompts = PromptEncoder(tokenizer, template=template)
            if tokenizer.eos_token_id is None:
                raise TemplateError(
                    f"template {template!r:.80} ends a response with the tokenizer's end-of-sequence token, and this "
                    "tokenizer has none; use a chat template"
                )
            return
        if not tokenizer.is_fast:
            raise TemplateError(
                f"{type(tokenizer).__name__} can't tell which characters a token stands for; a chat template needs a "
                "fast tokenizer (a tokenizer.json in the model's folder)"
            )
        self._special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        question = [{"role": "user", "content": _PROBES[0]}]
        self._opens_answers = self._render(question, opens_answer=True) != self._render(question)

    def offering(self, tools: Sequence[Mapping[str, Any]]) -> ConversationEncoder:
        """Return an encoder of conversations in which these tools (in OpenAI's form) are offered."""
        if not tools:
            return self
        other = copy.copy(self)
        other._tools = tools
        return other

    def encode(self, messages: Messages, flags: Mapping[int, bool] | None = None) -> MarkedTokens:
        """Encode a conversation that ends with the assistant; raises `TemplateError` when the template can't say which
        tokens are the assistant's, or leaves out what a message says.

        `flags` say which messages are taught, by position; those without a flag are as `train_on` says.
        """
        assert messages and messages[-1]["role"] == "assistant"
        marked = (
            self._encode_chat(messages, flags or {})
            if self._prompts is None
            else self._encode_plain(self._prompts, messages, flags or {})
        )
        if self._embedding is not None:
            self._embedding.refuse_beyond(marked.token_ids, self._tokenizer, "the conversation")
        return marked

    def _encode_chat(self, messages: Messages, flags: Mapping[int, bool]) -> MarkedTokens:
        text = self._render(messages)
        if (unseen := unwritten(self._keys, messages, self._tools, text, self._with_tools)) is not None:
            raise TemplateError(unseen)
        others = [i for i, message in enumerate(messages) if message["role"] != "assistant"]
        if (lost := missing_from(text, [messages[i] for i in others])) is not None:
            raise TemplateError(_left_out(messages, others[lost]))
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = tuple(encoding["input_ids"])
        refuse_two_starts(ids, self._tokenizer, "the conversation")
        ranges = _char_ranges(encoding["offset_mapping"])
        trained = [False] * len(ids)
        for span in self._spans(messages, text, flags):
            self._mark(span, ids, ranges, trained)
        return MarkedTokens(ids, (False, *trained[1:]))

    def _encode_plain(self, prompts: PromptEncoder, messages: Messages, flags: Mapping[int, bool]) -> MarkedTokens:
        """Tokenise prompt and response separately, as at inference."""
        if (lost := beside_text(messages, self._tools)) is not None:
            raise TemplateError(lost)
        if len(messages) != 2:
            raise TemplateError(
                f"a conversation of {len(messages)} messages doesn't fit a template with {{prompt}}, which holds a "
                "prompt and a response; use native or a Jinja template"
            )
        payload = {"prompt": None, "messages": messages[:-1]}
        prompt = prompts.encode(Task(id="", source="", payload=payload, seed=0, tag="", domain=""))
        text = messages[-1]["content"]
        response = tuple(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        response = (*response, self._tokenizer.eos_token_id)
        taught = flags.get(1, True)
        return MarkedTokens(prompt + response, (False,) * len(prompt) + (taught,) * len(response))

    def _spans(self, messages: Messages, text: str, flags: Mapping[int, bool]) -> list[_Span]:
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        taught = [i for i in answers if flags.get(i, self._all or i == answers[-1])]
        return [self._span(messages, i, text) for i in taught]

    def _span(self, messages: Messages, index: int, text: str) -> _Span:
        before, upto = messages[:index], messages[: index + 1]
        whole = text if len(upto) == len(messages) else self._render(upto)
        if not text.startswith(whole):
            raise TemplateError(
                f"the chat template writes message {index + 1} (the assistant's) in another way once more messages "
                "follow, so what is taught would not be what the model has to write there; set train_on: last, or "
                "choose another template"
            )
        one, other = (self._render([*before, {**messages[index], "content": probe}]) for probe in _PROBES)
        head, tail = _shared_beginning(one, other), _shared_beginning(one[::-1], other[::-1])
        if messages[index].keys() - {"role", "content"}:
            head, tail = self._around_all(before, messages[index]["role"], whole, (head, tail))
        start, content_end = self._header_end(before, whole), len(whole) - tail
        if start is None and whole[:head] == one[:head]:
            start = head
        if start is None or whole[content_end:] != one[len(one) - tail :] or start > content_end:
            raise TemplateError(
                f"the chat template doesn't tell where message {index + 1} (the assistant's) begins and ends: what it "
                "writes around it depends on what it says; choose another template"
            )
        if missing_from(whole[start:content_end], [messages[index]]) is not None:
            raise TemplateError(_left_out(messages, index))
        return _Span(start, content_end, len(whole))

    def _around_all(self, before: Messages, role: str, whole: str, around: tuple[int, int]) -> tuple[int, int]:
        """Return how much of both ends of `whole` is there for any message, at most `around`: what a message says
        beside its content, as calls of tools, may stand before or behind it and is taught too."""
        head, tail = around
        try:
            bare = [self._render([*before, {"role": role, "content": probe}]) for probe in _PROBES]
        except TemplateError:
            return 0, 0
        head = min(head, *(_shared_beginning(text, whole) for text in bare))
        return head, min(tail, *(_shared_beginning(text[::-1], whole[::-1]) for text in bare))

    def _header_end(self, before: Messages, whole: str) -> int | None:
        """Return where the generation prompt ends; None without one, or if answers don't begin with it."""
        if not self._opens_answers or not before:
            return None
        prompt = self._render(before, opens_answer=True)
        return len(prompt) if whole.startswith(prompt) else None

    def _mark(self, span: _Span, ids: Sequence[int], ranges: Sequence[tuple[int, int]], trained: list[bool]) -> None:
        for k, (first, last) in enumerate(ranges):
            if last <= span.start or first >= span.end:
                continue
            trained[k] = True
            if first >= span.content_end and ids[k] in self._special:
                return

    def _with_tools(self, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> str:
        other = copy.copy(self)
        other._tools = tools
        return other._render(messages)

    def _render(self, messages: Messages, *, opens_answer: bool = False) -> str:
        import jinja2

        try:
            return render_chat(
                self._tokenizer, messages, template=self._template, opens_answer=opens_answer, tools=self._tools
            )
        except (jinja2.TemplateError, TypeError) as error:  # TypeError: what filters do with values they don't take
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateError(f"the chat template refuses messages of {roles}: {error}") from error


def _left_out(messages: Messages, index: int) -> str:
    role, content = messages[index]["role"], messages[index]["content"]
    return (
        f"the chat template leaves out message {index + 1} (role {role}), or a part of it: {content!r:.80}; a model "
        "taught so would never see it. Choose another template, or write the rows without it"
    )


def _char_ranges(offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return first and last character (exclusive) of each token.

    Some tokenizers leave the blanks out that a token begins with, and a token of nothing else has no width then; it
    begins where the token before ends.
    """
    ranges, end = [], 0
    for first, last in offsets:
        ranges.append((min(first, end), last))
        end = max(end, last)
    return ranges


def _shared_beginning(one: str, other: str) -> int:
    different = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(different, min(len(one), len(other)))
