"""Checks of what an environment returns, takes, and leaves behind."""

from __future__ import annotations

import io
import random
import re
import statistics
import sys
import threading
import time

from roll.envs.base import Env, InvalidAction, StepResult
from roll.envs.baselines import random_action, scripted_score, success_metrics
from roll.envs.traces import ends, trace
from roll.envs.trial import Findings, Trial

UNKNOWN_ACTION = "an action that there is not"
ODD_TEXTS = ("", " ", "\x00", "🙂" * 500, "(" * 3000, "9" * 5000, "<answer></answer>", "{0} %s \\")
"""A policy says such things; they may be invalid actions, but not errors."""

SLOW_RESET_S, SLOW_STEP_S = 1.0, 0.1
MANY_CHARACTERS = 100_000
"""Printed in one episode."""
LONG_OBSERVATION = 20_000
"""Characters; some thousand tokens."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]{8,}")


def is_played(trial: Trial) -> Findings:
    """Check the types of everything that comes back, that numbers are finite, and that names make sense."""
    env = trial.make()
    yield from _names(env)
    ended, longest = 0, len(env.reset(trial.seeds[0], {}).text)
    for seed in trial.seeds:
        lines = list(trace(env, seed, trial.max_steps))
        ended += ends(lines)
        yield from _names(env, again=True)
    env.close()
    if longest > LONG_OBSERVATION:
        yield "warning", f"the first observation has {longest:,} characters, of which a policy reads every one"
    if not ended:
        yield "info", f"no episode ended within {trial.max_steps} actions"


def _names(env: Env, *, again: bool = False) -> Findings:
    """Check the names of actions, and the instructions."""
    names = env.actions
    if not isinstance(env.instructions, str):
        yield "error", f"instructions is {env.instructions!r:.80}, expected a string"
    if again:
        return
    if not isinstance(names, tuple) or not all(isinstance(name, str) and name.strip() for name in names):
        yield "error", f"actions is {names!r:.80}, expected a tuple, e.g. ('Left', 'Right'), or () for any text"
    elif len({name.casefold() for name in names}) < len(names):
        yield "error", f"actions {names} has one twice; upper and lower case are the same to a policy"
    roles = env.roles
    if not isinstance(roles, tuple) or len(roles) == 1 or len(set(roles)) < len(roles) or "" in roles:
        yield "error", f"roles is {roles!r:.80}, expected a tuple of two different names or more, or () for one agent"


def refuses_unknown_actions(trial: Trial) -> Findings:
    """Check that unknown actions are refused; for an environment that takes any text, odd ones are no errors."""
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


def ends_well(trial: Trial) -> Findings:
    """Check what happens after the end of an episode, and its last step. Time limits of its own are ends too."""
    env = trial.make()
    for seed in trial.seeds:
        last = _last_step(env, seed, trial.max_steps)
        if last is None:
            continue
        wanted = [f"success/{role}" for role in env.roles] or ["success"]
        if any(name not in success_metrics(last) for name in wanted):
            names = ", ".join(f"metrics[{name!r}]" for name in wanted)
            yield "info", f"the last step has no {names} (1 or 0): validation has no success rate"
        if last.truncated:
            return  # the game isn't over: it may go on as it likes
        try:
            after = env.step(random_action(env, random.Random(seed)))
        except Exception:  # noqa: BLE001 - ResetNeeded, or whatever it is: it is never called so
            return
        if after.reward > 0:
            yield "warning", f"gives a reward of {after.reward:g} after the end; raise roll.envs.base.ResetNeeded"
        return


def closes_twice(trial: Trial) -> Findings:
    """Check that closing twice does no harm, and ends what was begun."""
    env = trial.make()
    env.close()
    threads = threading.active_count()
    env = trial.make()
    env.reset(trial.seeds[0], {})
    env.close()
    env.close()
    if threading.active_count() > threads:
        yield "warning", "a thread goes on after close"


def renders(trial: Trial) -> Findings:
    """Check that a picture is one."""
    env = trial.make()
    env.reset(trial.seeds[0], {})
    picture = env.render()
    if picture is None or isinstance(picture, str):
        return
    is_array = type(picture).__module__ == "numpy" and hasattr(picture, "shape")
    shape = f"{picture.dtype} {list(picture.shape)}" if is_array else type(picture).__name__
    if not re.fullmatch(r"uint8 \[[1-9]\d*, [1-9]\d*, 3\]", shape):
        yield "error", f"render returned {shape}, expected a uint8 array [height, width, 3], text, or None"


def names_states(trial: Trial) -> Findings:
    """Check that states can be compared: an address in one makes it unlike all others."""
    for line in trace(trial.make(), trial.seeds[0], trial.max_steps):
        if address := _ADDRESS.search(line):
            yield "warning", f"a text has {address.group()}, an address in memory: it is another one each time"
            return


def solves_itself(trial: Trial) -> Findings:
    """Check that solutions lead to success."""
    score = scripted_score(trial.make, trial.seeds, 1000)
    if score is None:
        yield "info", "solution() gives none"
    elif score.successes + score.unplayed < score.episodes:
        failed = score.episodes - score.unplayed - score.successes
        name = "success/<role>" if trial.make().roles else "success"
        yield "error", f"{failed} of {score.episodes - score.unplayed} solutions don't end with metrics['{name}'] = 1"


class _Counted(io.TextIOBase):
    """Counts what is printed, and drops it."""

    characters = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.characters += len(text)
        return len(text)


def prints_little(trial: Trial) -> Findings:
    """Check that little is printed: a run doesn't show it, and it takes time."""
    counted = _Counted()
    before = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = counted
    try:
        for _ in trace(trial.make(), trial.seeds[0], trial.max_steps):
            pass
    finally:
        sys.stdout, sys.stderr = before
    if counted.characters > MANY_CHARACTERS:
        yield "warning", f"prints {counted.characters:,} characters in {trial.max_steps} steps; a run shows none"


def is_fast(trial: Trial) -> Findings:
    """Check how long calls take."""
    env = trial.make()
    resets: list[float] = []
    steps: list[float] = []
    for seed in trial.seeds:
        begun = time.perf_counter()
        env.reset(seed, {})
        resets.append(time.perf_counter() - begun)
        rng = random.Random(seed)
        for _ in range(10):
            action = random_action(env, rng)
            begun = time.perf_counter()
            try:
                result = env.step(action)
            except InvalidAction:
                continue
            steps.append(time.perf_counter() - begun)
            if result.terminated or result.truncated:
                break
    reset, step = statistics.median(resets), statistics.median(steps or [0.0])
    slow = reset > SLOW_RESET_S or step > SLOW_STEP_S
    yield "warning" if slow else "ok", f"reset {reset * 1e3:.3g} ms, step {step * 1e3:.3g} ms"


def _last_step(env: Env, seed: int, max_steps: int) -> StepResult | None:
    """Return the last step of an episode of the solution's, else of random actions; None when it doesn't end."""
    env.reset(seed, {})
    rng = random.Random(seed)
    solution = env.solution(max_steps)
    for action in solution if solution is not None else (random_action(env, rng) for _ in range(max_steps)):
        try:
            result = env.step(action)
        except InvalidAction:
            continue
        if result.terminated or result.truncated:
            return result
    return None
