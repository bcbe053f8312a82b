"""Conversations that show pictures as tokens: a chat template writes a place for each, which is expanded.

messages with places --template, contents in parts--> text --tokenizer--> ids with one token a picture --expanded-->
ids with a token for each feature of a picture, none of which is taught
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roll.data.chat_masks import ConversationEncoder, MarkedTokens, Messages, TrainOn
from roll.data.row_pictures import PLACE
from roll.data.templates import EmbeddingRows, PromptEncoder, TemplateError, is_plain, missing_from, resolve_template
from roll.types.chat import PICTURES, pictures_of
from roll.types.picture import Picture
from roll.types.trajectory import Task
from roll.utils.picture_tokens import PictureTokens

_PROBE = ("Aa", "Bb")


class PictureConversationEncoder(ConversationEncoder):
    """Marks what the assistant says in conversations that may show pictures."""

    def __init__(
        self,
        tokenizer: Any,
        picture_tokens: PictureTokens,
        *,
        template: str = "native",
        train_on: TrainOn = "last",
        variables: Mapping[str, Any] | None = None,
        embedding: EmbeddingRows | None = None,
    ) -> None:
        """Check as `ConversationEncoder` does, and that the template writes a place for a picture.

        `picture_tokens` are those of the model that is trained. Raises `TemplateError`.
        """
        self.picture_tokens, self._only_parts = picture_tokens, False
        if is_plain(resolve_template(template, tokenizer)):
            raise TemplateError(
                f"template {template!r:.80} is a text, which has no place for pictures; with data_args.images use "
                "native or a Jinja template"
            )
        super().__init__(tokenizer, template=template, train_on=train_on, variables=variables, embedding=embedding)
        question = [{"role": "user", "content": _PROBE[0]}]
        self._only_parts = _PROBE[0] not in self._render(question)  # some templates take no content that is a text
        shown = f"{_PROBE[0]}{PLACE}{_PROBE[1]}"
        ids, _ = self._tokens(self._render([{"role": "user", "content": shown, PICTURES: (None,)}]))
        if (places := ids.count(picture_tokens.place)) != 1:
            token = tokenizer.convert_ids_to_tokens(picture_tokens.place)
            raise TemplateError(
                f"the chat template writes {places} places for a picture ({token}), expected one; take the template "
                "that was published with the model"
            )

    def unused_keys(self, messages: Messages) -> set[str]:
        return super().unused_keys(messages) - {PICTURES}

    def _render(self, messages: Messages, *, opens_answer: bool = False) -> str:
        parts = [with_parts(message, always=self._only_parts) for message in messages]
        return super()._render(parts, opens_answer=opens_answer)

    def _missing_from(self, text: str, messages: Messages) -> int | None:
        pieces = [(i, piece) for i, message in enumerate(messages) for piece in message["content"].split(PLACE)]
        lost = missing_from(text, [{"role": messages[i]["role"], "content": piece} for i, piece in pieces])
        return None if lost is None else pieces[lost][0]

    def _marked(
        self,
        ids: tuple[int, ...],
        ranges: Sequence[tuple[int, int]],
        turns: Sequence[Any],
        messages: Messages,
        text: str,
    ) -> MarkedTokens:
        marked = super()._marked(ids, ranges, turns, messages, text)
        # A turn that stands by itself has the conversation up to it.
        end = turns[0].index + 1 if len(turns) == 1 and text is turns[0].text else len(messages)
        pictures = pictures_of(messages[:end])
        check_places(marked.token_ids, pictures, self.picture_tokens, self._tokenizer, "the conversation")
        return expanded(marked, pictures, self.picture_tokens)


def with_parts(message: Mapping[str, Any], *, always: bool = False) -> Mapping[str, Any]:
    """Return a message as templates take it: its content in parts where it shows pictures, or `always`."""
    if PICTURES not in message and not always:
        return message
    pieces = message["content"].split(PLACE) if PICTURES in message else [message["content"]]
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(pieces):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return {**{key: value for key, value in message.items() if key != PICTURES}, "content": parts}


def check_places(
    ids: Sequence[int], pictures: Sequence[Picture], tokens: PictureTokens, tokenizer: Any, what: str
) -> None:
    """Raise `TemplateError` unless ids have one place for each picture, and no token that stands for another kind."""
    if (places := ids.count(tokens.place)) != len(pictures):
        token = tokenizer.convert_ids_to_tokens(tokens.place)
        raise TemplateError(
            f"{what} shows {len(pictures)} pictures and has {places} places for them ({token}): a text that has this "
            "token itself, or a template that leaves pictures out"
        )
    if odd := sorted(set(tokens.forbidden) & set(ids) - {tokens.place}):
        token = tokenizer.convert_ids_to_tokens(odd[0])
        raise TemplateError(f"{what} has the token {token!r}, a place for a video, and videos aren't supported")


def expanded(marked: MarkedTokens, pictures: Sequence[Picture], tokens: PictureTokens) -> MarkedTokens:
    """Return a conversation with a token for each feature of its pictures; raises `TemplateError`."""
    if not pictures:
        return marked
    try:
        ids = tokens.expand(marked.token_ids, pictures)
        counts = iter([tokens.tokens(picture) for picture in pictures])
    except ValueError as error:  # of the image processor
        sizes = ", ".join(f"{picture.width} x {picture.height}" for picture in pictures)
        raise TemplateError(f"the image processor refuses a picture (of {sizes} pixels): {error}") from error
    trained: list[bool] = []
    for token, taught in zip(marked.token_ids, marked.trained, strict=True):
        trained += [False] * next(counts) if token == tokens.place else [taught]
    assert len(trained) == len(ids), "places are expanded to as many tokens as pictures are counted to have"
    return MarkedTokens(tuple(ids), tuple(trained), tuple(pictures))


class PicturePromptEncoder(PromptEncoder):
    """Turns tasks whose prompts may show pictures into token ids, expanded."""

    def __init__(self, tokenizer: Any, picture_tokens: PictureTokens, **options: Any) -> None:
        """Check as `PromptEncoder` does, with its `options`."""
        self.picture_tokens = picture_tokens
        super().__init__(tokenizer, **options)

    def _shown(self, task: Task, ids: tuple[int, ...]) -> tuple[int, ...]:
        pictures, what = task.pictures, f"task {task.id!r}: the prompt"
        check_places(ids, pictures, self.picture_tokens, self._tokenizer, what)
        if not pictures:
            return ids
        return expanded(MarkedTokens(ids, (False,) * len(ids)), pictures, self.picture_tokens).token_ids

    def _render_chat(
        self,
        task: Task,
        template: str,
        opens: bool,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> str:
        return super()._render_chat(task, template, opens, [with_parts(each) for each in messages], tools)
