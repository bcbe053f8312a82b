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

from roll.isolation.processes.child import short_traceback
from roll.rewards.base import Reward, RewardContractError, RewardOutputError, RewardRequest, RewardSpec
from roll.rewards.reward_calls import Outcome
from roll.rewards.reward_registry import LoadedReward, load_reward, settled

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

    A request is a pickled `RewardRequest`, an answer `("ok", value, parts, answer, explanation)`, `("unscored", text)`,
    `("error", text)`, or `("final", text)` for an error that another try would hide. The text's first line says what
    was raised and where; it ends with what the function printed, up to a limit.
    """

    def __init__(self, specs: Mapping[str, RewardSpec]) -> None:
        self._functions = {domain: load_reward(spec) for domain, spec in specs.items()}
        functions = self._functions.values()
        self.mode = "share"
        self.slots = 0
        if len(self._functions) == 1 and any(function.takes_lists for function in functions):
            self.mode = "batch"
        elif all(function.is_async for function in functions):
            self.mode = "async"
        if self.mode != "share":
            self.slots = min(spec.concurrency for spec in specs.values())

    def answer(self, request: tuple[Any, ...], restart_clock: Callable[[], None]) -> Answer:  # noqa: ARG002
        asked: RewardRequest = pickle.loads(request[0])
        function = self._functions[asked.domain]
        output = _Tail()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                reward = function.score(asked)
        except Exception:  # noqa: BLE001 - the boundary: it becomes a status with this text
            return _failed(function, output.text)
        return _scored(function, reward)

    def answer_all(self, requests: Sequence[tuple[Any, ...]], restart_clock: Callable[[], None]) -> list[Answer]:
        """Score all in one call; if that raises, each alone, so that one bad row costs itself.

        A function that breaks its contract isn't called again: a list of one value would look right for one response.
        """
        asked: list[RewardRequest] = [pickle.loads(request[0]) for request in requests]
        if len(asked) > 1:
            (function,) = self._functions.values()
            output = _Tail()
            try:
                with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                    outcomes = function.score_all(asked)
            except RewardContractError:
                return [_failed(function, output.text)] * len(asked)
            except Exception:  # noqa: BLE001 - raised again below, if it wasn't another row's
                outcomes = []
            if outcomes:
                return [_settled(function, outcome, output.text) for outcome in outcomes]
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
            reward = await function.score_async(asked)
        except Exception:  # noqa: BLE001 - the boundary, as above
            return _failed(function, "")
        return _scored(function, reward)


def _settled(function: LoadedReward, outcome: Outcome, printed: str) -> Answer:
    try:
        return _scored(function, settled(outcome))
    except Exception:  # noqa: BLE001 - what was raised for this response
        return _failed(function, printed)


def _scored(function: LoadedReward, reward: Reward | None) -> Answer:
    if reward is None:
        names = function.parts or [function.spec.name.rpartition(":")[2]]
        return "unscored", f"no reward function scores this row: {', '.join(names)} returned None"
    parts = {str(name): part for name, part in reward.parts.items()}
    return "ok", reward.value, parts, reward.answer, reward.explanation


def _failed(function: LoadedReward, printed: str) -> Answer:
    """Describe the current exception: a line about it, its traceback, what was printed."""
    kind, value, frames = sys.exc_info()
    summary = " ".join("".join(traceback.format_exception_only(kind, value)).split())[:_MAX_SUMMARY_CHARS]
    text = f"{summary}{_location(function, value, frames)}\n{short_traceback(skip=1)}"
    text = f"{text}\nprinted: {printed}" if printed else text
    status = "final" if isinstance(value, RewardContractError) else "error"
    return status, text.encode("utf-8", "backslashreplace").decode()


def _location(function: LoadedReward, error: BaseException | None, frames: TracebackType | None) -> str:
    """Return ` (rewards.py:31, in score)`: the last line in the function's own file, else the last line."""
    stack = traceback.extract_tb(frames)
    code = getattr(function.function, "__code__", None)
    own = [frame for frame in stack if code is not None and frame.filename == code.co_filename]
    if not stack or (not own and isinstance(error, RewardOutputError)):
        return ""  # what it returned is wrong, and no line of it
    last = (own or stack)[-1]
    return f" ({last.filename}:{last.lineno}, in {last.name})"
