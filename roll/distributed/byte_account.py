"""How many bytes each hop of a weight sync moves, counted where they are moved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class ByteAccount:
    """Bytes of one end of a transfer, in the type that they travel in."""

    gathered: int = 0
    """Of whole tensors that collectives put together from the shards of several ranks."""
    copied: int = 0
    """Written to the host's memory on the way from the trainer's tensors to where an engine's model loads them."""


_open: ContextVar[ByteAccount | None] = ContextVar("byte_account", default=None)


@contextmanager
def counting() -> Iterator[ByteAccount]:
    """Count what this thread does inside, and the event loops that it hands work to."""
    account = ByteAccount()
    token = _open.set(account)
    try:
        yield account
    finally:
        _open.reset(token)


def count_gathered(num_bytes: int) -> None:
    """Add bytes of whole tensors that were gathered."""
    account = _open.get()
    if account is not None:
        account.gathered += num_bytes


def count_copied(num_bytes: int) -> None:
    """Add bytes that were copied on the host."""
    account = _open.get()
    if account is not None:
        account.copied += num_bytes
