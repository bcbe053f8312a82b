"""Tokenising in threads: the tokenizer runs outside of the GIL."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Encoder = TypeVar("Encoder")
Encoded = TypeVar("Encoded")


def encode_all(
    items: Sequence[Item], encoder: Encoder, encode: Callable[[Encoder, Item], Encoded], num_workers: int
) -> list[Encoded]:
    """Return `encode(encoder, item)` of each item, in order; the result doesn't depend on `num_workers`."""
    num_workers = min(num_workers, len(items))
    if num_workers <= 1:  # not in a thread, whose end Ctrl-C would wait for
        return [encode(encoder, item) for item in items]
    size = -(-len(items) // num_workers)
    chunks = [items[start : start + size] for start in range(0, len(items), size)]
    # A tokenizer isn't thread-safe, so every thread has its own.
    encoders = [encoder, *(copy.deepcopy(encoder) for _ in chunks[1:])]
    with ThreadPoolExecutor(len(chunks)) as threads:
        parts = threads.map(lambda own, chunk: [encode(own, item) for item in chunk], encoders, chunks)
        return [encoded for part in parts for encoded in part]
