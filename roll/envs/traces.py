"""What an environment plays, as lines that can be compared: with another instance's, and with another process's."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from roll.envs.base import Env, InvalidAction
from roll.envs.baselines import random_action
from roll.envs.wrappers import checked_observation, checked_result
from roll.utils.seeding import stable_hash


class NotMade(RuntimeError):
    """The environment can't be made in another process, for a reason that isn't its own."""


class ProcessEnded(RuntimeError):
    """The other process ended without an answer."""


def trace(env: Env, seed: int, num_steps: int, *, render: bool = False, actions_of: int | None = None) -> Iterator[str]:
    """A line for everything that comes back, over random actions; an episode that ends begins again.

    The actions are drawn for the seed, or for `actions_of`. With `render`, pictures are taken on the way.
    """
    rng = random.Random(stable_hash("conformance", seed if actions_of is None else actions_of))
    line = repr(checked_observation(env, "reset", env.reset(seed, {})))
    yield line
    for _ in range(num_steps):
        action = random_action(env, rng)
        if render:
            env.render()
        try:
            result = checked_result(env, env.step(action))
        except InvalidAction as error:
            yield f"{action!r} is invalid: {error}"
            continue
        yield f"{action!r} leads to {result!r}"
        if result.terminated or result.truncated:
            yield repr(checked_observation(env, "reset", env.reset(seed, {})))


def difference(lines: Sequence[str], others: Sequence[str]) -> str:
    """Where two traces part; empty when they don't."""
    for number, (line, other) in enumerate(zip(lines, others, strict=False)):
        if line != other:
            start = max(0, next((i for i, (a, b) in enumerate(zip(line, other, strict=False)) if a != b), 0) - 30)
            shown, shown_other = line[start : start + 80], other[start : start + 80]
            return f"first in line {number} of its trace: ...{shown!r} and ...{shown_other!r}"
    return "" if len(lines) == len(others) else f"which has {len(others)} steps and not {len(lines)}"


def trace_elsewhere(make: Callable[[], Env], seed: int, num_steps: int) -> list[str]:
    """The same in a process of its own, with another PYTHONHASHSEED; raises `NotMade` or `ProcessEnded`."""
    try:
        order = pickle.dumps((make, seed, num_steps))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise NotMade(f"what makes the environment can't be pickled: {error}") from None
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "asked"), Path(folder, "answered")
        asked.write_bytes(order)
        code = "import sys; from roll.envs.traces import answer; answer(*sys.argv[1:])"
        done = subprocess.run(
            [sys.executable, "-c", code, str(asked), str(answered)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "4711"},
            capture_output=True,
            text=True,
            check=False,
        )
        if not answered.is_file():
            raise ProcessEnded(f"the process ended with status {done.returncode}: {done.stderr[-500:].strip()}")
        played: list[str] | NotMade = pickle.loads(answered.read_bytes())
    if isinstance(played, NotMade):
        raise played
    return played


def answer(asked: str, answered: str) -> None:
    """The other process: reads what to play, writes its trace."""
    played: list[str] | NotMade
    try:
        make, seed, num_steps = pickle.loads(Path(asked).read_bytes())
    except (AttributeError, ImportError, pickle.UnpicklingError) as error:
        played = NotMade(f"{type(error).__name__}: {error}")
    else:
        played = list(trace(make(), seed, num_steps))
    Path(answered).write_bytes(pickle.dumps(played))
