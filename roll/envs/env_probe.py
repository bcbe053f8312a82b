"""`roll envs test`: an environment is checked in processes of its own, so that it can't end the test or hold it up.

A process is killed when one call takes too long, and what it did is a finding; the next check gets a new one. Episodes
are compared with those of other processes, in which strings have other hashes.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import math
import pickle
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.envs.baselines import BaselineScore
from roll.envs.conformance import CHECKS, ELSEWHERE, SEEDS_TAKEN, makes_others_useless
from roll.envs.conformance_seeds import OTHER_HASH_SEED
from roll.envs.env_messages import is_over
from roll.envs.probe_worker import NOTE_BYTES, ProbeRequest
from roll.envs.recorded_env import Recorded
from roll.envs.trial import EnvFinding, run_seeds
from roll.isolation.processes.interpreter import resolve_interpreter
from roll.isolation.processes.process_pool import ProcessPool
from roll.isolation.processes.worker_process import Call, WorkerExit, WorkerProcess

if TYPE_CHECKING:
    from typing import Self

NOT_PLAYED = "not played"
_GRACE_S = 5.0  # Beyond the limit of a call, which interrupts itself where it can
_MEMORY_MB = 16_384.0


class ProbeEnded(RuntimeError):
    """The process ended, or was killed; the message says in which call and how."""


class Refused(ValueError):
    """The environment can't be made or played; `where` is the line, if that is known."""

    def __init__(self, message: str, where: str) -> None:
        super().__init__(message)
        self.where = where


@dataclass(slots=True, eq=False)
class _ProbeCall:
    """One request."""

    key: int
    request: tuple[Any, ...]
    doing: str
    future: concurrent.futures.Future[tuple[Any, ...]]


class Probe(ProcessPool[_ProbeCall]):
    """A process that answers the requests of `probe_worker.py`, and a successor of it when it ends."""

    name, handler, what = "probe", "roll.envs.probe_worker:ProbeHandler", "roll.envs"

    def __init__(
        self, environment: Mapping[str, str], *, timeout_s: float, hash_seed: int = 0, python: str | None = None
    ) -> None:
        """Start it.

        Args:
            environment: its variables.
            timeout_s: seconds that one call of an environment may take.
            hash_seed: its PYTHONHASHSEED. Runs have 0.
            python: an interpreter of its own.
        """
        self._note = tempfile.NamedTemporaryFile(prefix="roll-probe-")  # noqa: SIM115 - lives as long as the pool
        self._note.write(bytes(NOTE_BYTES))
        self._note.flush()
        self._keys = itertools.count(1)
        self._limit_s, self.hash_seed = timeout_s, hash_seed
        super().__init__(
            self._note.name,
            num_processes=1,
            timeout_s=timeout_s + _GRACE_S,
            start_timeout_s=120.0,
            max_assigned=1,
            memory_mb=_MEMORY_MB,
            environment=environment,
            python=python,
        )

    def ask(self, kind: str, order: ProbeRequest, *arguments: Any) -> Any:
        """Return the answer; raises `ProbeEnded` or `Refused`."""
        call = _ProbeCall(next(self._keys), (kind, pickle.dumps(order), *arguments), kind, concurrent.futures.Future())
        self.post(lambda: self.enqueue(call))
        match call.future.result():
            case ("refused", str(message), str(where)):
                raise Refused(message, where)
            case (_, answer):
                return answer
        return None

    def shutdown(self) -> None:
        super().shutdown()
        self._note.close()

    # --- in the pool's thread ----------------------------------------------------------

    def _begin(self, process: WorkerProcess[_ProbeCall], item: _ProbeCall) -> None:
        process.assigned[item.key] = item
        # Every call of the environment restarts the clock.
        process.send(Call(item.key, item.request, item.doing, "", parts=1_000_000))

    def answered(self, process: WorkerProcess[_ProbeCall], call: Call, answer: tuple[Any, ...]) -> None:
        item = process.assigned.pop(call.key, None)
        if item is not None:
            item.future.set_result(answer)
        self.assign_queued()

    def _lost(
        self,
        items: Sequence[_ProbeCall],
        ended: WorkerExit,
        successor: WorkerProcess[_ProbeCall] | None,  # noqa: ARG002
    ) -> None:
        self._note.seek(0)
        doing = self._note.read(NOTE_BYTES).partition(b"\0")[0].decode(errors="replace")
        if ended.status == "timeout" and ended.was_ready:
            reason = f"took over {self._limit_s:g} s and can't be interrupted"
        else:
            reason = ended.reason
        for item in items:
            item.future.set_exception(ProbeEnded(f"{doing or item.doing}: {reason}"))

    def _abandon(self, item: _ProbeCall, reason: str) -> None:
        item.future.set_exception(ProbeEnded(reason))

    def _load_error(self, reason: str) -> Exception:
        return ProbeEnded(reason)


class EnvProbes:
    """Processes by PYTHONHASHSEED, each started when it is needed. Use it in a `with` block."""

    def __init__(self, environment: Mapping[str, str], *, timeout_s: float, python: str | None = None) -> None:
        self._start: Callable[[int], Probe] = lambda hash_seed: Probe(
            environment, timeout_s=timeout_s, hash_seed=hash_seed, python=python
        )
        self._probes: dict[tuple[int, int], Probe] = {}
        self._stack = ExitStack()

    def get(self, hash_seed: int = 0, number: int = 0) -> Probe:
        """Return the process of this hash seed; others of it by number."""
        key = (hash_seed, number)
        if key not in self._probes:
            self._probes[key] = self._stack.enter_context(self._start(hash_seed))
        return self._probes[key]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def other_interpreter(python: Any) -> str | None:
    """Return the path of an interpreter, None for that of this process. Raises `ValueError` if there is none."""
    path = resolve_interpreter(python) if isinstance(python, str) else None
    if path is None:
        raise ValueError(f"there is no program {python!r}; give the path of an interpreter")
    return None if path == str(Path(sys.executable).absolute()) else path


def findings_of(probes: EnvProbes, order: ProbeRequest, total_s: float = math.inf) -> Iterator[EnvFinding]:
    """Yield what the checks find, one or more per check, as they are done. After `total_s` seconds no further one
    begins."""
    until = time.monotonic() + total_s
    for name in CHECKS:
        if time.monotonic() > until:
            yield EnvFinding("info", name, f"{NOT_PLAYED}: those before took over {total_s:g} s")
            continue
        findings = _checked(probes, order, name)
        yield from findings
        if name == SEEDS_TAKEN:
            order = taken(probes, order)
        if makes_others_useless(findings):
            return


def taken(probes: EnvProbes, order: ProbeRequest) -> ProbeRequest:
    """Return the order with seeds that the environment takes."""
    try:
        return replace(order, seeds=tuple(probes.get().ask("seeds", order)))
    except (ProbeEnded, Refused):
        return replace(order, seeds=tuple(run_seeds(order.num_seeds)))


def _checked(probes: EnvProbes, order: ProbeRequest, name: str) -> list[EnvFinding]:
    try:
        traces = (_traces(probes, order),) if name == ELSEWHERE else ()
        return [EnvFinding(*fields) for fields in probes.get().ask("check", order, name, *traces)]
    except ProbeEnded as error:
        return [EnvFinding("error", name, str(error))]
    except Refused as error:
        return [EnvFinding("error", name, str(error), error.where)]


def _traces(probes: EnvProbes, order: ProbeRequest) -> dict[int, list[Any]]:
    """Return the traces that `repeats_itself_elsewhere` compares: those of a hash seed of runs only if another one
    plays otherwise."""
    assert order.seeds is not None, "seeds are settled before"
    seed = order.seeds[0]

    def lines(probe: Probe) -> Any:
        try:
            return probe.ask("trace", order, seed)
        except (ProbeEnded, Refused) as error:
            return str(error)

    other = lines(probes.get(OTHER_HASH_SEED))
    here = lines(probes.get())
    same = [] if other == here else [lines(probes.get(0, number)) for number in (1, 2)]
    return {OTHER_HASH_SEED: [other], 0: same}


def findings_of_responses(probes: EnvProbes, order: ProbeRequest, episodes: Sequence[Recorded]) -> list[EnvFinding]:
    """Return what comes of recorded responses; each episode is played twice. Those without a seed get those of the
    order."""
    check = "recorded responses"
    seeds = order.seeds or run_seeds(order.num_seeds)
    counts: Counter[str] = Counter()
    for number, episode in enumerate(episodes):
        seed = seeds[number % len(seeds)] if episode.seed is None else episode.seed
        at = f"the episode in line {episode.line} (seed {seed})"
        try:
            one, other = (probes.get().ask("responses", order, seed, episode.responses) for _ in range(2))
        except (ProbeEnded, Refused) as error:
            return [EnvFinding("error", check, f"{at}: {error}", getattr(error, "where", ""))]
        if one != other:
            return [EnvFinding("error", check, f"{at} is another one when the same responses are given again")]
        counts["played"] += len(one["turns"])
        counts["left over"] += len(episode.responses) - len(one["turns"])
        counts["ended"] += bool(one["turns"]) and is_over(one["turns"][-1][1])
        for _, step in one["turns"]:
            counts.update({name: int(step[5][name]) for name in ("format_errors", "invalid_actions")})
    summary = (
        f"{counts['played']} responses in {len(episodes)} episodes, of which {counts['ended']} ended; "
        f"{counts['format_errors']} responses without an action, {counts['invalid_actions']} invalid actions, "
        f"{counts['left over']} responses after an end"
    )
    useless = counts["format_errors"] + counts["invalid_actions"] >= counts["played"]
    return [EnvFinding("warning" if useless else "ok", check, summary)]


def scores_of(probes: EnvProbes, order: ProbeRequest, episodes: int) -> list[BaselineScore]:
    """Return what the random agent and the solution achieve; raises `ProbeEnded` or `Refused`."""
    return [BaselineScore(**fields) for fields in probes.get().ask("scores", order, episodes)]
