"""Does a class keep what `Env` promises? Each violation is a sentence, with the line of the environment's code.

`check_env` is run over every bundled environment by the tests, and over yours by `roll envs test`.
"""

from __future__ import annotations

import random
import re
import signal
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from roll.envs.base import Env, InvalidAction, StepResult
from roll.envs.baselines import random_action, scripted_score
from roll.envs.traces import NotMade, difference, trace, trace_elsewhere

Level = Literal["ok", "info", "warning", "error"]

UNKNOWN_ACTION = "an action that there is not"
ODD_TEXTS = ("", " ", "\x00", "🙂" * 500, "(" * 3000, "9" * 5000, "<answer></answer>", "{0} %s \\")
"""A policy says such things; they may be invalid actions, but not errors."""

SLOW_RESET_S, SLOW_STEP_S = 1.0, 0.1
_STANDARD_LIBRARY = Path(random.__file__).parent
_ADDRESS = re.compile(r"0x[0-9a-f]{8,}")


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    level: Level  # `error`: training on it would go wrong. `warning`: it probably isn't meant. `ok`: nothing was found.
    check: str
    message: str = ""
    where: str = ""  # `file:line in function` of the environment's code, where that is known


class _Hung(RuntimeError):
    """A call took longer than it may."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """What the checks work with."""

    make: Callable[[], Env]
    seeds: Sequence[int]
    max_steps: int


def check_env(
    make: Callable[[], Env], *, seeds: Sequence[int] = range(8), max_steps: int = 50, timeout_s: float = 30.0
) -> list[Finding]:
    """One finding or more per check, `ok` included.

    Args:
        make: makes an instance; if it can be pickled, episodes are compared with those of a second process.
        max_steps: random actions per seed.
        timeout_s: seconds that one check may take (in the main thread).
    """
    trial = _Trial(make, seeds, max_steps)
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        try:
            with _limit(timeout_s):
                found = [Finding(level, name, message) for level, message in check(trial)]
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an environment may raise anything: it is a finding
            found = [Finding("error", name, _describe_error(error), blame(error))]
        findings += found or [Finding("ok", name)]
        if name == "is played" and any(finding.level == "error" for finding in found):
            break  # the other checks would say the same
    return findings


Found = Iterator[tuple[Level, str]]


def _is_played(trial: _Trial) -> Found:
    """Types of everything that comes back; numbers are finite; names make sense."""
    env = trial.make()
    if not isinstance(env, Env):
        yield "error", f"got {type(env).__name__}, expected an instance of a class derived from roll.envs.base.Env"
        return
    if not isinstance(env.instructions, str):
        yield "error", f"instructions is {env.instructions!r:.80}, expected a string"
    names = env.actions
    if not isinstance(names, tuple) or not all(isinstance(name, str) and name.strip() for name in names):
        yield "error", f"actions is {names!r:.80}, expected a tuple, e.g. ('Left', 'Right'), or () for any text"
    elif len({name.casefold() for name in names}) < len(names):
        yield "error", f"actions {names} has one twice; upper and lower case are the same to a policy"
    ended = 0
    for seed in trial.seeds:
        ended += sum(
            "terminated=True" in line or "truncated=True" in line for line in trace(env, seed, trial.max_steps)
        )
    env.close()
    if not ended:
        yield "info", f"no episode ended within {trial.max_steps} random actions"


def _repeats_itself(trial: _Trial) -> Found:
    """The same seed is the same episode, alone or beside another one."""
    for seed in trial.seeds:
        lines = list(trace(trial.make(), seed, trial.max_steps))
        beside = trace(trial.make(), seed + 1, trial.max_steps)
        again = []
        for line in trace(trial.make(), seed, trial.max_steps, render=True):
            again.append(line)
            next(beside, None)
        if parting := difference(lines, again):
            yield (
                "error",
                f"seed {seed} plays differently a second time, {parting}. Draw from random.Random(seed), not from a "
                "global generator, and keep nothing from one episode (or instance) to the next",
            )
            return


def _repeats_itself_elsewhere(trial: _Trial) -> Found:
    """The same seed is the same episode in another process."""
    seed = trial.seeds[0]
    try:
        elsewhere = trace_elsewhere(trial.make, seed, trial.max_steps)
    except NotMade as error:
        yield "info", f"not compared: {error}"
        return
    if parting := difference(list(trace(trial.make(), seed, trial.max_steps)), elsewhere):
        yield (
            "error",
            f"seed {seed} plays differently in a second process, {parting}. hash() of a string, the order of a set, "
            "the clock and addresses differ between processes",
        )


def _seeds_differ(trial: _Trial) -> Found:
    played = {"\n".join(trace(trial.make(), seed, 5, actions_of=0)) for seed in trial.seeds}
    if len(trial.seeds) > 1 and len(played) == 1:
        yield "warning", f"{len(trial.seeds)} seeds play the same episode: a policy learns that one by heart"


def _refuses_unknown_actions(trial: _Trial) -> Found:
    env = trial.make()
    if not env.actions:
        for text in ODD_TEXTS:
            env.reset(trial.seeds[0], {})
            try:
                env.step(text)
            except InvalidAction:
                continue
        return
    env.reset(trial.seeds[0], {})
    try:
        env.step(UNKNOWN_ACTION)
    except InvalidAction:
        return
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        yield "warning", f"an unknown action raises {type(error).__name__}, expected roll.envs.base.InvalidAction"
    else:
        yield "warning", "an unknown action is taken as if it were one; raise roll.envs.base.InvalidAction"


def _ends_well(trial: _Trial) -> Found:
    """What happens after the end of an episode, and what its last step says."""
    env = trial.make()
    for seed in trial.seeds:
        last = _last_step(env, seed, trial.max_steps)
        if last is None:
            continue
        if last.truncated:
            yield "warning", "sets truncated: time limits are `max_steps`, which also tells the policy what is left"
        if "success" not in last.metrics:
            yield "warning", "the last step has no metrics['success'] (1 or 0): validation has no success rate"
        try:
            after = env.step(random_action(env, random.Random(seed)))
        except Exception:  # noqa: BLE001 - ResetNeeded, or whatever it is: it is never called so
            return
        if after.reward:
            yield "warning", f"gives a reward of {after.reward:g} after the end; raise roll.envs.base.ResetNeeded"
        return


def _closes_twice(trial: _Trial) -> Found:
    env = trial.make()
    env.close()
    env = trial.make()
    threads = threading.active_count()
    env.reset(trial.seeds[0], {})
    env.close()
    env.close()
    if threading.active_count() > threads:
        yield "warning", "a thread goes on after close"


def _renders(trial: _Trial) -> Found:
    env = trial.make()
    env.reset(trial.seeds[0], {})
    picture = env.render()
    if picture is None or isinstance(picture, str):
        return
    shape = f"{picture.dtype} {list(picture.shape)}" if isinstance(picture, np.ndarray) else type(picture).__name__
    if not re.fullmatch(r"uint8 \[[1-9]\d*, [1-9]\d*, 3\]", shape):
        yield "error", f"render returned {shape}, expected a uint8 array [height, width, 3], text, or None"


def _names_states(trial: _Trial) -> Found:
    """States are for comparison: an address in one makes it unlike all others."""
    for line in trace(trial.make(), trial.seeds[0], trial.max_steps):
        if address := _ADDRESS.search(line):
            yield "warning", f"a text has {address.group()}, an address in memory: it is another one each time"
            return


def _solves_itself(trial: _Trial) -> Found:
    score = scripted_score(trial.make, trial.seeds, 1000)
    if score is None:
        yield "info", "solution() gives none"
    elif score.successes + score.unplayed < score.episodes:
        failed = score.episodes - score.unplayed - score.successes
        yield "error", f"{failed} of {score.episodes - score.unplayed} solutions don't end with metrics['success'] = 1"


def _is_fast(trial: _Trial) -> Found:
    env = trial.make()
    resets, steps = [], []
    for seed in trial.seeds:
        begun = time.perf_counter()
        env.reset(seed, {})
        resets.append(time.perf_counter() - begun)
        rng = random.Random(seed)
        for _ in range(10):
            begun = time.perf_counter()
            try:
                result = env.step(random_action(env, rng))
            except InvalidAction:
                continue
            steps.append(time.perf_counter() - begun)
            if result.terminated or result.truncated:
                break
    reset, step = statistics.median(resets), statistics.median(steps or [0.0])
    slow = reset > SLOW_RESET_S or step > SLOW_STEP_S
    yield "warning" if slow else "ok", f"reset {reset * 1e3:.3g} ms, step {step * 1e3:.3g} ms"


CHECKS: dict[str, Callable[[_Trial], Found]] = {
    "is played": _is_played,
    "same seed, same episode": _repeats_itself,
    "same in another process": _repeats_itself_elsewhere,
    "seeds differ": _seeds_differ,
    "unknown actions": _refuses_unknown_actions,
    "end of an episode": _ends_well,
    "close": _closes_twice,
    "render": _renders,
    "states": _names_states,
    "solution": _solves_itself,
    "speed": _is_fast,
}


def _last_step(env: Env, seed: int, max_steps: int) -> StepResult | None:
    """The last step of an episode of the solution's, else of random actions; None when it doesn't end."""
    env.reset(seed, {})
    rng = random.Random(seed)
    solution = env.solution(max_steps)
    actions = solution if solution is not None else [random_action(env, rng) for _ in range(max_steps)]
    for action in actions:
        try:
            result = env.step(action)
        except InvalidAction:
            continue
        if result.terminated or result.truncated:
            return result
    return None


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raises `_Hung` where the code is after so long. Only the main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def interrupt(*_: Any) -> None:
        raise _Hung(f"not done after {seconds:g} s; here it was")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _describe_error(error: BaseException) -> str:
    text = str(error)
    return text if isinstance(error, _Hung) else f"{type(error).__name__}: {text}" if text else type(error).__name__


def blame(error: BaseException) -> str:
    """`file:line in function` of the last code on the way to an error that isn't this module's or a library's."""
    while error.__cause__ is not None:
        error = error.__cause__
    foreign = [frame for frame in traceback.extract_tb(error.__traceback__) if not _passed_by(frame.filename)]
    if not foreign:
        return ""
    frame = foreign[-1]
    path = Path(frame.filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{frame.lineno} in {frame.name}: {frame.line}"


def _passed_by(file: str) -> bool:
    """Whether an error only came through here: the machinery of this package, and libraries."""
    machinery = {"base.py", "baselines.py", "conformance.py", "env_registry.py", "traces.py", "wrappers.py"}
    path = Path(file)
    ours = path.parent == Path(__file__).parent and path.name in machinery
    return ours or file.startswith("<") or "site-packages" in file or path.is_relative_to(_STANDARD_LIBRARY)
