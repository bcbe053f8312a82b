"""Special tokens in a response: some are marks of calls and thoughts, which whoever reads those has to see.

sampled:  [TOOL_CALLS] f {"x": 1} </s>
text:     f{"x": 1}                         for rewards and people: without special tokens
marked:   [TOOL_CALLS]f{"x": 1}             for parsers: with them, but for those that end a response
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from roll.rollout.tokenizing import decode


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
