"""What runs in the process of a `Probe`: the checks of an environment, which may hang or end it.

A request is a kind and a pickled `ProbeRequest`, plus a name or a number; every answer is made of plain values:

    made                      ("made",) | ("refused", what it says, where)
    seeds                     ("seeds", the trial's seeds as the environment takes them)
    check NAME [traces]       ("found", [(level, check, message, where)]); traces: (seed, hash seed) -> lines
    trace SEED                ("lines", lines)
    episode SEED              ("episode", `messages.played`)
    responses SEED RESPONSES  the same for recorded responses
    scores EPISODES           ("scores", [fields of `baselines.BaselineScore`])
"""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from roll.envs.adapters.base import HubError
from roll.envs.baselines import random_score, scripted_score
from roll.envs.conformance import run_check, with_taken_seeds
from roll.envs.env_registry import EnvLoadError, bare_env
from roll.envs.episode_shown import play_responses, play_shown
from roll.envs.traces import ProcessEnded, trace
from roll.envs.trial import Trial, blame, described, run_seeds
from roll.envs.watched import Clock
from roll.envs.wrappers import EnvSpec

NOTE_BYTES = 512
"""Of the file in which the process notes what it is doing."""


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """What is tested, and how much of it is played."""

    spec: EnvSpec
    num_seeds: int
    max_steps: int
    timeout_s: float
    budget_s: float
    seeds: tuple[int, ...] | None = None
    """None: as runs have them."""


class ProbeHandler:
    """Answers the requests above."""

    def __init__(self, note_file: str) -> None:
        with open(note_file, "r+b") as file:
            self._note = mmap.mmap(file.fileno(), NOTE_BYTES)

    def answer(self, request: tuple[Any, ...], restart_clock: Callable[[], None]) -> tuple[Any, ...]:
        """Return what was found. What an environment raises here is an answer too."""

        def tell(doing: str) -> None:
            restart_clock()
            self._write(doing)

        kind, packed, *arguments = request
        self._write("")
        try:
            order: ProbeRequest = pickle.loads(packed)
            clock = Clock(order.timeout_s, order.budget_s, tell)
            seeds = run_seeds(order.num_seeds) if order.seeds is None else order.seeds
            trial = Trial(partial(bare_env, order.spec), seeds, order.max_steps, clock)
            return getattr(self, f"_{kind}")(trial, order, *arguments)  # type: ignore[no-any-return]
        except BaseException as error:  # noqa: BLE001 - the boundary: it is told
            message = str(error) if isinstance(error, EnvLoadError) else described(error)
            cause = error.__cause__ if isinstance(error, EnvLoadError) else error
            return "refused", message, "" if cause is None or isinstance(cause, HubError) else blame(cause)

    def forked(self, request: tuple[Any, ...], answer: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what becomes of a request in which the process was doubled by `os.fork`."""
        if request[0] == "check" and answer[0] == "found":
            finding = ("error", request[2], "calls os.fork; start other programs with subprocess", "")
            return "found", [*answer[1], finding]
        return answer

    def _write(self, doing: str) -> None:
        encoded = doing.encode(errors="replace")[: NOTE_BYTES - 1]
        self._note[: len(encoded) + 1] = encoded + b"\0"

    def _made(self, trial: Trial, _: ProbeRequest) -> tuple[Any, ...]:
        trial.make().close()
        return ("made",)

    def _seeds(self, trial: Trial, _: ProbeRequest) -> tuple[Any, ...]:
        return "seeds", list(with_taken_seeds(trial).seeds)

    def _check(self, trial: Trial, _: ProbeRequest, name: str, traces: Any = None) -> tuple[Any, ...]:
        if traces is not None:
            numbers = itertools.count()

            def elsewhere(_: int, hash_seed: int) -> list[str]:
                # None is left where the other process's was as that of a process like this one, but isn't any more.
                lines = traces[hash_seed].pop(0) if traces[hash_seed] else [f"not played {next(numbers)}"]
                if isinstance(lines, str):
                    raise ProcessEnded(lines)
                return list(lines)

            trial = dataclasses.replace(trial, elsewhere=elsewhere)
        return "found", [
            (finding.level, finding.check, finding.message, finding.where) for finding in run_check(name, trial)
        ]

    def _trace(self, trial: Trial, _: ProbeRequest, seed: int) -> tuple[Any, ...]:
        return "lines", list(trace(trial.make(), seed, trial.max_steps))

    def _episode(self, trial: Trial, order: ProbeRequest, seed: int) -> tuple[Any, ...]:
        return "episode", play_shown(trial.make(), order.spec, seed)

    def _responses(self, trial: Trial, order: ProbeRequest, seed: int, responses: Sequence[str]) -> tuple[Any, ...]:
        return "episode", play_responses(trial.make(), order.spec, seed, responses)

    def _scores(self, trial: Trial, _: ProbeRequest, episodes: int) -> tuple[Any, ...]:
        bits = max(seed.bit_length() for seed in trial.seeds)
        seeds = [seed % 2**bits for seed in run_seeds(episodes)]
        scores = [
            random_score(trial.make, seeds, trial.max_steps),
            scripted_score(trial.make, seeds, max(trial.max_steps, 1000)),
        ]
        return "scores", [dataclasses.asdict(score) for score in scores if score is not None]
