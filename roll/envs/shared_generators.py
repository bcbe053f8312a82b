"""The generators that all code of a process shares. An environment that draws from one plays what others have drawn."""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_STANDARD_LIBRARY = str(Path(random.__file__).parent) + os.sep
_SITE = f"{os.sep}site-packages{os.sep}"
_NOT_GAMES = tuple(f"{_SITE}{package}{os.sep}" for package in ("numpy", "torch", "scipy"))
_OURS = str(Path(__file__).parent) + os.sep
_ADAPTERS = f"{_OURS}adapters{os.sep}"
_MACHINERY = {"baselines.py", "conformance_checks.py", "conformance_seeds.py", "env_registry.py"}
_MACHINERY |= {"episode_shown.py", "generators.py", "probe_worker.py", "traces.py", "trial.py", "watched.py"}
_MACHINERY |= {"conformance.py", "wrappers.py"}

SYSTEM_CALLS = {
    "urandom": "os.urandom",
    "getrandom": "os.getrandom",
    "time": "time.time",
    "time_ns": "time.time_ns",
    "getpid": "os.getpid",
    "datetime.now": "datetime.now",
    "datetime.utcnow": "datetime.utcnow",
    "date.today": "date.today",
}
"""Functions in C that answer otherwise each time, by the names they have of themselves. `secrets`, `uuid4`,
`SystemRandom` and generators of numpy without a seed come to `os.urandom`."""


@dataclass(frozen=True, slots=True)
class SharedGenerator:
    """One of them."""

    name: str
    instead: str
    """What to draw from instead."""
    state: Callable[[], Any]
    restore: Callable[[Any], Any]
    seed: Callable[[int], Any]

    def digest(self) -> bytes:
        """Return the state, in few bytes."""
        return hashlib.blake2b(repr(self.state()).encode(), digest_size=16).digest()


def shared_generators() -> list[SharedGenerator]:
    """Return those of the libraries that are loaded."""
    generators = [SharedGenerator("random", "random.Random(seed)", random.getstate, random.setstate, random.seed)]
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if hasattr(numpy, "random"):
        assert numpy is not None
        generators.append(
            SharedGenerator(
                "numpy.random",
                "numpy.random.default_rng(seed)",
                lambda: tuple(part.tolist() if hasattr(part, "tolist") else part for part in numpy.random.get_state()),
                numpy.random.set_state,
                lambda seed: numpy.random.seed(seed % 2**32),
            )
        )
    if hasattr(torch, "get_rng_state"):  # else it is being imported
        assert torch is not None
        generators.append(
            SharedGenerator(
                "torch",
                "torch.Generator().manual_seed(seed)",
                lambda: torch.get_rng_state().numpy().tobytes(),
                lambda state: torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
                torch.manual_seed,
            )
        )
    return generators


@contextmanager
def restored_generators() -> Iterator[None]:
    """Put their states back at the end."""
    before = [(generator, generator.state()) for generator in shared_generators()]
    try:
        yield
    finally:
        for generator, state in before:
            generator.restore(state)


def first_draw(generator: SharedGenerator, call: Callable[[], Any]) -> str:
    """Return `file:line in function` of the environment's line that changes the generator's state first; empty: none
    does.

    Follows every line of the environment's code, so it is slow.
    """
    drawn_at: list[str] = []
    lines: dict[FrameType, int] = {}
    digest = [generator.digest()]

    def follow(frame: FrameType, event: str, _: Any) -> Any:
        if drawn_at or not is_theirs(frame.f_code):
            return None if event == "call" else follow
        now = generator.digest()
        if now != digest[0]:
            # A call that has just begun was made by the line that its caller is in.
            if event == "call":
                digest[0] = now
            else:
                drawn_at.append(source_location(frame.f_code, lines.get(frame, frame.f_lineno)))
        lines[frame] = frame.f_lineno
        return follow

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        call()
    finally:
        sys.settrace(before)
    return drawn_at[0] if drawn_at else ""


def system_calls(call: Callable[[], Any], *, libraries: bool) -> dict[str, str]:
    """Return which of `SYSTEM_CALLS` the environment's code makes, itself or through Python's own library, each with
    its first place; with `libraries`, also those of packages that it uses."""
    calls: dict[str, str] = {}

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event == "call" and frame.f_code.co_name == "seed" and frame.f_code.co_filename == random.__file__:
            name = "random.Random without a seed" if frame.f_locals.get("a", 0) is None else ""
        elif event == "c_call":
            name = SYSTEM_CALLS.get(getattr(function, "__qualname__", ""), "")
        else:
            return
        if name and name not in calls:
            callers = _callers(frame)
            if callers and (libraries or is_own(callers[0].f_code)):
                shown = next((caller for caller in callers if is_own(caller.f_code)), callers[0])
                calls[name] = source_location(shown.f_code, shown.f_lineno)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return calls


def _callers(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of environments that lead to a frame, the nearest first; none if the machinery itself is
    nearer."""
    callers: list[FrameType] = []
    while frame is not None:
        if is_theirs(frame.f_code):
            callers.append(frame)
        elif frame.f_code.co_filename.startswith(_OURS):
            break
        frame = frame.f_back
    return callers


def is_own(code: CodeType) -> bool:
    """Return whether this is the code of an environment itself: no package's, and no adapter's to one."""
    return is_theirs(code) and _SITE not in code.co_filename and not code.co_filename.startswith(_ADAPTERS)


def is_theirs(code: CodeType) -> bool:
    """Return whether this is the code of an environment, or of a library of games: not of this package's machinery,
    Python's own library, numpy or torch."""
    file = code.co_filename
    if file.startswith("<"):
        return False
    if file.startswith(_OURS):
        return file[len(_OURS) :] not in _MACHINERY
    if _SITE in file:
        return not any(package in file for package in _NOT_GAMES)
    return not file.startswith(_STANDARD_LIBRARY)


def source_location(code: CodeType, line: int | None) -> str:
    """Return `file:line in function`; the file from the working directory on, or from its package on."""
    file = Path(code.co_filename)
    if _SITE in code.co_filename or not file.is_relative_to(Path.cwd()):
        return f"{code.co_filename.rpartition(_SITE)[2]}:{line} in {code.co_name}"
    return f"{file.relative_to(Path.cwd())}:{line} in {code.co_name}"
