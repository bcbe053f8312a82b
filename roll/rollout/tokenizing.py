"""One text to token ids and back, without the wrapping that transformers puts around it.

A call of an agent tokenises two texts and decodes two, and checks of arguments, offsets of tokens and a `BatchEncoding`
take as long as the tokenizer itself. Where a class does more than that wrapping, it is asked as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any


def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Return the token ids of a text as it stands, as `tokenizer(text, add_special_tokens=False)` does."""
    if _encodes_plainly(type(tokenizer)):  # type: ignore[arg-type]  # classes can be hashed
        backend = tokenizer.backend_tokenizer
        as_usual = backend.truncation is None and backend.padding is None
        if as_usual and backend.encode_special_tokens == tokenizer.split_special_tokens:
            return tuple(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def decode(tokenizer: Any, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the text of token ids, as `tokenizer.decode(token_ids, skip_special_tokens=...)` does."""
    if _decodes_plainly(type(tokenizer)) and not tokenizer.clean_up_tokenization_spaces:  # type: ignore[arg-type]
        text: str = tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text
    return str(tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))


@lru_cache
def _encodes_plainly(kind: type) -> bool:
    return _inherits(kind, "__call__", "_encode_plus")


@lru_cache
def _decodes_plainly(kind: type) -> bool:
    return _inherits(kind, "decode", "_decode")


def _inherits(kind: type, *methods: str) -> bool:
    """Return whether these methods are those of transformers' tokenizers over a Rust one."""
    from transformers import PreTrainedTokenizerFast

    usual = issubclass(kind, PreTrainedTokenizerFast)
    return usual and all(getattr(kind, name) is getattr(PreTrainedTokenizerFast, name) for name in methods)


class Marks:
    """The special tokens of a tokenizer that a response may hold.

    Args:
        ends: gives the tokens that end responses. Asked when the first response is read: to find them takes templates.
    """

    def __init__(self, tokenizer: Any, ends: Callable[[], Iterable[int]]) -> None:
        self._tokenizer, self._ends_of = tokenizer, ends

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a response with its marks, and without what ends it."""
        if self._special.isdisjoint(token_ids):
            return decode(self._tokenizer, token_ids, skip_special_tokens=False)
        ids = [token for token in token_ids if token not in self._ends]
        return decode(self._tokenizer, ids, skip_special_tokens=False)

    def strip(self, text: str, token_ids: Sequence[int]) -> str:
        """Return a piece of a response's marked text without the marks that its tokens have."""
        if self._special.isdisjoint(token_ids):
            return text
        for token in self._special.intersection(token_ids):
            text = text.replace(decode(self._tokenizer, (token,), skip_special_tokens=False), "")
        return text

    @cached_property
    def _special(self) -> frozenset[int]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        flagged = (number for number, token in added.items() if token.special)
        return frozenset(getattr(self._tokenizer, "all_special_ids", ())) | frozenset(flagged)

    @cached_property
    def _ends(self) -> frozenset[int]:
        names = ("eos_token_id", "pad_token_id", "bos_token_id")
        own = (getattr(self._tokenizer, name, None) for name in names)
        return (frozenset(self._ends_of()) | {number for number in own if number is not None}) & self._special
