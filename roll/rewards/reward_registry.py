"""Finding reward functions: by name, or by the path of one's own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from roll.catalog.entries import implementation
from roll.catalog.rewards import REWARDS
from roll.rewards.base import Reward, RewardFn, RewardLoadError, RewardSpec, as_reward
from roll.sandbox.base import Sandbox, SandboxError, SandboxUnavailable
from roll.sandbox.on_demand import SandboxOnDemand
from roll.sandbox.open_sandbox import open_sandbox
from roll.types.episode import FinishReason, Task
from roll.utils.signatures import signature_of


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A reward function with its keyword arguments, whose output is checked."""

    spec: RewardSpec
    function: RewardFn
    given: frozenset[str]
    """Parameters that aren't the configuration's: `finish_reason`, `sandbox`."""
    sandbox: Sandbox | None = None

    def __call__(self, response: str, task: Task, finish_reason: FinishReason = "stop") -> Reward:
        """Score one response; raises what the function raises, or `RewardOutputError`."""
        kwargs = dict(self.spec.kwargs)
        if "finish_reason" in self.given:
            kwargs["finish_reason"] = finish_reason
        if "sandbox" in self.given:
            kwargs["sandbox"] = self.sandbox
        output = self.function(response, task, **kwargs)
        if inspect.iscoroutine(output):
            output = asyncio.run(output)
        return as_reward(output, self.spec.name.rpartition(":")[2])


def load_reward(spec: RewardSpec) -> LoadedReward:
    """Import the function, check that it can be called as configured, and open the sandbox that it asks for.

    Raises:
        RewardLoadError: one of the three fails. A function that asks for a sandbox is never called without.
    """
    try:
        function = implementation(REWARDS, spec.name, key=spec.key, kind="function")
    except ValueError as error:
        raise RewardLoadError(str(error)) from error.__cause__
    if not callable(function):
        raise RewardLoadError(f"{spec.key}: {spec.name} is not a plain function")
    if spec.parts:
        spec = replace(spec, kwargs={**spec.kwargs, "parts": _loaded_parts(spec)})
    given = _check_signature(function, spec)
    return LoadedReward(spec, function, given, _opened(spec) if "sandbox" in given else None)


def _loaded_parts(spec: RewardSpec) -> dict[str, tuple[float, LoadedReward]]:
    return {name: (weight, load_reward(part)) for name, (weight, part) in spec.parts.items()}


def _opened(spec: RewardSpec) -> Sandbox:
    if spec.name in REWARDS and not REWARDS[spec.name].sandboxed:  # it needs one for some of its tasks alone
        return SandboxOnDemand(spec.sandbox)
    try:
        return open_sandbox(spec.sandbox)
    except (SandboxUnavailable, SandboxError) as error:
        raise RewardLoadError(f"{spec.key}: {spec.name} needs a sandbox. {error}") from error


_GIVEN: Mapping[str, Any] = {"finish_reason": "stop", "sandbox": None}
"""Parameters that the process fills in where a function has them, with a value to check its signature with."""


def _check_signature(function: RewardFn, spec: RewardSpec) -> frozenset[str]:
    """Return which of `_GIVEN` the function takes; raise if it can't be called as configured."""
    signature = inspect.signature(function)
    if "sandbox" in spec.kwargs and "sandbox" in signature.parameters:
        raise RewardLoadError(
            f"{spec.key}: {spec.name} is given the sandbox by the run, and reward_kwargs name one too; remove "
            "`sandbox` there and use the key `sandbox` at the top level"
        )
    given = frozenset(name for name in _GIVEN if name in signature.parameters and name not in spec.kwargs)
    kwargs = {**spec.kwargs, **{name: _GIVEN[name] for name in given}}
    wrong = [f"{name}: {problem}" for name, problem in signature_of(function, skip=2).problems(kwargs)]
    try:
        signature.bind("", None, **kwargs)
    except TypeError as error:
        wrong = wrong or [str(error)]
    if wrong:
        raise RewardLoadError(
            f"{spec.key}: {spec.name} can't be called with reward_kwargs {sorted(spec.kwargs)}: {'; '.join(wrong)}; "
            f"its signature is {signature}, and it is called as fn(response, task, **reward_kwargs)"
        )
    return given
