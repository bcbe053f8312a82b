"""Messages as token ids: whole prompts, and what a reply adds to tokens that are carried.

    prompt(messages)            sampled ...            reply(messages, sampled)           sampled ...
    [template of the messages]  [what the policy said] [closing, messages, next opening]  [what it said then]

Carried tokens are right only under a template that writes a conversation by adding to it: `chat_checks.py` finds those
that don't. A template that knows nothing of tools, of calls or of their results gets them as text (`tool_text.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from jinja2.exceptions import TemplateError as JinjaError

from roll.data.templates import TemplateError, check_template_variables, missing_from, render_chat
from roll.envs.base import Message
from roll.rollout.chat_history import HistoryChecks
from roll.rollout.plain_text import PlainText
from roll.rollout.tokenizing import decode
from roll.rollout.tool_text import (
    MessageForm,
    call_as_text,
    results_as_user,
    specs_text,
    template_message,
    with_named_ids,
    with_specs,
)
from roll.types.chat import ToolCall, ToolSpec

_MAX_SPECS = 64  # sets of tools whose text is kept
_MAX_VARIABLES = 16  # sets of variables of requests
_MARK = "<~sampled response~>"
_ANCHOR = "a"
"""Text in front of a piece while it is tokenised: some tokenizers put a space before the first word of a text."""
_PROBE = "probe_of_tools"
_CALL = ToolCall("a00000000", _PROBE, '{"probe_key": "probe value"}')
_RESULT = Message("tool", "probe of results", tool_call_id=_CALL.id, name=_PROBE)
_THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
_WITHOUT_SYSTEM = (
    "set system_template to null where an environment wrote it (custom_envs.<tag>), write that of a row into the "
    "user's message, and for tools take a template with tools or a system role"
)
WAY_OUT = (
    "Tokens can't be carried from turn to turn under it. Set sample_unit: step, where every prompt is rendered again, "
    "or use another chat template"
)


class ChatTemplate(PlainText):
    """The same by a chat template. A reply costs the same however long the conversation is."""

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any] | None = None) -> None:
        """Raise `TemplateError` for `variables` (`chat_template_kwargs`) that the template doesn't read."""
        super().__init__(tokenizer)
        self._variables = dict(variables or {})
        check_template_variables(self._variables, "", tokenizer)
        self._others: dict[str, ChatTemplate] = {}

    def with_variables(self, variables: Mapping[str, Any]) -> PlainText:
        merged = {**self._variables, **variables}
        if merged == self._variables:
            return self
        key = json.dumps(merged, sort_keys=True, default=str)
        if key not in self._others:
            if len(self._others) >= _MAX_VARIABLES:
                self._others.clear()
            self._others[key] = ChatTemplate(self._tokenizer, merged)
        return self._others[key]

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Return a text's ids; the template itself writes the token that begins it."""
        return self.encode(text)

    def reply(self, messages: Sequence[Message], sampled: Sequence[int]) -> tuple[int, ...]:
        """Return a response with its end; one that ends with the very token that closes it isn't closed twice."""
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
        if tools and not self.knows_tools:
            shown, tools = with_specs(shown, self._specs_text(tools), system=self._takes_system), ()
        if any(message.tool_calls for message in shown) and not self.writes_calls:
            shown = [call_as_text(message) if message.tool_calls else message for message in shown]
        if any(message.role == "tool" for message in shown) and not self._knows_results:
            shown = results_as_user(shown)
        return self._render(shown, tools, opens=opens)

    def begun_text(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        content, stripped = messages[-1].content, messages[-1].content.rstrip()
        if messages[-1].tool_calls or not stripped:
            raise TemplateError("the last message, which the response goes on from, must be text of the assistant's")
        upto = self.unchecked(messages, tools, opens=False)
        _check_shown(upto, messages)
        text = upto[: len(upto) - len(self.closing_of(messages[:-1], upto, tools))]
        if not text.endswith(content) and text.endswith(stripped):  # the template takes off blanks
            text += content[len(stripped) :]
        if not text.endswith(content):
            raise TemplateError(
                "the chat template doesn't end with the assistant's last message as it stands, so no response can go "
                "on from it; leave it out, or say it in the user's message"
            )
        return text

    def check_history(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, since: int = 0) -> None:
        self._history_checks.check(messages, bool(tools), since=since)

    @cached_property
    def _history_checks(self) -> HistoryChecks:
        return HistoryChecks(self.unchecked)

    @cached_property
    def _specs(self) -> dict[int, tuple[Sequence[ToolSpec], str]]:
        """Return tools with their text, cached by identity: requests bring the very same ones again and again."""
        return {}

    def _specs_text(self, tools: Sequence[ToolSpec]) -> str:
        cached = self._specs.get(id(tools))  # held here, so that nothing else gets their identity
        if cached is None:
            if len(self._specs) >= _MAX_SPECS:
                self._specs.clear()
            cached = self._specs[id(tools)] = (tools, specs_text(tools, self._example))
        return cached[1]

    @cached_property
    def _example(self) -> str:
        """Return a call in the template's own form; nothing where it has none, or doesn't let it be told apart."""
        call = ToolCall(_CALL.id, "name", '{"argument": "value"}')
        try:
            asked = [Message("user", "-")]
            return self.response_text(asked, Message("assistant", "", (call,))) if self.writes_calls else ""
        except TemplateError:
            return ""

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, opens: bool = True) -> str:
        usual = not any(message.tool_calls or message.reasoning or message.tool_call_id for message in messages)
        return self._render_as(None if usual else self._form, messages, tools, opens=opens)

    def _render_as(
        self,
        form: MessageForm | None,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        opens: bool = True,
    ) -> str:
        named = messages if form is None or not form.names_by_id else with_named_ids(messages)
        history, specs = [template_message(message, form) for message in named], [tool.for_template() for tool in tools]
        try:
            return render_chat(self._tokenizer, history, opens_answer=opens, tools=specs, variables=self._variables)
        except (JinjaError, TypeError, ValueError) as error:  # Python's: of filters, for values that they don't take
            roles = ", ".join(message.role for message in messages)
            raise TemplateError(
                f"the tokenizer's chat template refuses a conversation of {roles}: {error}. If it is the system "
                f"message, {_WITHOUT_SYSTEM}"
            ) from error

    @cached_property
    def _form(self) -> MessageForm:
        """Return the form that the template understands, by trying a call and a thought in each."""
        form = MessageForm()
        shown = self._tried(form, Message("assistant", "", (_CALL,)))
        if not shown or "{'probe_key'" in shown:  # refused, or written as Python writes a dictionary
            as_text = MessageForm(arguments_as_text=True)
            if other := self._tried(as_text, Message("assistant", "", (_CALL,))):
                form, shown = as_text, other
        by_id = _PROBE not in shown and _CALL.id in shown
        for key in _THOUGHT_KEYS:
            with_key = replace(form, names_by_id=by_id, thought_key=key)
            for thinks in (
                Message("assistant", "", (_CALL,), reasoning=_MARK),
                Message("assistant", "-", reasoning=_MARK),
            ):
                if _MARK in self._tried(with_key, thinks):
                    return with_key
        return replace(form, names_by_id=by_id)

    def _tried(self, form: MessageForm, response: Message) -> str:
        """Return what is written up to a response; nothing where that is refused."""
        try:
            return self._render_as(form, [Message("user", "-"), response], opens=False)
        except TemplateError:
            return ""

    def _shows(self, word: str, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> bool:
        try:
            return word in self._render(messages, tools)
        except TemplateError:
            return False

    @cached_property
    def knows_tools(self) -> bool:
        """Return whether the template itself tells of tools; else they are told of in the system message."""
        tool = ToolSpec(_PROBE, "-", {"type": "object", "properties": {}})
        return self._shows(_PROBE, [Message("user", "-")], [tool])

    @cached_property
    def _takes_system(self) -> bool:
        return self._shows(_PROBE, [Message("system", _PROBE), Message("user", "-")])

    @cached_property
    def writes_calls(self) -> bool:
        """Return whether the template itself writes the calls of a response; else they are text, in Hermes' form."""
        asked = [Message("user", "-"), Message("assistant", "", tool_calls=(_CALL,))]
        return self._shows(_PROBE, asked) or self._shows(_PROBE, [*asked, replace(_RESULT, name="")])

    @cached_property
    def _knows_results(self) -> bool:
        asked = Message("assistant", "", tool_calls=(_CALL,)) if self.writes_calls else Message("assistant", "-")
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
        upto = self.unchecked([*before, response], tools, opens=False)
        full = self.text([*before, response, *messages], tools)
        if not full.startswith(upto):
            raise TemplateError(f"the chat template doesn't show earlier responses as they were. {WAY_OUT}")
        return self.closing_of(before, upto, tools) + full[len(upto) :]

    def response_text(self, before: Sequence[Message], response: Message, tools: Sequence[ToolSpec] = ()) -> str:
        """Return a response as the policy would say it to be written as the template writes it: without the opening
        that the prompt has, and without its closing.

        Raises `TemplateError` where the template writes another opening for it than prompts have.
        """
        prompt = self.unchecked(before, tools)
        upto = self.unchecked([*before, response], tools, opens=False)
        if not upto.startswith(prompt):
            raise TemplateError(
                f"the chat template opens a response otherwise than it shows it: where the policy sees "
                f"{prompt[-40:]!r} it writes {upto[max(0, len(prompt) - 40) : len(prompt) + 20]!r}"
            )
        return upto[len(prompt) : len(upto) - len(self.closing_of(before, upto, tools))]

    def closing_of(self, before: Sequence[Message], upto: str, tools: Sequence[ToolSpec]) -> str:
        """Return what closes the response that a conversation ends with: that of a plain one, or else the special token
        at its end. Some templates close calls otherwise than texts (gpt-oss, Gemma 4)."""
        plain = self._after_mark(before, (), partial(self.unchecked, tools=tools, opens=False))
        if plain is not None and upto.endswith(plain):
            return plain
        end = upto.rstrip()
        last = self._token_text(self.encode(end[-64:])[-1]) if end else ""
        closes = bool(last) and self.encode(last)[-1] in self._special and end.endswith(last)
        return upto[len(end) - len(last) :] if closes else ""

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
        """Return a response with its end; one that ends with the very token that closes it isn't closed twice."""
        ids = self.encode_after(text)
        closing = self._closing(ids)
        if closing and sampled and sampled[-1] in (ids[closing - 1], self._end_of_call, self._end_of_all):
            return text.partition(self._token_text(ids[closing - 1]))[2], ids[closing:]
        return text, ids

    def closing_text(self, sampled: Sequence[int]) -> str:
        closes = bool(sampled) and sampled[-1] in self._special
        return self._token_text(sampled[-1]) if closes else ""

    def sampled_text(self, token_ids: Sequence[int]) -> str:
        """Return the text behind another: some tokenizers leave out the space before the first word of a text."""
        decoded = decode(self._tokenizer, (*self._anchor, *token_ids), skip_special_tokens=False)
        return decoded[len(_ANCHOR) :] if decoded.startswith(_ANCHOR) else super().sampled_text(token_ids)

    def reply_text(self, messages: Sequence[Message]) -> str:
        """Return what the template writes after a response, when these messages follow it.

        Read off a conversation of a word and a mark in the response's place, so the template does with the messages
        whatever it does (strip them, wrap them, join several) and adds to the first exchange what it likes.
        """
        text = self.text([Message("user", "-"), Message("assistant", _MARK), *messages])
        _, mark, after = text.partition(_MARK)
        if not mark:
            raise TemplateError(f"the chat template doesn't show earlier responses as they were. {WAY_OUT}")
        return after

    def opens_with(self, tags: tuple[str, str]) -> bool:
        return self.opening.rfind(tags[0]) > self.opening.rfind(tags[1])

    @cached_property
    def opening(self) -> str:
        """Return what stands at the end of every prompt, after the user's message: role, opened or closed thought."""
        asked = [Message("user", "-")]
        text, closed = self.text(asked), self._render(asked, opens=False)
        return text[len(closed) :] if text.startswith(closed) else text.rpartition("-")[2]

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
        """Return tokens as text, cached: what closes responses is looked up at each of them."""
        return {}

    def _closing(self, ids: Sequence[int]) -> int:
        """Count the tokens that close a response: up to its special token; 0 if there is none."""
        for i, token in enumerate(ids):
            if token in self._special:
                return i + 1
            if self._token_text(token).strip():
                break
        return 0

    def end_tokens(self) -> tuple[int, ...]:
        return tuple(token for token in (self._end_of_call, self._end_of_all) if token is not None)

    @cached_property
    def _end_of_call(self) -> int | None:
        """Return what closes a response of Llama's that calls a tool, in place of the end of a turn."""
        return self._tokenizer.get_vocab().get("<|eom_id|>")

    @cached_property
    def _end_of_all(self) -> int | None:
        """Return what closes a conversation's last response, if that isn't the token of its middle (gpt-oss)."""
        try:
            ids = self.encode_after(
                self._after_mark([Message("user", "-")], (), partial(self._render, opens=False)) or ""
            )
        except TemplateError:
            return None
        closing = self._closing(ids)
        return ids[closing - 1] if closing else None

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self._tokenizer.all_special_ids) | frozenset(self._tokenizer.added_tokens_decoder)


def _other_mark(*conversations: Sequence[Message]) -> str:
    encoded = repr(conversations).encode("utf-8", "backslashreplace")
    return f"<~{hashlib.blake2b(encoded, digest_size=16).hexdigest()}~>"


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
