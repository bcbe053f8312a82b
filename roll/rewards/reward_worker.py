"""The process that runs reward functions: reads requests from a pipe, writes results. Started by
`reward_process.py`.

It loads no torch. What reward functions print is kept for error messages, up to a limit.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from roll.rewards.base import RewardRequest, RewardSpec
from roll.rewards.reward_registry import LoadedReward, load_reward
from roll.utils.child import short_traceback

_MAX_OUTPUT_CHARS = 500


class _Tail(io.TextIOBase):
    """A text stream that keeps only the end of what is written."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        """Append, and drop what is beyond the limit."""
        self.text = (self.text + text[-_MAX_OUTPUT_CHARS:])[-_MAX_OUTPUT_CHARS:]
        return len(text)


def main(fd: int, alarm_s: float) -> None:
    """Serve until the pipe closes. `alarm_s` ends a call whose parent is gone: the parent's own limit is
    shorter.
    """
    os.set_inheritable(fd, False)
    connection = Connection(fd)
    try:
        rewards = _load(pickle.loads(connection.recv_bytes()))
    except Exception:  # noqa: BLE001 - the boundary: reported to the parent, which raises it
        _send(connection, {"error": short_traceback(skip=0)})
        return
    _send(connection, {"ready": True})
    while True:
        try:
            request = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a reward function may have left its own handler
        signal.setitimer(signal.ITIMER_REAL, alarm_s)
        reply = _score(rewards[request.domain], request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(connection, reply)


def _load(specs: Mapping[str, RewardSpec]) -> dict[str, LoadedReward]:
    return {domain: load_reward(spec) for domain, spec in specs.items()}


def _score(function: LoadedReward, request: RewardRequest) -> dict[str, Any]:
    output = _Tail()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            reward = function(request.response, request.task, request.finish_reason)
    except Exception:  # noqa: BLE001 - the boundary: it becomes a status with this text
        error = short_traceback(skip=1)
        return {"error": f"{error}\nprinted: {output.text}" if output.text else error}
    return {"value": reward.value, "parts": dict(reward.parts)}


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())
