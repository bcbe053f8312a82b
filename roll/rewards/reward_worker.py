"""What runs in a process of the pool: reward functions. It loads no torch."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from roll.processes.child import short_traceback
from roll.rewards.base import Reward, RewardRequest, RewardSpec
from roll.rewards.reward_registry import LoadedReward, load_reward

_MAX_OUTPUT_CHARS = 500
_MAX_SUMMARY_CHARS = 500

Answer = tuple[Any, ...]


class _Tail(io.TextIOBase):
    """A text stream that keeps only the end of what is written."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text = (self.text + text[-_MAX_OUTPUT_CHARS:])[-_MAX_OUTPUT_CHARS:]
        return len(text)


class RewardHandler:
    """The functions by domain.

    A request is a pickled `RewardRequest`, an answer `("ok", value, parts, answer, explanation)` or `("error", text)`.
    The text's first line says what was raised and where; it ends with what the function printed, up to a limit.
    """

    def __init__(self, specs: Mapping[str, RewardSpec]) -> None:
        self._functions = {domain: load_reward(spec) for domain, spec in specs.items()}
        functions = self._functions.values()
        self.mode = ""
        self.slots = 1
        if len(self._functions) == 1 and any(function.style.batch for function in functions):
            self.mode = "batch"
        elif all(function.is_async for function in functions):
            self.mode = "async"
        if self.mode:
            self.slots = min(spec.concurrency for spec in specs.values())

    def answer(self, request: tuple[Any, ...], restart_clock: Callable[[], None]) -> Answer:  # noqa: ARG002
        asked: RewardRequest = pickle.loads(request[0])
        function = self._functions[asked.domain]
        output = _Tail()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                reward = function(asked.response, asked.task, asked.finish_reason)
        except Exception:  # noqa: BLE001 - the boundary: it becomes a status with this text
            return _failed(function, output.text)
        return _ok(reward)

    def answer_all(self, requests: Sequence[tuple[Any, ...]], restart_clock: Callable[[], None]) -> list[Answer]:
        """Score all in one call; if that fails, each alone, so that one bad row costs itself."""
        asked: list[RewardRequest] = [pickle.loads(request[0]) for request in requests]
        if len(asked) > 1:
            (function,) = self._functions.values()
            output = _Tail()
            with contextlib.suppress(Exception), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                return [_ok(r) for r in function.score_all([(a.response, a.task, a.finish_reason) for a in asked])]
        answers = []
        for request in requests:
            restart_clock()
            answers.append(self.answer(request, restart_clock))
        return answers

    async def answer_async(self, request: tuple[Any, ...]) -> Answer:
        """Score while others are awaited. What is printed isn't kept: nobody could say whose it is."""
        asked: RewardRequest = pickle.loads(request[0])
        function = self._functions[asked.domain]
        try:
            reward = await function.score_async(asked.response, asked.task, asked.finish_reason)
        except Exception:  # noqa: BLE001 - the boundary, as above
            return _failed(function, "")
        return _ok(reward)


def _ok(reward: Reward) -> Answer:
    parts = {str(name): part for name, part in reward.parts.items()}
    return "ok", reward.value, parts, reward.answer, reward.explanation


def _failed(function: LoadedReward, printed: str) -> Answer:
    """The current exception: a line about it, its traceback, what was printed."""
    kind, value, frames = sys.exc_info()
    said = " ".join("".join(traceback.format_exception_only(kind, value)).split())[:_MAX_SUMMARY_CHARS]
    text = f"{said}{_place(function, frames)}\n{short_traceback(skip=1)}"
    text = f"{text}\nprinted: {printed}" if printed else text
    return "error", text.encode("utf-8", "backslashreplace").decode()


def _place(function: LoadedReward, frames: TracebackType | None) -> str:
    """` (rewards.py:31, in score)`: the last line in the function's own file, else the last line."""
    stack = traceback.extract_tb(frames)
    code = getattr(function.function, "__code__", None)
    own = [frame for frame in stack if code is not None and frame.filename == code.co_filename]
    if not stack:
        return ""
    last = (own or stack)[-1]
    return f" ({last.filename}:{last.lineno}, in {last.name})"
