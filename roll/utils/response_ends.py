"""What ends a response: one answer for checks, training data, engines and exports.

    response_ends = the tokenizer's end of sequence
                  + `eos_token_id` of the model's generation settings
                  + what the chat template writes after the assistant's words

A template says nothing about its ends, so it is asked: an answer is rendered, and the first token after it that isn't
plain text ends it. Some templates (GLM's) write no such token; the marker of the next role then ends a response.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from roll.utils.chat_templates import render_chat

_QUESTION, _ANSWERS, _NEWS = "Aa", ("probe of an answer", "quite another text"), "news of a probe"


@dataclass(frozen=True, slots=True)
class TemplateEnds:
    """Tokens that end what the assistant says under one chat template."""

    written: frozenset[int] = frozenset()
    """That it writes itself, after texts and after calls of tools."""
    next_role: Mapping[str, int] = field(default_factory=dict)
    """Where it writes none: those that begin the message of a `user` or a `tool`."""

    @property
    def all(self) -> frozenset[int]:
        """Return every token that ends a response."""
        return self.written.union(self.next_role.values())


def response_ends(
    tokenizer: Any,
    declared: int | Sequence[int] | None = None,
    templates: Iterable[tuple[str, Mapping[str, Any]]] = (("", {}),),
) -> frozenset[int]:
    """Return every token that ends a response.

    Args:
        tokenizer: a Hugging Face one.
        declared: `eos_token_id` of the model's generation settings.
        templates: that prompts are rendered with, each with its variables; "" is the tokenizer's own.
    """
    ends = {tokenizer.eos_token_id, *(declared if isinstance(declared, Sequence) else [declared])}
    for template, variables in templates:
        if template or getattr(tokenizer, "chat_template", None):
            ends |= template_ends(tokenizer, template, variables).all
    return frozenset(end for end in ends if end is not None)


def with_ends(declared: int | Sequence[int] | None, ends: Collection[int]) -> int | list[int] | None:
    """Return `eos_token_id` of generation settings that declares all `ends`: those that were there come first."""
    listed = list(declared) if isinstance(declared, Sequence) else [] if declared is None else [declared]
    listed += sorted(set(ends) - set(listed))
    return listed if len(listed) > 1 else next(iter(listed), None)


def missing_end(tokenizer: Any, ends: TemplateEnds, role: str = "user") -> int | None:
    """Return the token to teach behind an answer that the template doesn't end; None: it ends all, or there is none.

    That is the marker of the next role, which is `tool` after calls, or else the end of sequence.
    """
    if ends.written:
        return None
    markers = [ends.next_role[each] for each in (role, "user", "tool") if each in ends.next_role]
    end: int | None = next(iter(markers), tokenizer.eos_token_id)
    return end


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that aren't plain text: special and added ones, but for runs of blanks, which some vocabularies
    add."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if str(token).strip()}
    return frozenset(tokenizer.all_special_ids) | frozenset(added)


def template_ends(tokenizer: Any, template: str = "", variables: Mapping[str, Any] | None = None) -> TemplateEnds:
    """Ask a chat template for its ends; "" is the tokenizer's own. One that refuses to be asked has none."""
    probe = _Probe(tokenizer, template, variables or {})
    answer = probe.end_of_answer()
    if answer is not None:
        call = probe.end_of_call()
        return TemplateEnds(frozenset({answer} if call is None else {answer, call}))
    markers = {role: probe.marker_after_answer(role) for role in ("user", "tool")}
    return TemplateEnds(next_role={role: token for role, token in markers.items() if token is not None})


class _Probe:
    def __init__(self, tokenizer: Any, template: str, variables: Mapping[str, Any]) -> None:
        self._tokenizer, self._template, self._variables = tokenizer, template, variables
        self._special = special_tokens(tokenizer)

    def end_of_answer(self) -> int | None:
        """Return the token after an answer that is the last one. Where several follow each other, as Cohere's, it is
        the last that is there too when the conversation goes on."""
        texts = [self._render(_dialogue(answer)) for answer in _ANSWERS]
        after = [_after(text, answer) for text, answer in zip(texts, _ANSWERS, strict=True)]
        if after[0] is None or after[0] != after[1]:
            return None
        closing = self._first_specials(after[0])
        goes_on = self._render([*_dialogue(_ANSWERS[0]), {"role": "user", "content": _NEWS}])
        continued = self._first_specials(_after(goes_on, _ANSWERS[0]) or "")
        shared = 0
        while shared < min(len(closing), len(continued)) and closing[shared] == continued[shared]:
            shared += 1
        return closing[max(shared, 1) - 1] if closing else None

    def end_of_call(self) -> int | None:
        """Return the token that ends a turn with one call and one with two, and stands nowhere else in them."""
        begin = self._render([{"role": "user", "content": _QUESTION}], opens_answer=True)
        lasts = []
        for count in (1, 2):
            calls = [
                {"id": f"a0000000{k}", "type": "function", "function": {"name": "probe", "arguments": {"key": "value"}}}
                for k in range(count)
            ]
            message = {"role": "assistant", "content": "", "tool_calls": calls}
            text = self._render([{"role": "user", "content": _QUESTION}, message])
            if text is None or begin is None or "probe" not in text:
                return None
            ids = self._ids(text.removeprefix(begin))
            special = [token for token in ids if token in self._special]
            if not special or special.count(special[-1]) != 1:
                return None
            lasts.append(special[-1])
        return lasts[0] if lasts[0] == lasts[1] else None

    def marker_after_answer(self, role: str) -> int | None:
        """Return the first token that isn't plain text between an answer and the next message."""
        news = {"role": role, "content": _NEWS}
        text = self._render([*_dialogue(_ANSWERS[0]), news])
        after = None if text is None else _after(text, _ANSWERS[0])
        if after is None or _NEWS not in after:
            return None
        return next(iter(self._first_specials(after[: after.index(_NEWS)])), None)

    def _first_specials(self, text: str) -> list[int]:
        """Return the first tokens that aren't plain text, those that follow each other directly."""
        ids = self._ids(text)
        start = next((k for k, token in enumerate(ids) if token in self._special), len(ids))
        return list(takewhile(self._special.__contains__, ids[start:]))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _render(self, messages: Sequence[Mapping[str, Any]], *, opens_answer: bool = False) -> str | None:
        import jinja2

        try:
            return render_chat(
                self._tokenizer, messages, template=self._template, opens_answer=opens_answer, variables=self._variables
            )
        except (jinja2.TemplateError, TypeError, ValueError):  # what filters do with values that they don't take
            return None


def _dialogue(answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": answer}]


def _after(text: str | None, answer: str) -> str | None:
    return None if text is None or answer not in text else text.rpartition(answer)[2]
