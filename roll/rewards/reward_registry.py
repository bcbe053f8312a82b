"""Finding reward functions: by name, or by the path of one's own; and calling them as they are written."""

from __future__ import annotations

import ast
import asyncio
import functools
import inspect
import textwrap
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.configs.catalog.entries import implementation
from roll.configs.catalog.reward_table import REWARDS
from roll.configs.catalog.signatures import (
    MAKES_REWARDS,
    TOO_FEW,
    TRL,
    VERL,
    VERL_LISTS,
    CallStyle,
    Signature,
    call_style,
    is_async_callable,
    reward_problems,
    signature_of,
    unknown_state,
    unknown_state_message,
)
from roll.isolation.sandbox.base import Sandbox, SandboxError, SandboxUnavailable
from roll.isolation.sandbox.open_sandbox import SandboxOnDemand, open_sandbox
from roll.rewards.base import Reward, RewardFn, RewardLoadError, RewardOutputError, RewardRequest, RewardSpec, as_reward
from roll.rewards.reward_calls import CallLog, Outcome, as_list, trl_arguments, verl_arguments
from roll.rewards.weighted import weighted
from roll.types.trajectory import FinishReason, Task


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A reward function with its keyword arguments, whose output is checked."""

    spec: RewardSpec
    function: RewardFn
    style: CallStyle
    takes: Signature
    supplied: frozenset[str]
    """Parameters that aren't the configuration's: `finish_reason`, `sandbox`."""
    is_async: bool
    sandbox: Sandbox | None = None
    parts: Mapping[str, LoadedReward] = field(default_factory=dict)
    """Of `weighted`: what scores each part."""

    @property
    def takes_lists(self) -> bool:
        """Return whether several responses are scored in one call."""
        return self.style.batch or any(part.takes_lists for part in self.parts.values())

    def __call__(self, response: str, task: Task, finish_reason: FinishReason = "stop") -> Reward | None:
        """Score one response; raises what the function raises, or `RewardOutputError`."""
        asked = RewardRequest(id=task.id, domain=task.domain, response=response, task=task, finish_reason=finish_reason)
        return self.score(asked)

    def score(self, request: RewardRequest) -> Reward | None:
        """Score one response likewise; None: the function doesn't score this row."""
        return settled(self.score_all([request])[0])

    def score_all(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        """Score several: in one call if the function takes lists. Such a call may raise."""
        if self.function is weighted:
            scores = {name: part.score_all(requests) for name, part in self.parts.items()}
            weights = {name: weight for name, (weight, _) in self.spec.parts.items()}
            return [_summed({name: of[row] for name, of in scores.items()}, weights) for row in range(len(requests))]
        if self.style.batch:
            log = CallLog(self._name, len(requests))
            return self._checked(self._value(self._call(requests, log)), requests, log)
        return [self._single(request) for request in requests]

    async def score_async(self, request: RewardRequest) -> Reward | None:
        """Score one response with an async function that takes no lists."""
        output = self._call([request], CallLog(self._name, 1))
        return as_reward(await output if inspect.isawaitable(output) else output, self._name, request.task.id)

    @property
    def _name(self) -> str:
        return self.spec.name.rpartition(":")[2]

    def _single(self, request: RewardRequest) -> Outcome:
        try:
            return as_reward(self._value(self._call([request], CallLog(self._name, 1))), self._name, request.task.id)
        except Exception as error:  # noqa: BLE001 - that of this response alone
            return error

    def _value(self, output: Any) -> Any:
        return _reward_loop().run_until_complete(_awaited(output)) if inspect.isawaitable(output) else output

    def _call(self, requests: Sequence[RewardRequest], log: CallLog) -> Any:
        """Call the function as its parameters say."""
        kwargs, first = dict(self.spec.kwargs), requests[0]
        if "sandbox" in self.supplied:
            kwargs["sandbox"] = self.sandbox
        if self.style is VERL:
            return self.function(**verl_arguments(first, self.supplied), **kwargs)
        if self.style is VERL_LISTS:
            columns = [verl_arguments(request, {name[:-1] for name in self.supplied}) for request in requests]
            return self.function(**{f"{name}s": [one[name] for one in columns] for name in columns[0]}, **kwargs)
        if self.style is TRL:
            return self.function(**{**trl_arguments(requests, self.takes, self.spec, log), **kwargs})
        if self.style.batch:
            if "finish_reasons" in self.supplied:
                kwargs["finish_reasons"] = [one.finish_reason for one in requests]
            return self.function([one.response for one in requests], [one.task for one in requests], **kwargs)
        if "finish_reason" in self.supplied:
            kwargs["finish_reason"] = first.finish_reason
        return self.function(first.response, first.task, **kwargs)

    def _checked(self, outputs: Any, requests: Sequence[RewardRequest], log: CallLog) -> list[Outcome]:
        """Return what a list says of each response; None only from a function of TRL's kind, where it has a meaning."""
        outcomes: list[Outcome] = []
        for output, request in zip(as_list(outputs, len(requests), f"{self._name!r} returned"), requests, strict=True):
            try:
                unscored = output is None and self.style.columns
                outcomes.append(None if unscored else as_reward(output, self._name, request.task.id))
            except RewardOutputError as error:
                outcomes.append(error)
        return log.add_to(outcomes)


def settled(outcome: Outcome) -> Reward | None:
    """Return a reward, or raise what is wrong."""
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _summed(scores: Mapping[str, Outcome], weights: Mapping[str, float]) -> Outcome:
    wrong = next((score for score in scores.values() if isinstance(score, Exception)), None)
    if wrong is not None:
        return wrong
    return weighted({name: score for name, score in scores.items() if isinstance(score, Reward)}, weights)


async def _awaited(output: Awaitable[Any]) -> Any:
    return await output


@functools.cache
def _reward_loop() -> asyncio.AbstractEventLoop:
    """Return one loop for all calls: what an async function keeps open stays usable."""
    return asyncio.new_event_loop()


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
    parts = {name: load_reward(part) for name, (_, part) in spec.parts.items()}
    style, takes, supplied = _check_signature(function, spec)
    sandbox = _opened(spec) if "sandbox" in supplied else None
    return LoadedReward(spec, function, style, takes, supplied, is_async_callable(function), sandbox, parts)


def _source(function: RewardFn) -> ast.AST:
    """Return the definition of a function, of an object's `__call__`, or nothing where there is no source."""
    while isinstance(function, functools.partial):
        function = function.func
    try:
        called = function if inspect.isroutine(function) else type(function).__call__
        return ast.parse(textwrap.dedent(inspect.getsource(called)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


def _opened(spec: RewardSpec) -> Sandbox:
    if spec.name in REWARDS and not REWARDS[spec.name].sandboxed:  # it needs one for some of its tasks alone
        return SandboxOnDemand(spec.sandbox)
    try:
        return open_sandbox(spec.sandbox)
    except (SandboxUnavailable, SandboxError) as error:
        raise RewardLoadError(f"{spec.key}: {spec.name} needs a sandbox. {error}") from error


def _check_signature(function: RewardFn, spec: RewardSpec) -> tuple[CallStyle, Signature, frozenset[str]]:
    """Return how the function is called, what it takes, and which of the style's `supplied` it takes; raise if it can't
    be called as configured."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError) as error:
        raise RewardLoadError(f"{spec.key}: the parameters of {spec.name} can't be seen: {error}") from error
    style = call_style(list(signature.parameters))
    if "sandbox" in spec.kwargs and "sandbox" in signature.parameters:
        raise RewardLoadError(
            f"{spec.key}: {spec.name} is given the sandbox by the run, and reward_kwargs name one too; remove "
            "`sandbox` there and use the key `sandbox` at the top level"
        )
    takes = signature_of(function, skip=style.positional)
    by_keywords = takes.takes_any and style in (VERL, VERL_LISTS)
    supplied = frozenset(
        name for name in style.supplied if name not in spec.kwargs and (name in takes.annotations or by_keywords)
    ) - (frozenset({"sandbox"}) if "sandbox" not in takes.annotations else frozenset())
    wrong = [f"{name}: {problem}" for name, problem in reward_problems(takes, style, spec.kwargs)]
    if takes.too_few:
        wrong.append(TOO_FEW)
    if takes.returns_function:
        wrong = [MAKES_REWARDS]
    if style is TRL and (names := unknown_state(_source(function))):
        wrong.append(unknown_state_message(names))
    if style is TRL and not spec.in_run:
        needs = sorted({"completion_ids", "trainer_state"} & takes.required - spec.kwargs.keys())
        wrong += [f"{name}: only the episodes of a run have them, and this is none" for name in needs]
    if wrong:
        raise RewardLoadError(
            f"{spec.key}: {spec.name} can't be called with reward_kwargs {sorted(spec.kwargs)}: {'; '.join(wrong)}; "
            f"its signature is {signature}, and it is called as {style.called}"
        )
    return style, takes, supplied
