"""Messages between an engine's owner and the process that holds the engine: tuples, pickled, after their length.

Owner to host:
    ("start", arguments of `sgl.Engine`)
    ("generate", request id, prompt ids, sampling parameters, whether top-p or top-k cut the distribution)
    ("abort", request ids)
    ("call", number, name of an operation, its arguments)
Host to owner:
    ("sampled", request id, token ids, log-probs, why it ends or None, what went wrong or "")
    ("answer", number, value, what went wrong or "")

"start" is answered as call 0, with the tokens that end a response by themselves.

The end of the connection is the end of the other side.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

LENGTH = struct.Struct("<Q")

START_CALL = 0

REFUSED = "refused"
"""Why a request ends that SGLang doesn't take: the engine goes on."""


def frame(message: tuple[Any, ...]) -> bytes:
    """Return a message as bytes, its length first."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data
