"""LiveCodeBench's `private_test_cases`: JSON, or the base64 of a compressed pickle of one text with that JSON.

A pickle can run anything when it is loaded, so none is: its operations are listed, and only those that spell a single
text are taken.
"""

from __future__ import annotations

import base64
import binascii
import pickletools
import zlib
from functools import lru_cache

MAX_BYTES = 256 * 2**20
"""Of what is packed, unpacked."""
_MAX_OPERATIONS = 64
"""Of a pickle; Python writes one text with five. A few packed bytes can be millions."""
_TEXT = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"})
_BESIDE = frozenset({"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"})


@lru_cache(maxsize=8)
def unpacked(packed: str) -> str:
    """Return the text in a packed column; raises `ValueError` for anything else."""
    try:
        compressed = base64.b64decode(packed, validate=True)
        unpacker = zlib.decompressobj()
        pickled = unpacker.decompress(compressed, MAX_BYTES)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise ValueError(f"neither JSON nor the base64 of a compressed text: {error}") from None
    if unpacker.unconsumed_tail:
        raise ValueError(f"more than {MAX_BYTES // 2**20} MiB when it is unpacked")
    if not unpacker.eof:
        raise ValueError("a compressed text that is cut off")
    if pickled[:1] in (b"[", b"{"):
        return pickled.decode()
    return _only_text(pickled)


def _only_text(pickled: bytes) -> str:
    texts: list[str] = []
    try:
        for number, (operation, argument, _) in enumerate(pickletools.genops(pickled)):
            if number == _MAX_OPERATIONS:
                raise ValueError(f"a pickle of more than {_MAX_OPERATIONS} operations, which isn't loaded")
            if operation.name in _TEXT and not texts:
                texts.append(str(argument))
            elif operation.name not in _BESIDE:
                raise ValueError(f"a pickle of more than one text ({operation.name}), which isn't loaded")
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"no pickle of a text: {error}") from None
    if not texts:
        raise ValueError("no pickle of a text: it is empty")
    return texts[0]
