"""From a task to prompt token ids.

Templates are data, never evaluated as Python. A string with `{prompt}` has that word replaced, literally and once; a
string with `{%` or `{{` is Jinja over `messages`, rendered in the sandbox of transformers' chat templates.

Beginning-of-sequence token: a chat template (`native` or Jinja) writes its own, so none is added. To `plain` and
`{prompt}` texts it is added where the tokenizer itself does so for plain text. A prompt that starts with two is
refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

from roll.data.messages import parse_tools, refuse_beyond_chat
from roll.data.rendered_keys import RenderedKeys, beside_text, unwritten
from roll.types.trajectory import Task
from roll.utils.chat_templates import VariableError, check_variables
from roll.utils.chat_templates import render_chat as render_chat

_SLOT = "{prompt}"

TEMPLATES: dict[str, str] = {
    "plain": _SLOT,
    "question_answer": "Question: {prompt}\nAnswer:",
    "step_by_step": "{prompt}\nLet's think step by step and put the final answer within \\boxed{}.\n",
}
"""Named templates beside `native`: `plain` is the text of the prompt as it is."""


_SURELY_SHORT = 1_000_000
"""Characters that are tokenised in any case: takes about a second."""


class TemplateError(ValueError):
    """A template that doesn't fit the tokenizer or the task."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Token ids of a prompt, and how long it is."""

    ids: tuple[int, ...]
    tokens: int
    """Before any cut; of a text that wasn't tokenised as a whole, at least so many."""
    characters: int = 0
    """Of a text that wasn't tokenised as a whole, else 0."""

    def describe_length(self) -> str:
        """Return the length in words, for messages."""
        return (
            f"at least {self.tokens} (it has {self.characters:,} characters)" if self.characters else f"{self.tokens}"
        )


class PromptEncoder:
    """Turns tasks into token ids with one tokenizer, and one template per tag."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str = "native",
        tag_to_template: Mapping[str, str] | None = None,
        with_tools: Callable[[Task], str | None] | None = None,
        variables: Mapping[str, Any] | None = None,
        domain_variables: Mapping[str, Mapping[str, Any]] | None = None,
        embedding: EmbeddingRows | None = None,
    ) -> None:
        """Check all templates against the tokenizer (a Hugging Face one); raises `TemplateError`.

        `template` is `native` (the tokenizer's own), a name in `TEMPLATES`, or the text of a template. `with_tools`
        gives the text of a prompt that tells of tools; None for a task without any. `variables` are those of the chat
        template (`chat_template_kwargs`), `domain_variables` all that tasks of these domains have. `embedding` is the
        model's.
        """
        self._with_tools, self._embedding = with_tools, embedding
        self._tokenizer = tokenizer
        self._keys: dict[str, RenderedKeys] = {}
        self._template = resolve_template(template, tokenizer)
        self._by_tag = {tag: resolve_template(text, tokenizer) for tag, text in (tag_to_template or {}).items()}
        self._variables, self._by_domain = dict(variables or {}), dict(domain_variables or {})
        for each in (self._variables, *self._by_domain.values()):
            for text in {self._template, *self._by_tag.values()}:
                check_template_variables(each, text, tokenizer)
        empty = list(tokenizer("", add_special_tokens=True)["input_ids"])
        bos = tokenizer.bos_token_id
        self._bos: tuple[int, ...] = (bos,) if bos is not None and empty[:1] == [bos] else ()

    def encode(self, task: Task, response: str | None = None) -> tuple[int, ...]:
        """Encode a task's prompt, or with `response` the whole exchange; raises `TemplateError` when the template
        doesn't fit the task."""
        return self._encode_text(task, self.render(task, response))

    def encode_within(self, task: Task, limit: int, cut: str | None) -> EncodedPrompt:
        """Encode a prompt, unless its text is so long that it has more than `limit` tokens in any case.

        Such a text isn't tokenised as a whole, which would take minutes: with `cut` (left, right or middle) what can
        be left after a cut at that end is, without it nothing.
        """
        text = self.render(task)
        room = max(_SURELY_SHORT, (limit + 1) * self._longest_token)
        if len(text) <= room:
            ids = self._encode_text(task, text)
            return EncodedPrompt(ids, len(ids))
        least = len(text) // self._longest_token
        if cut is None:
            return EncodedPrompt((), least, len(text))
        ends = {"left": text[-room:], "right": text[:room], "middle": text[:room] + text[-room:]}
        return EncodedPrompt(self._encode_text(task, ends[cut]), least, len(text))

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token."""
        return max((len(token) for token in self._tokenizer.get_vocab()), default=1)

    def _encode_text(self, task: Task, text: str) -> tuple[int, ...]:
        template = self._by_tag.get(task.tag, self._template)
        ids = tuple(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if is_plain(template):
            ids = self._bos + ids
        ids = self._shown(task, ids)
        if not ids:
            raise TemplateError(f"task {task.id!r}: the prompt has no tokens")
        refuse_two_starts(ids, self._tokenizer, f"task {task.id!r}: the prompt")
        if self._embedding is not None:
            self._embedding.refuse_unread(ids, self._tokenizer, f"task {task.id!r}: the prompt")
        return ids

    def _shown(self, task: Task, ids: tuple[int, ...]) -> tuple[int, ...]:  # noqa: ARG002 - for prompts with pictures
        """Return a prompt's ids with a token for each feature of its pictures."""
        return ids

    def render(self, task: Task, response: str | None = None) -> str:
        """Return the text that is tokenised. A response is the conversation's last message, or follows a plain text.

        Raises `TemplateError` for a prompt of which the template would leave something out.
        """
        tools = parse_tools(task.payload.get("tools"), f"task {task.id!r}")
        with_tools = self._with_tools(task) if self._with_tools is not None and response is None else None
        if with_tools is not None:
            try:
                refuse_beyond_chat(task.payload.get("messages") or (), tools, f"task {task.id!r}")
            except ValueError as error:
                raise TemplateError(f"{error} (its domain has tools of its own: rewards.<domain>.tools)") from error
            return with_tools
        template = self._by_tag.get(task.tag, self._template)
        messages, prompt = task.payload.get("messages"), task.payload.get("prompt")
        if is_plain(template):
            if response is None and (lost := beside_text(messages or (), tools)) is not None:
                raise TemplateError(f"task {task.id!r}: {lost}")
            return template.replace(_SLOT, _as_prompt(task, prompt, messages), 1) + (response or "")
        if messages is None:
            messages = [{"role": "user", "content": prompt}]
        if response is not None:
            messages = [*messages, {"role": "assistant", "content": response}]
        opens = response is None
        render = partial(self._render_chat, task, template, opens)
        text = render(messages, tools)
        if opens:
            keys = self._keys.setdefault(template, RenderedKeys())
            if (lost := unwritten(keys, messages, tools, text, render)) is not None:
                raise TemplateError(f"task {task.id!r}: {lost}")
        return text

    def _render_chat(
        self,
        task: Task,
        template: str,
        opens: bool,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> str:
        import jinja2

        variables = self._by_domain.get(task.domain, self._variables)
        try:
            return render_chat(
                self._tokenizer, messages, template=template, opens_answer=opens, tools=tools, variables=variables
            )
        except (jinja2.TemplateError, TypeError) as error:  # TypeError: what filters do with values they don't take
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateError(
                f"task {task.id!r}: the chat template refuses a conversation of {roles}: {error}"
            ) from error


class EmbeddingRows(NamedTuple):
    """How many tokens a model has an embedding of; a tokenizer that tokens were added to may have more."""

    rows: int
    model: str
    """Its folder."""
    places: tuple[int, ...] = ()
    """Tokens that stand for pictures, where rows show none."""

    def refuse_unread(self, ids: Sequence[int], tokenizer: Any, what: str) -> None:
        """Raise `TemplateError` for a token that the model has no embedding of, or reads a picture in place of."""
        if (odd := next((place for place in self.places if place in ids), None)) is not None:
            raise TemplateError(
                f"{what} has the token {tokenizer.convert_ids_to_tokens(odd)!r}, in whose place {self.model} reads a "
                "picture, and it shows none; name the column of its pictures in data_args.images, or take the token "
                "out of the text"
            )
        if ids and (token := max(ids)) >= self.rows:
            text = tokenizer.convert_ids_to_tokens(token)
            raise TemplateError(
                f"{what} has the token {text!r} with number {token}, and {self.model} has an embedding of {self.rows} "
                "tokens (vocab_size in its config.json), numbered from 0. Resize it once (transformers' "
                "model.resize_token_embeddings(len(tokenizer)), then save_pretrained), take the tokenizer that was "
                "made for the model, or keep the token out of the rows and the template"
            )


def refuse_two_starts(ids: tuple[int, ...], tokenizer: Any, what: str) -> None:
    """Raise `TemplateError` if token ids begin with two beginning-of-sequence tokens."""
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == (bos, bos):
        token = tokenizer.bos_token
        raise TemplateError(f"{what} starts with {token!r} twice; remove it from the template or from the data")


def missing_from(text: str, messages: Sequence[Mapping[str, str]]) -> int | None:
    """Return the first of these messages whose content isn't in the text after the one before; blanks don't count.

    A system message may be anywhere: some templates put it before the last question. A content may be written as JSON.
    """
    if _in_order(text, messages):
        return None
    at, squeezed = 0, "".join(text.split())
    for number, message in enumerate(messages):
        system = message["role"] == "system"
        start = 0 if system else at
        content = "".join(message["content"].split())
        position = squeezed.find(content, start)
        if position < 0:
            content = "".join(json.dumps(message["content"], ensure_ascii=False)[1:-1].split())
            position = squeezed.find(content, start)
        if position < 0:
            return number
        at = at if system else position + len(content)
    return None


def _in_order(text: str, messages: Sequence[Mapping[str, str]]) -> bool:
    """Return whether the contents are there as they stand: the usual case, which costs no copy of the text."""
    at = 0
    for message in messages:
        content = message["content"].strip()
        position = text.find(content, 0 if message["role"] == "system" else at)
        if position < 0:
            return False
        if message["role"] != "system":
            at = position + len(content)
    return True


def check_template_variables(variables: Mapping[str, Any], template: str, tokenizer: Any) -> None:
    """Raise `TemplateError` for `chat_template_kwargs` that a resolved template ("": the tokenizer's) doesn't read."""
    if not variables:
        return
    if is_plain(template):
        raise TemplateError(
            f"chat_template_kwargs are variables of chat templates, and template {template!r:.80} is a text; remove "
            "them, or set template to native or Jinja"
        )
    try:
        check_variables(variables, template or tokenizer.get_chat_template(), list(tokenizer.special_tokens_map))
    except VariableError as error:
        raise TemplateError(f"chat_template_kwargs: {error}") from error


def is_plain(template: str) -> bool:
    """Return whether a resolved template is a text with `{prompt}` and no Jinja."""
    return _SLOT in template and "{%" not in template and "{{" not in template


def chat_templates_of(templates: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """Return the chat templates among a configuration's templates, "" for the tokenizer's own, with their variables."""
    named = [("" if words == "native" else TEMPLATES.get(words, words), variables) for words, variables in templates]
    return tuple((text, variables) for text, variables in named if not is_plain(text))


def resolve_template(template: str, tokenizer: Any) -> str:
    """Return the text of a template; "" for the tokenizer's own. Raises `TemplateError` for one that isn't any."""
    if template == "native":
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateError(
                "template 'native' needs a tokenizer with a chat template, and this one has none; set template to "
                f"one of {sorted(TEMPLATES)} or to a text with {_SLOT}"
            )
        return ""
    text = TEMPLATES.get(template, template)
    if "{%" in text or "{{" in text or text.count(_SLOT) == 1:
        return text
    raise TemplateError(
        f"template {template!r:.80} is neither 'native', nor one of {sorted(TEMPLATES)}, nor a text with "
        f"exactly one {_SLOT}, nor Jinja"
    )


def _as_prompt(task: Task, prompt: str | None, messages: Sequence[Mapping[str, str]] | None) -> str:
    if prompt is not None:
        return prompt
    if messages is not None and len(messages) == 1:
        return messages[0]["content"]
    raise TemplateError(
        f"task {task.id!r} is a conversation of {len(messages or ())} messages, which a template with "
        f"{_SLOT} can't hold; use 'native' or a Jinja template, or name a prompt column"
    )
