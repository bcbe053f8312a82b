"""From a conversation to token ids, and which of them a model is taught to write.

A chat template says nothing about where the assistant's words begin and end, so this asks it: a conversation is
rendered up to and including each assistant message, and as the prompt that asks for that message.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    the prompt, as it is sampled from                     ^^^^^^^^^^^^^^^ taught

What is taught is what the model itself has to write after that prompt: from there up to the token that ends a response
(`roll/utils/response_ends.py`). So the context of every taught token is one that the model meets when it samples:

* Turns whose prompt is the beginning of the whole conversation share its tokens. One that the template writes in
  another way when more messages follow (thoughts of earlier turns are dropped) has a sequence of its own.
* A prompt may open a thought that the template's own messages don't have. The message then goes on from the prompt.
* After a template that ends no turn, the marker of the next role is taught, or else the end of sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from roll.data.rendered_keys import RenderedKeys, beside_text, unwritten
from roll.data.templates import (
    EmbeddingRows,
    PromptEncoder,
    TemplateError,
    check_template_variables,
    is_plain,
    missing_from,
    refuse_two_starts,
    render_chat,
    resolve_template,
)
from roll.data.thought_spans import (
    THOUGHT_KEYS,
    Thoughts,
    after_opening,
    closes_thought,
    forced_think_prefix,
    split_thought,
)
from roll.types.trajectory import Task
from roll.utils.response_ends import TemplateEnds, missing_end, special_tokens, template_ends

if TYPE_CHECKING:
    from roll.types.picture import Picture

TrainOn: TypeAlias = Literal["last", "all"]
Messages: TypeAlias = Sequence[Mapping[str, Any]]

_PROBES = ("Aa", "Bb")
"""Contents that share neither beginning nor end: what their renderings share is the template's."""
_ANCHOR = "a"
"""Text in front of a piece while it is tokenised: some tokenizers put a space before the first word of a text."""


class MarkedTokens(NamedTuple):
    """A tokenised conversation."""

    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]
    """True for a token that is taught; never the first, which nothing predicts."""
    pictures: tuple[Picture, ...] = ()
    """What the tokens show, in the order of their places."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """One assistant message as it is sampled: characters `start` to `stop` of a text are what the model writes."""

    index: int
    text: str
    start: int
    stop: int
    closed: bool
    """Whether the last of them is a token that ends a response."""


class ConversationEncoder:
    """Marks what the assistant says. One tokenizer, one template."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str = "native",
        train_on: TrainOn = "last",
        variables: Mapping[str, Any] | None = None,
        embedding: EmbeddingRows | None = None,
    ) -> None:
        """Check the template, in the words of `roll.data.templates`, and its `variables` (`chat_template_kwargs`)
        against a Hugging Face tokenizer, which must be a fast one for chat templates; raises `TemplateError`.
        `embedding` is that of the model which meets the tokens."""
        self._tokenizer, self._embedding = tokenizer, embedding
        self._template = resolve_template(template, tokenizer)
        self._variables = dict(variables or {})
        self._all = train_on == "all"
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._keys = RenderedKeys()
        self._prompts: PromptEncoder | None = None
        check_template_variables(self._variables, self._template, tokenizer)
        if is_plain(self._template):
            self._prompts = PromptEncoder(tokenizer, template=template)
            if tokenizer.eos_token_id is None:
                raise TemplateError(
                    f"template {template!r:.80} ends a response with the tokenizer's end-of-sequence token, and this "
                    "tokenizer has none; use a chat template"
                )
            self._ends = TemplateEnds()
            return
        if not tokenizer.is_fast:
            raise TemplateError(
                f"{type(tokenizer).__name__} can't tell which characters a token stands for; a chat template needs a "
                "fast tokenizer (a tokenizer.json in the model's folder)"
            )
        self._special = special_tokens(tokenizer)
        self._ends = template_ends(tokenizer, self._template, self._variables)
        self._thoughts = Thoughts(self._render, self._template or tokenizer.get_chat_template())
        self._closings: dict[str, tuple[int, bool]] = {}
        question = [{"role": "user", "content": _PROBES[0]}]
        self._opens_answers = self._render(question, opens_answer=True) != self._render(question)

    @property
    def ends(self) -> frozenset[int]:
        """Return the tokens that this template teaches as the end of a response."""
        return self._ends.all | self.appended_ends

    @property
    def appended_ends(self) -> frozenset[int]:
        """Return the tokens that stand behind the text of a conversation, whose template doesn't end it; empty where it
        does."""
        added = {missing_end(self._tokenizer, self._ends, role) for role in ("user", "tool")}
        return frozenset(token for token in added if token is not None)

    def describe_ends(self) -> str:
        """Return what ends a response, in words, for the log."""
        shown = ", ".join(repr(self._tokenizer.decode([end])) for end in sorted(self.ends))
        if not self.ends:
            return "the template ends no turn, and the tokenizer has no end of sequence: nothing that ends it is taught"
        behind = " behind the conversation, whose template ends no turn with a token" if self.appended_ends else ""
        return f"a response is taught to end with {shown}{behind}"

    def offering(self, tools: Sequence[Mapping[str, Any]]) -> ConversationEncoder:
        """Return an encoder of conversations in which these tools (in OpenAI's form) are offered."""
        if not tools:
            return self
        other = copy.copy(self)
        other._tools = tools
        return other

    def encode(self, messages: Messages, flags: Mapping[int, bool] | None = None) -> MarkedTokens:
        """Encode a conversation as `encode_turns` does, and return the sequence of its last turn."""
        return self.encode_turns(messages, flags)[-1]

    def encode_turns(self, messages: Messages, flags: Mapping[int, bool] | None = None) -> tuple[MarkedTokens, ...]:
        """Encode a conversation that ends with the assistant: a sequence for the turns that share the whole
        conversation's tokens, and one for each turn that the template writes in another way once more messages follow.

        `flags` say which messages are taught, by position; those without a flag are as `train_on` says. Raises
        `TemplateError` when the template can't say which tokens are the assistant's, or leaves out what a message says.
        """
        assert messages and messages[-1]["role"] == "assistant"
        if self._prompts is not None:
            sequences: tuple[MarkedTokens, ...] = (self._encode_plain(self._prompts, messages, flags or {}),)
        else:
            sequences = tuple(self._encode_chat(messages, flags or {}))
        if self._embedding is not None:
            for marked in sequences:
                self._embedding.refuse_unread(marked.token_ids, self._tokenizer, "the conversation")
        return sequences

    def unused_keys(self, messages: Messages) -> set[str]:
        """Return the keys of messages that say nothing and that the template leaves out."""
        if self._prompts is not None:
            return {key for message in messages for key in message} - {"role", "content"}
        placed = [self._thoughts.placed(message) for message in messages]
        return self._keys.unused(placed, lambda some: self._with_tools(some, self._tools))

    def _encode_chat(self, messages: Messages, flags: Mapping[int, bool]) -> Iterable[MarkedTokens]:
        others = [i for i, message in enumerate(messages) if message["role"] != "assistant"]
        messages = [self._thoughts.placed(message) for message in messages]
        text = self._render(messages)
        if (unseen := unwritten(self._keys, messages, self._tools, text, self._with_tools)) is not None:
            raise TemplateError(unseen)
        if (lost := self._missing_from(text, [messages[i] for i in others])) is not None:
            raise TemplateError(_left_out(messages, others[lost]))
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        taught = [i for i in answers if flags.get(i, self._all or i == answers[-1])]
        return self._encoded(messages, [self._turn(messages, i, text) for i in taught], text)

    def _missing_from(self, text: str, messages: Messages) -> int | None:
        """Return the first of these messages that isn't in the text, or not as a whole; None if all are."""
        return missing_from(text, messages)

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

    # --- a turn as characters ---------------------------------------------------------------

    def _turn(self, messages: Messages, index: int, text: str) -> _Turn:
        before, message = messages[:index], messages[index]
        full = text if index == len(messages) - 1 else self._render(messages[: index + 1])
        one, other = (self._render([*before, {**message, "content": probe}]) for probe in _PROBES)
        head = _shared_beginning(one, other)
        tail = self._tail(before, message, full, _shared_beginning(one[::-1], other[::-1]))
        prompt = self._render(before, opens_answer=True) if before else None
        content_end, shows_head = len(full) - tail, full[:head] == one[:head]
        goes_on = prompt is not None and full.startswith(prompt)
        start = len(prompt) if goes_on and prompt is not None else head
        if prompt is not None and not goes_on and split_thought(message).thought and closes_thought(prompt):
            raise TemplateError(
                f"message {index + 1} (the assistant's) has a thought, and the template's prompt for it closes the "
                "thought at once; remove the thought from the row, or what turns thoughts off from "
                "chat_template_kwargs"
            )
        clear = full[content_end:] == one[len(one) - tail :] and start <= content_end
        if not clear or not (shows_head or (goes_on and self._opens_answers)):
            raise TemplateError(_unclear(index))
        turn = self._turn_of(index, full, start, content_end)
        parts = split_thought(message)
        pieces = [{"role": "assistant", "content": piece} for piece in (parts.thought, parts.answer.strip()) if piece]
        if prompt is not None and (not goes_on or missing_from(full[start:content_end], pieces) is not None):
            turn = self._on_from_prompt(before, message, turn, prompt, (head if shows_head else None, content_end))
        if (lost := missing_from(turn.text[turn.start : turn.stop], pieces)) is not None:
            raise TemplateError(_left_out([*messages[:index], {**message, **pieces[lost]}], index))
        return turn

    def _tail(self, before: Messages, message: Mapping[str, Any], full: str, tail: int) -> int:
        """Return how much of the end is the template's, of a message with calls too: they stand behind the content."""
        if not message.keys() - {"role", "content", *THOUGHT_KEYS}:
            return tail
        try:
            bare = [self._render([*before, {"role": message["role"], "content": probe}]) for probe in _PROBES]
        except TemplateError:
            return 0
        return min(tail, *(_shared_beginning(text[::-1], full[::-1]) for text in bare))

    def _turn_of(self, index: int, text: str, start: int, content_end: int) -> _Turn:
        length, closed = self._closing(text[content_end:])
        if closed or not self._ends.written:
            return _Turn(index, text, start, content_end + length, closed)
        # Calls may end in another way than texts do.
        marks = [self._tokenizer.decode([end]) for end in self._ends.written]
        last = max((text.rfind(mark, start) + len(mark) for mark in marks if mark in text[start:]), default=None)
        return _Turn(index, text, start, len(text) if last is None else last, last is not None)

    def _closing(self, tail: str) -> tuple[int, bool]:
        """Return how much of what the template writes after the content is taught, and whether it ends a response: up
        to the first token that does, or else the first that isn't plain text; all where there is none."""
        if tail not in self._closings:
            if len(self._closings) > 1000:
                self._closings.clear()
            ids, ranges = self._tokens(tail)
            special = [k for k, token in enumerate(ids) if token in self._special]
            ends = [k for k in special if ids[k] in self._ends.written] or special[:1]
            self._closings[tail] = (ranges[ends[0]][1], True) if ends else (len(tail), False)
        return self._closings[tail]

    def _on_from_prompt(
        self, before: Messages, message: Mapping[str, Any], turn: _Turn, prompt: str, content: tuple[int | None, int]
    ) -> _Turn:
        """Return a message as it is written after its prompt, where the template itself writes it in another way: the
        prompt opens a thought, and messages that are shown have none. The turn as it was where that isn't the case."""
        bare, (content_start, content_end) = self._render(before), content
        aligned = prompt.startswith(bare) and turn.text.startswith(bare)
        opened, parts = forced_think_prefix(prompt), split_thought(message)
        if not aligned or content_start is None or (opened is None and parts.thought):
            return turn
        answer = turn.text[content_start:content_end]
        if opened is not None:
            if not parts.raw:
                parts = parts._replace(answer=answer.lstrip("\n"))
            answer = after_opening(parts, opened[0][1], opened[1])
        text = prompt + answer + turn.text[content_end:]
        return self._turn_of(turn.index, text, len(prompt), len(prompt) + len(answer))

    # --- turns as tokens --------------------------------------------------------------------

    def _encoded(self, messages: Messages, turns: Sequence[_Turn], text: str) -> Iterable[MarkedTokens]:
        """Yield each turn that doesn't stand in the text of the whole conversation, and then that with the others."""
        base = turns[-1].text if turns and turns[-1].index == len(messages) - 1 else text
        ids, ranges = self._tokens(base)
        cuts = {last for _, last in ranges}
        shared = [
            turn for turn in turns if base.startswith(turn.text[: turn.stop]) and (turn.start in cuts or not turn.start)
        ]
        for turn in turns:
            if turn not in shared:
                yield self._marked(*self._cut_tokens(turn), [turn], messages, turn.text)
        if shared or not turns:
            yield self._marked(ids, ranges, shared, messages, base)

    def _marked(
        self,
        ids: tuple[int, ...],
        ranges: Sequence[tuple[int, int]],
        turns: Sequence[_Turn],
        messages: Messages,
        text: str,
    ) -> MarkedTokens:
        refuse_two_starts(ids, self._tokenizer, "the conversation")
        trained = [False] * len(ids)
        for turn in turns:
            last = -1
            for k, (first, end) in enumerate(ranges):
                if end > turn.start and first < turn.stop:
                    trained[k], last = True, k
            if turn.closed:
                continue
            role = "tool" if messages[turn.index].get("tool_calls") else "user"
            if turn.stop < len(text):  # the conversation goes on, with the next role's marker
                marker = last + 1
                while marker < len(ids) and not text[slice(*ranges[marker])].strip():
                    marker += 1
                if marker < len(ids) and ids[marker] in self._ends.next_role.values():
                    trained[last + 1 : marker + 1] = [True] * (marker - last)
            elif (end_token := missing_end(self._tokenizer, self._ends, role)) is not None:
                ids, trained = (*ids, end_token), [*trained, True]
        return MarkedTokens(ids, (False, *trained[1:]))

    def _cut_tokens(self, turn: _Turn) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Return the tokens of a prompt and those of what follows it: a sampled response begins with a new token."""
        prompt, prompt_ranges = self._tokens(turn.text[: turn.start])
        ids, ranges = self._tokens(_ANCHOR + turn.text[turn.start :])
        anchor, shift = self._tokens(_ANCHOR)[0], turn.start - len(_ANCHOR)
        if ids[: len(anchor)] == anchor:
            ids, ranges = ids[len(anchor) :], ranges[len(anchor) :]
        else:
            (ids, ranges), shift = self._tokens(turn.text[turn.start :]), turn.start
        return prompt + ids, [*prompt_ranges, *((first + shift, last + shift) for first, last in ranges)]

    def _tokens(self, text: str) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return tuple(encoding["input_ids"]), _char_ranges(encoding["offset_mapping"])

    def _with_tools(self, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> str:
        other = copy.copy(self)
        other._tools = tools
        return other._render(messages)

    def _render(self, messages: Messages, *, opens_answer: bool = False) -> str:
        import jinja2

        try:
            return render_chat(
                self._tokenizer,
                messages,
                template=self._template,
                opens_answer=opens_answer,
                tools=self._tools,
                variables=self._variables,
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


def _unclear(index: int) -> str:
    return (
        f"the chat template doesn't tell where message {index + 1} (the assistant's) begins and ends: what it "
        "writes around it depends on what it says; choose another template"
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
