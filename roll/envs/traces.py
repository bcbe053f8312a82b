"""What an environment plays, as lines that can be compared: with another instance's, and with another process's."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from roll.envs.base import Env, InvalidAction, Observation
from roll.envs.baselines import random_action
from roll.envs.env_messages import pack_observation, pack_step
from roll.envs.watched import Clock, Watched
from roll.envs.wrappers import checked_observation, checked_result
from roll.utils.seeding import stable_hash

_LONGEST = 4000
"""Characters of a line; of a longer one the rest is a digest."""
_MAX_EPISODES = 4
"""Of a trace, which is shorter then: some episodes have one step, and some take seconds to begin."""
_ELSEWHERE_S = 600.0
"""What a whole trace in another process may take, importing included."""


class NotMade(RuntimeError):
    """The environment can't be made in another process, for a reason that isn't its own."""


class ProcessEnded(RuntimeError):
    """The other process ended without an answer."""


def trace(
    env: Env,
    seed: int,
    num_steps: int,
    *,
    render: bool = False,
    actions_of: int | None = None,
    before_call: Callable[[], None] = lambda: None,
) -> Iterator[str]:
    """Yield a line for everything that comes back; an episode that ends, or is cut off, begins again a few times.

    Every second episode follows the solution for a while, if there is one, so that what comes late is seen too; all
    else is random actions. They are drawn for the seed, or for `actions_of`, which leaves solutions out because those
    differ by seed. With `render`, pictures are taken on the way.
    """
    rng = random.Random(stable_hash("conformance", seed if actions_of is None else actions_of))
    before_call()
    yield _reset(env, seed)
    ahead: list[str] = []
    episodes = 0
    for _ in range(num_steps):
        action = ahead.pop(0) if ahead else random_action(env, rng)
        if render:
            env.render()
        before_call()
        try:
            result = checked_result(env, env.step(action))
        except InvalidAction as error:
            yield _cut(f"{action!r} is invalid: {error}")
            continue
        yield _cut(f"{action!r} leads to {pack_step(result)!r}")
        if result.terminated or result.truncated:
            episodes += 1
            if episodes == _MAX_EPISODES:
                return
            before_call()
            yield _reset(env, seed)
            solution = env.solution(num_steps) if actions_of is None and episodes % 2 else None
            ahead = list(solution or ())[: rng.randrange(num_steps)]


def _reset(env: Env, seed: int) -> str:
    observation: Observation = checked_observation(env, "reset", env.reset(seed, {}))
    return _cut(f"begins with {pack_observation(observation)!r}")


def _cut(line: str) -> str:
    if len(line) <= _LONGEST:
        return line
    return f"{line[:_LONGEST]}... {hashlib.blake2b(line.encode(errors='replace'), digest_size=8).hexdigest()}"


def ends(lines: Sequence[str]) -> int:
    """Return how many episodes came to an end in a trace."""
    return max(0, sum(line.startswith("begins with ") for line in lines) - 1)


def difference(lines: Sequence[str], others: Sequence[str]) -> str:
    """Return where two traces differ first; empty when they don't."""
    for number, (line, other) in enumerate(zip(lines, others, strict=False)):
        if line != other:
            start = max(0, next((i for i, (a, b) in enumerate(zip(line, other, strict=False)) if a != b), 0) - 30)
            shown, shown_other = line[start : start + 80], other[start : start + 80]
            return f"first in line {number} of its trace: ...{shown!r} and ...{shown_other!r}"
    return "" if len(lines) == len(others) else f"which has {len(others)} steps and not {len(lines)}"


def trace_elsewhere(make: Callable[[], Env], seed: int, num_steps: int, hash_seed: int) -> list[str]:
    """Trace in a process of its own with this PYTHONHASHSEED; raises `NotMade` or `ProcessEnded`."""
    try:
        order = pickle.dumps((make, seed, num_steps))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise NotMade(f"what makes the environment can't be pickled: {error}") from None
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "asked"), Path(folder, "answered")
        asked.write_bytes(order)
        code = "import sys; from roll.envs.traces import answer; answer(*sys.argv[1:])"
        try:
            done = subprocess.run(
                [sys.executable, "-c", code, str(asked), str(answered)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": str(hash_seed)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                check=False,
                timeout=_ELSEWHERE_S,
            )
        except subprocess.TimeoutExpired:
            raise ProcessEnded(f"the process was not done after {_ELSEWHERE_S:g} s") from None
        if not answered.is_file():
            raise ProcessEnded(f"the process ended with status {done.returncode}: {done.stderr[-500:].strip()}")
        played: list[str] | NotMade = pickle.loads(answered.read_bytes())
    if isinstance(played, NotMade):
        raise played
    return played


def answer(asked: str, answered: str) -> None:
    """Read what to play and write its trace: what the other process does."""
    played: list[str] | NotMade
    try:
        make, seed, num_steps = pickle.loads(Path(asked).read_bytes())
    except (AttributeError, ImportError, pickle.UnpicklingError) as error:
        played = NotMade(f"{type(error).__name__}: {error}")
    else:
        played = list(trace(Watched(make, Clock(_ELSEWHERE_S, _ELSEWHERE_S)), seed, num_steps))
    Path(answered).write_bytes(pickle.dumps(played))
