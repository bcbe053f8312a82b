"""Every random draw of a run comes from a key, never from a global generator.

A key is a sequence such as `(seed, "sample", step, task_id, member, turn)`. It is hashed with BLAKE2b, which is the
same in every process and on every machine (unlike `hash(str)`), so a draw doesn't depend on who makes it or when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np

KeyPart = int | str
T = TypeVar("T")


def stable_hash(*key: KeyPart, bits: int = 64) -> int:
    """Return a `bits`-bit integer that depends on `key` alone; `1` and `"1"` are different parts."""
    key_bytes = b"".join([_encoded(part) for part in key])
    return int.from_bytes(hashlib.blake2b(key_bytes, digest_size=bits // 8).digest(), "little")


def _encoded(part: KeyPart) -> bytes:
    encoded = f"{type(part).__name__}:{part}".encode()
    return len(encoded).to_bytes(4, "little") + encoded


class StableHasher:
    """`stable_hash` of a key that is given part by part."""

    def __init__(self, bits: int = 64) -> None:
        self._digest = hashlib.blake2b(digest_size=bits // 8)

    def add(self, part: KeyPart) -> None:
        """Take in the next part."""
        self._digest.update(_encoded(part))

    @property
    def value(self) -> int:
        """Return the hash of the parts so far."""
        return int.from_bytes(self._digest.digest(), "little")


def keyed_rng(*key: KeyPart) -> np.random.Generator:
    """Return a counter-based (Philox) generator for this key."""
    import numpy as np  # not above: an environment's own interpreter may lack it

    return np.random.Generator(np.random.Philox(key=stable_hash(*key, bits=128)))


def keyed_shuffle(items: Sequence[T], *key: KeyPart) -> list[T]:
    """Return `items` in an order that depends on `key` alone."""
    return [items[i] for i in keyed_rng(*key).permutation(len(items))]
