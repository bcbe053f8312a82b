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

import asyncio
import os
import pickle
import struct
import time
from typing import Any

LENGTH = struct.Struct("<Q")

START_CALL = 0

REFUSED = "refused"
"""Why a request ends that SGLang doesn't take: the engine goes on."""


def frame(message: tuple[Any, ...]) -> bytes:
    """Return a message as bytes, its length first."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


_POLL_S = 0.001
_ANSWER = struct.Struct("<q?")
"""Whose it is, and yes or no. A process that also has a draft model is asked, and answers, for each of its models."""


class Answers:
    """The host's side: answers of `num_workers` processes, in memory without a name."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._fd = os.memfd_create("answers")
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        """Where the others write."""

    def clear(self) -> None:
        """Forget those to the message before."""
        os.ftruncate(self._fd, 0)

    async def wait(self, timeout: float) -> bool:
        """Return whether all say yes, once every process has answered; raises `TimeoutError`."""
        deadline = time.monotonic() + timeout
        while len({worker for worker, _ in self._given()}) < self._num_workers:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"a message about weights was answered by {len({worker for worker, _ in self._given()})} of the "
                    f"{self._num_workers} processes of SGLang's engine within {timeout:g} s; what they printed before "
                    "says why"
                )
            await asyncio.sleep(_POLL_S)
        return all(yes for _, yes in self._given())

    def _given(self) -> list[tuple[int, bool]]:
        size = os.fstat(self._fd).st_size // _ANSWER.size * _ANSWER.size
        return list(_ANSWER.iter_unpack(os.pread(self._fd, size, 0)))


def answer(path: str, yes: bool, worker: int | None = None) -> None:
    """Give the answer of this process, or of the one that is named."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(fd, _ANSWER.pack(os.getpid() if worker is None else worker, yes))
    finally:
        os.close(fd)
