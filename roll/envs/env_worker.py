"""What runs in a process of the pool: the environments of many episodes. Environments needn't be thread-safe."""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from roll.envs import messages
from roll.envs.base import Env
from roll.envs.env_registry import EnvSpec, build_env, check_spec, load_env
from roll.envs.messages import Packed
from roll.processes.child import short_traceback
from roll.processes.serve import resident_mb


class EnvHandler:
    """The instances by number; `messages.py` lists the requests."""

    def __init__(self, specs: Mapping[str, EnvSpec]) -> None:
        for spec in specs.values():
            check_spec(spec)
        self._specs = specs
        self._envs: dict[int, Env] = {}
        self._tags: dict[int, str] = {}

    def answer(self, request: tuple[Any, ...], restart_clock: Callable[[], None]) -> tuple[Any, ...]:
        kind, instance, *arguments = request
        if kind == "close":
            error = self._close(instance)
            return "closed", resident_mb(), error
        return self._play(kind, instance, arguments, restart_clock)

    def _play(
        self, kind: str, instance: int, arguments: list[Any], restart_clock: Callable[[], None]
    ) -> tuple[str, Packed | str]:
        """Return what a reset or a step gave, or what went wrong; then the instance is closed."""
        if kind == "open":
            self._tags[instance] = arguments[0]
        doing = "__init__"
        try:
            if kind == "step":
                doing = "step"
                return "ok", messages.pack_step(self._envs[instance].step(arguments[0]))
            tag, seed, options, responses = arguments
            env = self._envs[instance] = build_env(self._specs[tag])
            doing = "reset"
            result: Packed = messages.pack_observation(env.reset(seed, pickle.loads(options)))
            for step, response in enumerate(responses, 1):
                doing = f"step {step}"
                restart_clock()
                result = messages.pack_step(env.step(response))
            return "ok", result
        except BaseException as error:  # noqa: BLE001 - the boundary: it becomes a status with this text
            text = f"{_described(error, self._specs[self._tags[instance]], doing)}\n{short_traceback(skip=1)}"
            closing = self._close(instance)
            return "error", f"{text}\nand closing it: {closing}" if closing else text

    def _close(self, instance: int) -> str:
        """Release an instance; what went wrong, or nothing."""
        env = self._envs.pop(instance, None)
        spec = self._specs[self._tags.pop(instance)] if instance in self._tags else None
        if env is None or spec is None:
            return ""
        try:
            env.close()
        except BaseException as error:  # noqa: BLE001 - the boundary: it is reported
            return _described(error, spec, "close")
        return ""


def _described(error: BaseException, spec: EnvSpec, doing: str) -> str:
    """`IndexError: list index out of range (file.py:31, in reset)`: the last frame in the file of the class."""
    frames = traceback.extract_tb(error.__traceback__)
    try:
        file = sys.modules[load_env(spec.env_type).__module__].__file__
    except (ValueError, KeyError):
        file = None
    where = next((entry for entry in reversed(frames) if entry.filename == file), None)
    at = f"{where.filename}:{where.lineno}, in {doing}" if where else f"in {doing}"
    return f"{''.join(traceback.format_exception_only(type(error), error)).strip()} ({at})"
