"""What the checks of `conformance.py` work with, and what they find."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from roll.envs.shared_generators import is_own, is_theirs, source_location
from roll.envs.traces import trace_elsewhere
from roll.envs.watched import Clock, Hung, OutOfTime, Watched
from roll.utils.seeding import stable_hash

Level = Literal["ok", "info", "warning", "error"]
Findings = Iterator[tuple[Level, str] | tuple[Level, str, str]]
"""Level, message, and where if that is known."""

SEED_BITS = 63
"""Of the seeds of a run's episodes: see `roll/rollout/env_tasks.py`."""
_MAX_MESSAGE = 2000


@dataclass(frozen=True, slots=True)
class EnvFinding:
    """What one check found."""

    level: Level  # `error`: training on it would go wrong. `warning`: it probably isn't meant. `ok`: nothing was found.
    check: str
    message: str = ""
    where: str = ""  # `file:line in function` of the environment's code, where that is known


@dataclass(frozen=True, slots=True)
class Trial:
    """An environment, and how much of it is played."""

    factory: Callable[[], Any]
    seeds: Sequence[int]
    max_steps: int = 50
    clock: Clock = field(default_factory=lambda: Clock(60.0, 120.0))
    elsewhere: Callable[[int, int], list[str]] | None = None
    """The trace of a seed from a new process with a PYTHONHASHSEED. None: processes of this module's own."""

    def make(self) -> Watched:
        """Return an instance."""
        return Watched(self.factory, self.clock)

    def traced_elsewhere(self, seed: int, hash_seed: int) -> list[str]:
        """Return the trace of a seed from another process."""
        if self.elsewhere is not None:
            return self.elsewhere(seed, hash_seed)
        return trace_elsewhere(self.factory, seed, self.max_steps, hash_seed)


def run_seeds(count: int) -> list[int]:
    """Seeds as runs have them: of 63 bits, even ones as in training and odd ones as in validation."""
    drawn = [stable_hash("roll envs test", number) >> 1 for number in range(count)]
    return [(seed | 1 << SEED_BITS - 1) - seed % 2 + number % 2 for number, seed in enumerate(drawn)]


def described(error: BaseException) -> str:
    """Return what an error says, with its kind."""
    try:
        text = str(error)[:_MAX_MESSAGE]
    except Exception:  # noqa: BLE001 - of the environment's own class
        text = ""
    if isinstance(error, (Hung, OutOfTime)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def blame(error: BaseException) -> str:
    """Return `file:line in function: code` of the last code on the way to an error that isn't the machinery's or a
    library's; of a library of games if no other is."""
    visited = {id(error)}
    while error.__cause__ is not None and id(error.__cause__) not in visited:
        error = error.__cause__
        visited.add(id(error))
    theirs = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_theirs(frame.f_code)]
    own = [pair for pair in theirs if is_own(pair[0].f_code)]
    if not theirs:
        return ""
    frame, line = (own or theirs)[-1]
    code = traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name).line
    return f"{source_location(frame.f_code, line)}{f': {code}' if code else ''}"
