"""One text to token ids and back, without the wrapping that transformers puts around it.

A call of an agent tokenises two texts and decodes two, and checks of arguments, offsets of tokens and a `BatchEncoding`
take as long as the tokenizer itself. Where a class does more than that wrapping, it is asked as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
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
