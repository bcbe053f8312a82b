"""Finding reward functions: by registered name, by dotted path, or by file."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from roll.rewards.base import Reward, RewardFn, RewardLoadError, RewardSpec, as_reward
from roll.types.episode import FinishReason, Task
from roll.utils.seeding import stable_hash

REWARDS: dict[str, str] = {
    "gsm8k": "roll.rewards.gsm8k.gsm8k",
    "math_rule": "roll.rewards.math_rule.math_rule",
    "reasoning_gym": "roll.rewards.reasoning_gym.reasoning_gym",
}
"""Name -> import path. A new built-in reward is one file and one line here."""


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A reward function with its keyword arguments, whose output is checked."""

    spec: RewardSpec
    function: RewardFn
    wants_finish_reason: bool

    def __call__(self, response: str, task: Task, finish_reason: FinishReason = "stop") -> Reward:
        """Score one response; raises what the function raises, or `RewardOutputError`."""
        kwargs = dict(self.spec.kwargs)
        if self.wants_finish_reason:
            kwargs["finish_reason"] = finish_reason
        return as_reward(self.function(response, task, **kwargs), self.spec.name)


def load_reward(spec: RewardSpec) -> LoadedReward:
    """Import the function and check that it can be called as configured; raises `RewardLoadError`."""
    function = _from_file(spec.path, spec.name) if spec.path is not None else _from_name(spec.name)
    return LoadedReward(spec, function, _check_signature(function, spec))


def _from_name(name: str) -> RewardFn:
    target = REWARDS.get(name, name)
    module_name, _, attribute = target.rpartition(".")
    if not module_name:
        near = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RewardLoadError(
            f"unknown reward {name!r}{hint}; known: {sorted(REWARDS)}; for your own "
            "function give a dotted path "
            "(package.module.function), or its file as `path` and its name as `name`"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise RewardLoadError(f"reward {name!r}: can't import {module_name!r}: {error}") from error
    return _attribute(module, attribute, f"module {module_name!r}")


def _from_file(path: str, name: str) -> RewardFn:
    file = Path(path).expanduser()
    if not file.is_file():
        raise RewardLoadError(f"reward {name!r}: there is no file {str(file)!r} (looked from {str(Path.cwd())!r})")
    module_name = f"custom_reward_{stable_hash(str(file.resolve())):016x}"
    module_spec = importlib.util.spec_from_file_location(module_name, file)
    if module_spec is None or module_spec.loader is None:
        raise RewardLoadError(f"reward {name!r}: {str(file)!r} is not a Python file; expected a name ending in .py")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up here
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise RewardLoadError(
            f"reward {name!r}: {str(file)!r} fails to import: {type(error).__name__}: {error}"
        ) from error
    return _attribute(module, name, str(file))


def _attribute(module: ModuleType, name: str, where: str) -> RewardFn:
    function: RewardFn | None = getattr(module, name, None)
    if function is None:
        functions = [value for value in vars(module).values() if inspect.isfunction(value)]
        names = sorted(f.__name__ for f in functions if f.__module__ == module.__name__ and f.__name__[0] != "_")
        raise RewardLoadError(f"{where} has no function {name!r}; it has {names}")
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise RewardLoadError(f"{name!r} in {where} is not a plain function (async isn't supported)")
    return function


def _check_signature(function: RewardFn, spec: RewardSpec) -> bool:
    """Whether the function wants `finish_reason`; raises when it can't be called with (response, task,
    **kwargs).
    """
    signature = inspect.signature(function)
    wants_finish_reason = "finish_reason" in signature.parameters and "finish_reason" not in spec.kwargs
    kwargs = dict(spec.kwargs)
    if wants_finish_reason:
        kwargs["finish_reason"] = "stop"
    try:
        signature.bind("", None, **kwargs)
    except TypeError as error:
        raise RewardLoadError(
            f"reward {spec.name!r} can't be called with reward_kwargs {sorted(spec.kwargs)}: {error}; "
            f"its signature is {spec.name}{signature}, and it is called as fn(response, task, **reward_kwargs)"
        ) from error
    return wants_finish_reason
