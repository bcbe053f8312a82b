"""Messages on a socket that keeps the borders of packets: each is a pickle, cut into packets.

Every packet carries the secret of its socket, and the length of the message and its own place in it. So what anything
else writes to the socket is a packet without the secret, or out of place: it is dropped and counted, and what comes
after it is read as if it had never been there.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterator
from typing import Any

SECRET_BYTES = 16
PACKET_BYTES = 1 << 16
_HEADER = struct.Struct(f"!{SECRET_BYTES}sQQ")  # Secret, bytes of the message, bytes of it before this packet
_MAX_BYTES = 1 << 30


def packets(message: Any, secret: bytes) -> Iterator[bytes]:
    """Yield a message as packets."""
    content = memoryview(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
    room = PACKET_BYTES - _HEADER.size
    for at in range(0, len(content), room):
        yield _HEADER.pack(secret, len(content), at) + content[at : at + room]


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, bytes and containers of them. So a child can't make its parent run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds a {module}.{name}, expected plain values only")


class Frames:
    """Puts the packets of one socket back together."""

    def __init__(self, secret: bytes | None = None) -> None:
        """`secret`: None takes that of the first packet."""
        self.secret = secret
        self.discarded = 0
        """Packets that were no part of a message."""
        self._bytes = bytearray()
        self._length = 0

    @property
    def incomplete(self) -> bool:
        """Return whether a message has begun to arrive."""
        return bool(self._bytes)

    def feed(self, packet: bytes) -> list[Any]:
        """Return the message that this packet completes, if it does; raise `UnpicklingError` unless it is made of plain
        values."""
        if len(packet) <= _HEADER.size:
            self.discarded += 1
            return []
        secret, length, at = _HEADER.unpack_from(packet)
        if self.secret is None:
            self.secret = secret
        if secret != self.secret or at != len(self._bytes) or (at and length != self._length):
            self.discarded += 1
            return []
        if length > _MAX_BYTES:
            raise pickle.UnpicklingError(f"a message of {length} bytes, expected at most {_MAX_BYTES}")
        self._length = length
        self._bytes += memoryview(packet)[_HEADER.size :]
        if len(self._bytes) < length:
            return []
        content, self._bytes = self._bytes, bytearray()
        try:
            return [_PlainUnpickler(io.BytesIO(content)).load()]
        except Exception as error:  # any kind: what isn't a pickle fails in many ways
            raise pickle.UnpicklingError(f"a message can't be read: {type(error).__name__}: {error}") from error
