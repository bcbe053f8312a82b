"""Messages on a stream: each is its length, then its pickle."""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any

_HEADER = struct.Struct("!Q")
_MAX_BYTES = 1 << 30


def frame(message: Any) -> bytes:
    """Return a message as bytes."""
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(content)) + content


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, bytes and containers of them. So a child can't make its parent run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds a {module}.{name}, expected plain values only")


class Frames:
    """Puts the pieces that a stream arrives in back together."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> list[Any]:
        """Return the messages that this piece completes; raise `UnpicklingError`, whatever is wrong with them, unless
        they are plain values."""
        self._bytes += piece
        messages: list[Any] = []
        at = 0
        while len(self._bytes) - at >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._bytes, at)
            if length > _MAX_BYTES:
                raise pickle.UnpicklingError(f"a message of {length} bytes, expected at most {_MAX_BYTES}")
            end = at + _HEADER.size + length
            if end > len(self._bytes):
                break
            content = io.BytesIO(memoryview(self._bytes)[at + _HEADER.size : end])
            try:
                messages.append(_PlainUnpickler(content).load())
            except Exception as error:  # any kind: what isn't a pickle fails in many ways
                raise pickle.UnpicklingError(f"a message can't be read: {type(error).__name__}: {error}") from error
            at = end
        if at:
            del self._bytes[:at]
        return messages
