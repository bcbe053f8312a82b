"""Checks of what a seed decides: everything, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest

from roll.envs.base import Env
from roll.envs.shared_generators import SharedGenerator, first_draw, shared_generators, system_calls
from roll.envs.traces import NotMade, difference, trace
from roll.envs.trial import SEED_BITS, Findings, Trial, described, run_seeds
from roll.envs.watched import Hung, OutOfTime
from roll.utils.seeding import stable_hash

OTHER_HASH_SEED = 4711
_MORE_SEEDS = 24
"""Tried before an environment is said to have one episode only."""
_COMPARED = 4
"""Seeds whose episodes are compared call by call."""
_FEW_STEPS = 20


def takes_seeds(trial: Trial) -> Findings:
    """Check seeds as large as runs have them."""
    bits, error = bits_taken(trial)
    if error is not None:
        yield (
            "error",
            f"takes seeds of at most {bits} bits: reset with a larger one raises {described(error)[:200]}. The seeds "
            f"of runs have {SEED_BITS} bits; reduce them in reset, e.g. seed % 2**{bits}",
        )


def bits_taken(trial: Trial) -> tuple[int, BaseException | None]:
    """Return how large seeds may be, and what a larger one raises: `SEED_BITS` and None if the seed isn't to blame."""
    error = None
    for seed in trial.seeds:
        error = error or _refusal(trial, seed)
    if error is None or isinstance(error, Hung) or _refusal(trial, 1) is not None or _refusal(trial, 0) is not None:
        return SEED_BITS, None
    for bits in range(SEED_BITS - 1, 1, -1):
        if _refusal(trial, 2**bits - 1) is None:
            return bits, error
    return 1, error


def _refusal(trial: Trial, seed: int) -> BaseException | None:
    env = trial.make()
    try:
        env.reset(seed, {})
    except (Exception, SystemExit, Hung) as error:  # noqa: BLE001 - whatever it is, it is looked at
        return error
    finally:
        env.close()
    return None


def repeats_itself(trial: Trial) -> Findings:
    """Check that the same seed is the same episode, alone or beside another one."""
    for seed in trial.seeds:
        lines = list(trace(trial.make(), seed, trial.max_steps))
        beside = trace(trial.make(), seed ^ 2, trial.max_steps)
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


def repeats_itself_elsewhere(trial: Trial) -> Findings:
    """Check that the same seed is the same episode in a new process, where strings have other hashes."""
    seed = trial.seeds[0]
    try:
        elsewhere = trial.traced_elsewhere(seed, OTHER_HASH_SEED)
        parting = difference(list(trace(trial.make(), seed, trial.max_steps)), elsewhere)
        if not parting:
            return
        one, other = trial.traced_elsewhere(seed, 0), trial.traced_elsewhere(seed, 0)
    except NotMade as error:
        yield "info", f"not compared: {error}"
        return
    if one == other and one != elsewhere:
        why = "It is the same with the same PYTHONHASHSEED: hash() of a string or the order of a set decides something"
    else:
        why = "The clock, addresses, the process, and what was played before differ between processes"
    yield "error", f"seed {seed} plays differently in a new process, {parting}. {why}"


def draws_from_its_seed(trial: Trial) -> Findings:
    """Check that no random number comes from elsewhere: each is named with the line that draws it.

    Two instances are asked the same. Before each call the generators that all code shares are set otherwise for one
    than for the other: if the call changes one, and leaves it in two states, no seed decided what was drawn.
    """
    guilty: dict[str, tuple[SharedGenerator, int]] = {}
    parting = ""
    for seed in trial.seeds[:_COMPARED]:
        pair = [_Disturbed(side) for side in range(2)]
        lines: tuple[list[str], list[str]] = ([], [])
        traces = [trace(trial.make(), seed, trial.max_steps, before_call=disturbed.begin) for disturbed in pair]
        both = [_watched(one, disturbed) for one, disturbed in zip(traces, pair, strict=True)]
        for line, other in zip_longest(*both):
            lines[0].append(line or "")
            lines[1].append(other or "")
            for generator in pair[0].drawn_from(pair[1]):
                guilty.setdefault(generator.name, (generator, seed))
            if line != other:
                break
        parting = parting or difference(*lines)
    for generator, seed in guilty.values():
        where = ""
        with suppress(Hung, OutOfTime):  # following every line takes many times as long
            where = first_draw(generator, _plays(trial, seed))
        yield (
            "error",
            f"draws from {generator.name}, the generator that all code of a process shares: other episodes change what "
            f"this one draws. Draw from {generator.instead}",
            where,
        )
    calls = system_calls(_plays(trial, trial.seeds[0]), libraries=bool(parting))
    for name, where in calls.items():
        if parting and not guilty:
            yield "error", f"{name}, which no seed decides, decides something that is shown or paid, {parting}", where
        else:
            yield "info", f"calls {name}; what is shown and paid didn't depend on it", where
    if parting and not guilty and not calls:
        yield "error", f"something that isn't the seed decides what is shown or paid, {parting}"


class _Disturbed:
    """The shared generators around each call of one of the two instances."""

    def __init__(self, side: int) -> None:
        self._side, self._calls = side, 0
        self._before: dict[str, bytes] = {}
        self.after: dict[str, bytes] = {}
        self.changed: set[str] = set()

    def begin(self) -> None:
        """Set them as nobody else does."""
        self._calls += 1
        for generator in shared_generators():
            generator.seed(stable_hash("disturbed", self._side, self._calls, bits=32))
            self._before[generator.name] = generator.digest()

    def end(self) -> None:
        """Look what has become of them."""
        self.after = {generator.name: generator.digest() for generator in shared_generators()}
        self.changed = {name for name, digest in self._before.items() if self.after.get(name) != digest}

    def drawn_from(self, other: _Disturbed) -> list[SharedGenerator]:
        """Return those that the last call of both changed, and left different."""
        changed = self.changed & other.changed
        return [g for g in shared_generators() if g.name in changed and self.after[g.name] != other.after[g.name]]


def _watched(lines: Iterator[str], disturbed: _Disturbed) -> Iterator[str]:
    for line in lines:
        disturbed.end()
        yield line


def _plays(trial: Trial, seed: int) -> Callable[[], None]:
    def play() -> None:
        for _ in trace(trial.make(), seed, min(_FEW_STEPS, trial.max_steps)):
            pass

    return play


def seeds_differ(trial: Trial) -> Findings:
    """Check that with the same actions, different seeds can be different episodes."""
    if len(trial.seeds) < 2:
        return
    env: Env = trial.make()

    def different(seeds: Sequence[int]) -> int:
        return len({"\n".join(trace(env, seed, trial.max_steps, actions_of=0)) for seed in seeds})

    bits = max(trial.seeds).bit_length()
    more = [seed % 2**bits for seed in run_seeds(len(trial.seeds) + _MORE_SEEDS)]
    if (count := different(trial.seeds)) > 1:
        yield "ok", f"{count} of {len(trial.seeds)} seeds play differently"
    elif env.one_episode:
        yield "info", f"{len(trial.seeds)} seeds play the same episode, which this environment may do (one_episode)"
    elif different(more) == 1:
        yield (
            "error",
            f"{len(more)} seeds play the same episode: reset seems to ignore its seed, and a policy learns that one "
            "by heart. If there is only one, set one_episode = True in the class",
        )
