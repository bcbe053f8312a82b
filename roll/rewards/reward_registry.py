"""Finding reward functions: by name, or by the path of one's own; and calling them as they are written."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roll.catalog.entries import implementation
from roll.catalog.rewards import REWARDS
from roll.rewards.base import Reward, RewardFn, RewardLoadError, RewardOutputError, RewardSpec, as_reward, ground_truth
from roll.sandbox.base import Sandbox, SandboxError, SandboxUnavailable
from roll.sandbox.on_demand import SandboxOnDemand
from roll.sandbox.open_sandbox import open_sandbox
from roll.types.episode import FinishReason, Task
from roll.utils.signatures import TRL, VERL, CallStyle, call_style, reward_problems, signature_of

Asked = tuple[str, Task, FinishReason]


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A reward function with its keyword arguments, whose output is checked."""

    spec: RewardSpec
    function: RewardFn
    style: CallStyle
    given: frozenset[str]
    """Parameters that aren't the configuration's: `finish_reason`, `sandbox`."""
    is_async: bool
    sandbox: Sandbox | None = None

    def __call__(self, response: str, task: Task, finish_reason: FinishReason = "stop") -> Reward:
        """Score one response; raises what the function raises, or `RewardOutputError`."""
        return self.score_all([(response, task, finish_reason)])[0]

    def score_all(self, asked: Sequence[Asked]) -> list[Reward]:
        """Score several: in one call if the function takes lists."""
        if self.style.batch:
            return self._checked(self._value(self._call(asked)), asked)
        return [self._checked([self._value(self._call([one]))], [one])[0] for one in asked]

    async def score_async(self, response: str, task: Task, finish_reason: FinishReason = "stop") -> Reward:
        """Score one response with an async function."""
        asked = [(response, task, finish_reason)]
        output = await self._call(asked)
        return self._checked(output if self.style.batch else [output], asked)[0]

    def _value(self, output: Any) -> Any:
        return _kept_loop().run_until_complete(output) if self.is_async else output

    def _call(self, asked: Sequence[Asked]) -> Any:
        """Call the function as its parameters say."""
        kwargs = dict(self.spec.kwargs)
        if "sandbox" in self.given:
            kwargs["sandbox"] = self.sandbox
        response, task, finish_reason = asked[0]
        if self.style is VERL:
            return self.function(**_of_verl(response, task, self.given), **kwargs)
        if self.style is TRL:
            return self.function(**{**self._columns(asked), **kwargs})
        if self.style.batch:
            if "finish_reasons" in self.given:
                kwargs["finish_reasons"] = [one[2] for one in asked]
            return self.function([one[0] for one in asked], [one[1] for one in asked], **kwargs)
        if "finish_reason" in self.given:
            kwargs["finish_reason"] = finish_reason
        return self.function(response, task, **kwargs)

    def _columns(self, asked: Sequence[Asked]) -> dict[str, Any]:
        """TRL's arguments: messages where the prompt is messages, and the columns that the function has."""
        signature = signature_of(self.function, skip=0)
        names = [name for _, task, _ in asked for name in task.payload]
        columns = {name: [task.payload.get(name) for _, task, _ in asked] for name in dict.fromkeys(names)}
        columns["prompts"] = [task.payload.get("messages", task.payload.get("prompt", "")) for _, task, _ in asked]
        columns["completions"] = [
            [{"role": "assistant", "content": response}] if "messages" in task.payload else response
            for response, task, _ in asked
        ]
        return {name: value for name, value in columns.items() if signature.takes_any or name in signature.annotations}

    def _checked(self, outputs: Any, asked: Sequence[Asked]) -> list[Reward]:
        function = self.spec.name.rpartition(":")[2]
        if not hasattr(outputs, "__len__") or isinstance(outputs, (str, Mapping)) or len(outputs) != len(asked):
            got = f"{len(outputs)}" if hasattr(outputs, "__len__") else type(outputs).__name__
            raise RewardOutputError(
                f"reward function {function!r} was given {len(asked)} responses and returned {got}, "
                "expected a list of as many rewards"
            )
        return [as_reward(output, function, task.id) for output, (_, task, _) in zip(outputs, asked, strict=True)]


@functools.cache
def _kept_loop() -> asyncio.AbstractEventLoop:
    """One loop for all calls: what an async function keeps open stays usable."""
    return asyncio.new_event_loop()


def _of_verl(response: str, task: Task, given: frozenset[str]) -> dict[str, Any]:
    nested = task.payload.get("reward_model")
    has_own = task.payload.get("ground_truth") is not None
    truth = nested.get("ground_truth") if isinstance(nested, Mapping) and not has_own else None
    all_of_them = {
        "data_source": task.payload.get("data_source", task.tag),
        "solution_str": response,
        "ground_truth": ground_truth(task) if truth is None else truth,
        "extra_info": task.payload.get("extra_info"),
    }
    return {name: value for name, value in all_of_them.items() if name in given}


def load_reward(spec: RewardSpec) -> LoadedReward:
    """Import the function, check that it can be called as configured, and open the sandbox that it asks for.

    Raises:
        RewardLoadError: one of the three fails. A function that asks for a sandbox is never called without.
    """
    try:
        function = implementation(REWARDS, spec.name, key=spec.key, kind="function")
    except ValueError as error:
        raise RewardLoadError(str(error)) from error.__cause__
    if not callable(function) or inspect.isclass(function):
        raise RewardLoadError(f"{spec.key}: {spec.name} is not a function, plain or async")
    if spec.parts:
        spec = replace(spec, kwargs={**spec.kwargs, "parts": _loaded_parts(spec)})
    style, given = _check_signature(function, spec)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return LoadedReward(spec, function, style, given, is_async, _opened(spec) if "sandbox" in given else None)


def _loaded_parts(spec: RewardSpec) -> dict[str, tuple[float, LoadedReward]]:
    return {name: (weight, load_reward(part)) for name, (weight, part) in spec.parts.items()}


def _opened(spec: RewardSpec) -> Sandbox:
    if spec.name in REWARDS and not REWARDS[spec.name].sandboxed:  # it needs one for some of its tasks alone
        return SandboxOnDemand(spec.sandbox)
    try:
        return open_sandbox(spec.sandbox)
    except (SandboxUnavailable, SandboxError) as error:
        raise RewardLoadError(f"{spec.key}: {spec.name} needs a sandbox. {error}") from error


def _check_signature(function: RewardFn, spec: RewardSpec) -> tuple[CallStyle, frozenset[str]]:
    """Return how the function is called, and which of the style's `given` it takes; raise if it can't be called as
    configured."""
    signature = inspect.signature(function)
    style = call_style(list(signature.parameters))
    if "sandbox" in spec.kwargs and "sandbox" in signature.parameters:
        raise RewardLoadError(
            f"{spec.key}: {spec.name} is given the sandbox by the run, and reward_kwargs name one too; remove "
            "`sandbox` there and use the key `sandbox` at the top level"
        )
    takes = signature_of(function, skip=style.positional)
    given = frozenset(
        name
        for name in style.given
        if name not in spec.kwargs and (name in takes.annotations or (takes.takes_any and style is VERL))
    ) - (frozenset({"sandbox"}) if "sandbox" not in takes.annotations else frozenset())
    wrong = [f"{name}: {problem}" for name, problem in reward_problems(takes, style, spec.kwargs)]
    if takes.too_few:
        wrong.append("it takes too few arguments")
    if wrong:
        raise RewardLoadError(
            f"{spec.key}: {spec.name} can't be called with reward_kwargs {sorted(spec.kwargs)}: {'; '.join(wrong)}; "
            f"its signature is {signature}, and it is called as {style.called}"
        )
    return style, given
