"""What runs in a process of the pool: the environments of many episodes. Environments needn't be thread-safe."""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from roll.envs import env_messages as messages
from roll.envs.env_messages import Packed
from roll.envs.env_registry import build_env, check_spec, load_env, load_package
from roll.envs.wrappers import EnvSpec, ResponseEnv
from roll.isolation.processes.child import short_traceback
from roll.isolation.processes.child_requests import resident_mb


class EnvHandler:
    """The instances by number; `messages.py` lists the requests."""

    def __init__(self, specs: Mapping[str, EnvSpec]) -> None:
        self._specs = {tag: replace(spec, python=None) for tag, spec in specs.items()}  # this is that interpreter
        for spec in self._specs.values():
            check_spec(spec)
            load_package(spec)
        self._envs: dict[int, tuple[ResponseEnv, EnvSpec]] = {}

    def answer(self, request: tuple[Any, ...], restart_clock: Callable[[], None]) -> tuple[Any, ...]:
        """Return what a reset or a step gave, or what went wrong; then the instance is closed."""
        kind, instance, *arguments = request
        if kind == "close":
            error = self._close(instance)
            return "closed", resident_mb(), error
        doing = "step"
        try:
            if kind == "step":
                env, spec = self._envs[instance]
                return "ok", messages.pack_plain_step(env.respond(arguments[0]))
            tag, seed, options, responses = arguments
            doing, spec = "__init__", self._specs[tag]
            env = build_env(spec)
            self._envs[instance] = env, spec
            doing = "reset"
            result: Packed = messages.pack_observation(env.reset(seed, pickle.loads(options)))
            for step, response in enumerate(responses, 1):
                doing = f"step {step}"
                restart_clock()
                result = messages.pack_plain_step(env.respond(response))
            return "ok", result
        except BaseException as error:  # noqa: BLE001 - the boundary: it becomes a status with this text
            text = f"{_described(error, spec, doing)}\n{short_traceback(skip=1)}"
            closing = self._close(instance)
            return "error", f"{text}\nand closing it: {closing}" if closing else text

    def forked(self, request: tuple[Any, ...], answer: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what becomes of a call in which the process was doubled by `os.fork`."""
        kind, instance, *_ = request
        if kind == "close" or answer[0] != "ok":
            return answer
        _, spec = self._envs[instance]
        self._close(instance)
        doing = "step" if kind == "step" else "reset"
        return "error", f"{spec.env_type} called os.fork in {doing}; start other programs with subprocess"

    def _close(self, instance: int) -> str:
        """Release an instance; what went wrong, or nothing."""
        if instance in self._envs:
            env, spec = self._envs.pop(instance)
            try:
                env.close()
            except BaseException as error:  # noqa: BLE001 - the boundary: it is reported
                return _described(error, spec, "close")
        return ""


def _described(error: BaseException, spec: EnvSpec, doing: str) -> str:
    """Return `IndexError: list index out of range (file.py:31, in reset)`: the last frame in the file of the class."""
    frames = traceback.extract_tb(error.__traceback__)
    try:
        file = sys.modules[load_env(spec.env_type).__module__].__file__
    except (ValueError, KeyError):
        file = None
    where = next((entry for entry in reversed(frames) if entry.filename == file), None)
    at = f"{where.filename}:{where.lineno}, in {doing}" if where else f"in {doing}"
    return f"{''.join(traceback.format_exception_only(type(error), error)).strip()} ({at})"
