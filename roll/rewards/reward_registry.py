"""Finding reward functions: by name, or by the path of one's own."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from roll.catalog.entries import implementation
from roll.catalog.rewards import REWARDS
from roll.rewards.base import Reward, RewardFn, RewardLoadError, RewardSpec, as_reward
from roll.types.episode import FinishReason, Task
from roll.utils.signatures import signature_of


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
        return as_reward(self.function(response, task, **kwargs), self.spec.name.rpartition(":")[2])


def load_reward(spec: RewardSpec) -> LoadedReward:
    """Import the function and check that it can be called as configured; raises `RewardLoadError`."""
    try:
        function = implementation(REWARDS, spec.name, key=spec.key, kind="function")
    except ValueError as error:
        raise RewardLoadError(str(error)) from error.__cause__
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise RewardLoadError(f"{spec.key}: {spec.name} is not a plain function (async isn't supported)")
    return LoadedReward(spec, function, _check_signature(function, spec))


def _check_signature(function: RewardFn, spec: RewardSpec) -> bool:
    """Return whether the function takes `finish_reason`; raise if it can't be called as configured."""
    signature = inspect.signature(function)
    wants_finish_reason = "finish_reason" in signature.parameters and "finish_reason" not in spec.kwargs
    kwargs = {**spec.kwargs, **({"finish_reason": "stop"} if wants_finish_reason else {})}
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
    return wants_finish_reason
