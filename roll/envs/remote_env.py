"""An environment under an interpreter of its own (`env_workers.python`), for code that holds environments itself.

Episodes of a run are played by `EnvPool`, whose processes run under that interpreter as they are. This is for what is
outside episodes: checks before a run, instructions, demonstrations. Each interpreter has one process for all of them.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from typing import Any

from roll.envs.base import Env, InvalidAction, Observation, ResetNeeded, StepResult
from roll.envs.env_messages import unpack_observation, unpack_step
from roll.envs.wrappers import EnvSpec
from roll.isolation.processes.process_pool import ProcessPool
from roll.isolation.processes.worker_process import Call, WorkerExit, WorkerProcess

_CALL_S = 300.0  # A solution may be searched for long
_START_S = 60.0


class RemoteEnvError(ValueError):
    """An interpreter that can't be used, or an environment that can't be made there. The message is for users."""


@dataclass(slots=True, eq=False)
class _HostCall:
    """One call."""

    key: int
    arguments: tuple[Any, ...]
    answer: Future[tuple[Any, ...]] = field(default_factory=Future)


class RemoteEnv(Env):
    """The environment itself, not the one that takes responses: each method asks the process.

    Raises:
        RemoteEnvError: the interpreter or the environment can't be used.
        RuntimeError: what the environment raised, but for `InvalidAction` and `ResetNeeded`.
    """

    def __init__(self, spec: EnvSpec) -> None:
        assert spec.python is not None, spec
        self._host = _host(spec.python, os.getpid())
        self._number = next(_NUMBERS)
        made = self._host.ask("make", self._number, pickle.dumps(replace(spec, python=None)))
        self.instructions, self.actions, self.roles = made[0], tuple(made[1]), tuple(made[2])
        self.reads_responses = made[3]

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        observation, self.instructions = self._host.ask("reset", self._number, seed, pickle.dumps(dict(options)))
        return unpack_observation(observation)

    def step(self, action: str) -> StepResult:
        return unpack_step(self._host.ask("step", self._number, action)[0])

    def render(self) -> Any:
        kind, *content = self._host.ask("render", self._number)
        if kind != "picture":
            return content[0] if kind == "text" else None
        import numpy as np

        shape, pixels = content
        return np.frombuffer(pixels, dtype=np.uint8).reshape(shape)

    def solution(self, max_actions: int) -> Sequence[str] | None:
        actions = self._host.ask("solution", self._number, max_actions)[0]
        return None if actions is None else list(actions)

    def close(self) -> None:
        self._host.ask("close", self._number)


_NUMBERS = itertools.count(1)


@functools.cache
def _host(python: str, _: int) -> _Host:
    """Return the process of an interpreter; a forked child doesn't use its parent's."""
    return _Host(python)


class _Host(ProcessPool[_HostCall]):
    """One process that holds environments and does a call at a time. Calls may come from any thread."""

    name, handler, what = "environment", "roll.envs.remote_env_worker:BareHandler", "the environments"

    def __init__(self, python: str) -> None:
        super().__init__(None, num_processes=1, timeout_s=_CALL_S, start_timeout_s=_START_S, python=python)

    def ask(self, *arguments: Any) -> tuple[Any, ...]:
        """Wait for what the process answers."""
        call = _HostCall(next(_NUMBERS), arguments)
        self.post(lambda: self.enqueue(call))
        try:
            kind, *values = call.answer.result(timeout=_CALL_S + 4 * _START_S)
        except FutureTimeout:
            raise RuntimeError(f"{self.python} gave no answer to {arguments[0]} in {_CALL_S:g} s") from None
        match kind:
            case "ok":
                return tuple(values)
            case "invalid":
                raise InvalidAction(values[0])
            case "over":
                raise ResetNeeded(values[0])
            case "unmade":
                raise RemoteEnvError(values[0])
        raise RuntimeError(f"under {self.python}: {values[0]}")

    def _begin(self, process: WorkerProcess[_HostCall], item: _HostCall) -> None:
        process.assigned[item.key] = item
        process.send(Call(item.key, item.arguments, str(item.arguments[0])))

    def answered(self, process: WorkerProcess[_HostCall], call: Call, answer: tuple[Any, ...]) -> None:
        process.assigned.pop(call.key).answer.set_result(answer)

    def _lost(self, items: Sequence[_HostCall], ended: WorkerExit, successor: WorkerProcess[_HostCall] | None) -> None:  # noqa: ARG002
        for item in items:
            unusable = RemoteEnvError(f"env_workers.python: {self.python}: {ended.reason}")
            item.answer.set_exception(RuntimeError(str(unusable)) if ended.was_ready else unusable)

    def _abandon(self, item: _HostCall, reason: str) -> None:
        item.answer.set_exception(RuntimeError(reason))

    def _load_error(self, reason: str) -> Exception:
        return RemoteEnvError(f"env_workers.python: {self.python}: {reason}")
