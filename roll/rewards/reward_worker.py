"""What runs in a process of the pool: reward functions. It loads no torch."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from roll.processes.child import short_traceback
from roll.rewards.base import RewardRequest, RewardSpec
from roll.rewards.reward_registry import load_reward

_MAX_OUTPUT_CHARS = 500


class _Tail(io.TextIOBase):
    """A text stream that keeps only the end of what is written."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text = (self.text + text[-_MAX_OUTPUT_CHARS:])[-_MAX_OUTPUT_CHARS:]
        return len(text)


class RewardHandler:
    """The functions by domain.

    A request is a pickled `RewardRequest`, an answer `("ok", value, parts)` or `("error", text)`. The text ends with
    what the function printed, up to a limit.
    """

    def __init__(self, specs: Mapping[str, RewardSpec]) -> None:
        self._functions = {domain: load_reward(spec) for domain, spec in specs.items()}

    def answer(self, request: tuple[Any, ...], restart_clock: Callable[[], None]) -> tuple[Any, ...]:  # noqa: ARG002
        (message,) = request
        asked: RewardRequest = pickle.loads(message)
        output = _Tail()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                reward = self._functions[asked.domain](asked.response, asked.task, asked.finish_reason)
        except Exception:  # noqa: BLE001 - the boundary: it becomes a status with this text
            error = short_traceback(skip=1)
            return "error", f"{error}\nprinted: {output.text}" if output.text else error
        return "ok", reward.value, {str(name): part for name, part in reward.parts.items()}
