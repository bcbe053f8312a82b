"""From a response's text to the environment's actions, and the time limit.

`TimeLimit(ResponseActions(env, rules), max_steps)` is what an episode is played against: `step` gets a whole response.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from roll.envs.base import Env, InvalidAction, Message, Observation, ResetNeeded, StepResult
from roll.utils.importing import FILE_MODULE

_SHOWN = 60  # Characters of a wrong action that are repeated to the policy
SEARCHED = 20_000
"""Characters at the end of a response in which actions are looked for: some patterns take time with their square."""
_PLAIN = re.compile(r"[^\\.^$*+?{}\[\]|()]+(?![*+?{])")
"""The plain beginning of a pattern, up to what could repeat its last letter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRules:
    """How actions are found in a response, and what it costs when they aren't."""

    pattern: str | None = "<answer>(.*?)</answer>"
    """Its first group is the action, the last match counts; null: the whole response is the action."""
    separator: str = "||"
    """Between the actions of one response. Acts with `max_actions` above 1."""
    lookup: Mapping[str, str] = field(default_factory=dict)
    """The policy's name of an action -> the environment's; case doesn't count. Empty: the environment's names."""
    max_actions: int = 1
    thinking_tags: tuple[str, str] | None = None
    """No action is looked for between these."""
    format_penalty: float = 0.0
    """Added to the reward of a response without an action; at most 0."""
    invalid_action_penalty: float = 0.0
    """Added for each action that the environment doesn't know; at most 0."""

    def __post_init__(self) -> None:
        if self.pattern is not None:
            _check_pattern(self.pattern)
        if self.max_actions < 1:
            raise ValueError(f"max_actions_per_step: got {self.max_actions}, expected at least 1")
        if self.max_actions > 1 and not self.separator.strip():
            raise ValueError(
                f"action_separator: got {self.separator!r}, expected something other than blanks, which stand "
                "around and in actions too"
            )
        tags = self.thinking_tags
        if tags is not None and (len(tags) != 2 or not all(tags) or tags[0] == tags[1]):
            raise ValueError(f"thinking_tags: got {tags!r}, expected two tags, e.g. ['<think>', '</think>'], or null")
        for name in ("format_penalty", "invalid_action_penalty"):
            penalty = getattr(self, name)
            if not -math.inf < penalty <= 0:
                raise ValueError(f"{name}: got {penalty}, expected at most 0: it is added to the reward")
        twice = [a for a in self.lookup if sum(a.strip().casefold() == b.strip().casefold() for b in self.lookup) > 1]
        if twice:
            raise ValueError(f"action_lookup: {twice} are one name, since case doesn't count; keep one of them")


def _check_pattern(pattern: str) -> None:
    try:
        groups = re.compile(pattern, re.DOTALL).groups
    except re.error as error:
        raise ValueError(f"action_pattern: {pattern!r} is not a regular expression: {error}") from None
    if groups < 1:
        raise ValueError(
            f"action_pattern: {pattern!r} has no group; put parentheses around the action, e.g. "
            "'<answer>(.*?)</answer>', or set it to null: then the whole response is the action"
        )


def without_thoughts(text: str, tags: tuple[str, str]) -> str:
    """`text` without what stands between the tags.

    After an opening tag that is never closed everything is thought, and before a closing tag that was never opened too:
    some chat templates put the opening tag into the prompt.
    """
    opening, closing = tags
    kept: list[str] = []
    while text:
        before, opened, rest = text.partition(opening)
        _, stray, after = before.rpartition(closing)
        if stray:
            kept.clear()
            before = after
        kept.append(before)
        text = rest.partition(closing)[2] if opened else ""
    return "".join(kept)


def found_actions(response: str, rules: ActionRules) -> list[str]:
    """The actions that a response names, as it writes them; empty: there are none."""
    text = response if rules.thinking_tags is None else without_thoughts(response, rules.thinking_tags)
    if rules.pattern is not None:
        last = _last_match(rules.pattern, text[-SEARCHED:])
        text = (last.group(1) or "") if last else ""
    pieces = text.split(rules.separator) if rules.max_actions > 1 else [text]
    return [piece.strip() for piece in pieces if piece.strip()]


def _last_match(pattern: str, text: str) -> re.Match[str] | None:
    """The last match. Of a pattern with a plain beginning the one that begins last, within another one perhaps: a
    response may speak of `<answer>` before it gives one."""
    compiled = re.compile(pattern, re.DOTALL)
    beginning = _PLAIN.match(pattern)
    if beginning is None or "|" in pattern:
        return max(compiled.finditer(text), key=re.Match.start, default=None)
    end = len(text)
    while (start := text.rfind(beginning.group(), 0, end)) >= 0:
        if found := compiled.match(text, start):
            return found
        end = start + len(beginning.group()) - 1
    return None


class _Wrapper(Env):
    """Shows what the wrapped environment shows."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self.instructions = env.instructions
        self.actions = env.actions

    def render(self) -> Any:
        return self._env.render()

    def close(self) -> None:
        self._env.close()


class ResponseActions(_Wrapper):
    """Does the actions that a response names.

    Several are done in turn until the episode ends; their rewards add up. Adds to `metrics`: `actions` (those done),
    `format_errors` (1 when the response names none), `invalid_actions` (those that the environment doesn't know),
    `surplus_actions` (those beyond `max_actions`, not done). `reward_parts`: `env`, `format_penalty`,
    `invalid_action_penalty`, and the environment's own parts as `env/<name>`.

    A response that leads to no step is shown the last observation again, below a line that says what was wrong.
    """

    def __init__(self, env: Env, rules: ActionRules) -> None:
        super().__init__(env)
        self._rules = rules
        self._names = _names(env.actions, rules.lookup)
        self._last: Observation | None = None

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self._last = None
        observation = checked_observation(self._env, "reset", self._env.reset(seed, options))
        self.instructions = self._env.instructions
        self._last = observation
        return observation

    def step(self, action: str) -> StepResult:
        if self._last is None:
            raise ResetNeeded(f"{_name(self._env)}.step without an episode: call reset first")
        found = found_actions(action, self._rules)
        done: list[StepResult] = []
        problems: list[str] = [] if found else [f"No action was found in your response{_example(self._rules.pattern)}."]
        for text in found[: self._rules.max_actions]:
            try:
                done.append(checked_result(self._env, self._env.step(self._known(text))))
            except InvalidAction as error:
                problems.append(str(error))
                continue
            if done[-1].terminated or done[-1].truncated:
                break
        return self._together(done, found, problems)

    def _known(self, text: str) -> str:
        """The environment's name of an action."""
        if not self._names:
            return text
        name = self._names.get(text.casefold())
        if name is None:
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
            known = ", ".join(self._rules.lookup or self.actions)
            raise InvalidAction(f"{shown!r} is not an action. Actions: {known}.")
        return name

    def _together(self, done: Sequence[StepResult], found: Sequence[str], problems: Sequence[str]) -> StepResult:
        """One result for all actions of a response."""
        rules = self._rules
        invalid = len(problems) if found else 0
        own: dict[str, float] = {}
        for result in done:
            for name, value in result.reward_parts.items():
                own[f"env/{name}"] = own.get(f"env/{name}", 0.0) + value
        parts = {
            "env": math.fsum(result.reward for result in done),
            "format_penalty": 0.0 if found else rules.format_penalty,
            "invalid_action_penalty": invalid * rules.invalid_action_penalty,
        }
        counts = {
            "actions": len(done),
            "format_errors": int(not found),
            "invalid_actions": invalid,
            "surplus_actions": max(0, len(found) - rules.max_actions),
        }
        over = bool(done) and (done[-1].terminated or done[-1].truncated)
        if over:
            self._last = None
        elif done:
            self._last = done[-1].observation
        return StepResult(
            reward=math.fsum(parts.values()),
            terminated=over and done[-1].terminated,
            truncated=over and done[-1].truncated,
            observation=None if self._last is None else _with_note(self._last, problems, again=not done),
            reward_parts={**own, **parts},
            metrics={**_summed(done), **{name: float(count) for name, count in counts.items()}},
        )


class TimeLimit(_Wrapper):
    """Cuts an episode off after `max_steps` responses. The only place that sets `truncated`.

    An episode that is cut off is no success, unless its environment says so.
    """

    def __init__(self, env: Env, max_steps: int) -> None:
        if max_steps < 1:
            raise ValueError(f"max_steps: got {max_steps}, expected at least 1")
        super().__init__(env)
        self._max_steps = max_steps
        self._left = 0

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self._left = 0
        observation = self._env.reset(seed, options)
        self._left = self._max_steps
        self.instructions = self._env.instructions
        return observation

    def step(self, action: str) -> StepResult:
        if self._left == 0:
            raise ResetNeeded(f"step without an episode (or after {self._max_steps} steps): call reset first")
        result = self._env.step(action)
        self._left = 0 if result.terminated or result.truncated else self._left - 1
        if self._left or result.terminated:
            return result
        return replace(result, truncated=True, observation=None, metrics={"success": 0.0, **result.metrics})


def _summed(results: Sequence[StepResult]) -> dict[str, float]:
    """Their metrics, summed; `success` as the last of them says."""
    sums: dict[str, float] = {}
    for result in results:
        sums.pop("success", None)
        for name, value in result.metrics.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def _names(actions: Sequence[str], lookup: Mapping[str, str]) -> dict[str, str]:
    """What the policy may write -> the environment's name. Empty: anything."""
    unknown = [name for name in lookup.values() if actions and name not in actions]
    if unknown:
        raise ValueError(f"action_lookup: the environment has no action {unknown[0]!r}; it has {', '.join(actions)}")
    names = lookup or {name: name for name in actions}
    return {name.strip().casefold(): target for name, target in names.items()}


def _example(pattern: str | None) -> str:
    """How to write an action, where the pattern is plain enough to say so."""
    shape = re.sub(r"\(\.[*+]\??\)", "...", pattern or "")
    return f"; write it as {shape}" if "..." in shape and re.escape(shape.replace("...", "")).count("\\") == 0 else ""


def _with_note(observation: Observation, problems: Sequence[str], *, again: bool) -> Observation:
    """The observation below what was wrong with the response; the state is the same as without it."""
    if not problems:
        return observation
    *before, last = observation.messages
    noted = replace(last, content="\n".join([*problems, last.content]))
    if again:  # a system message stands at the beginning of a conversation only
        before = [message for message in before if message.role != "system"]
    return Observation((*before, noted), observation.state or observation.text)


def _name(env: Env) -> str:
    """As `custom_envs` would name it, without the folder of a file."""
    cls = type(env)
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if cls.__module__.startswith(FILE_MODULE) and file:
        return f"{Path(file).name}:{cls.__qualname__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def _wrong(env: Env, method: str, what: str, expected: str) -> TypeError:
    return TypeError(f"{_name(env)}.{method} returned {what}, expected {expected}")


def _shape(value: object) -> str:
    return f"{value!r:.80} ({type(value).__name__})"


def checked_observation(env: Env, method: str, observation: object) -> Observation:
    """`observation`, if it is one; else `TypeError` naming the class and what came."""
    if not isinstance(observation, Observation):
        raise _wrong(env, method, _shape(observation), "an Observation, e.g. Observation.of(text)")
    messages = observation.messages
    if not isinstance(messages, tuple) or not messages or not all(isinstance(m, Message) for m in messages):
        raise _wrong(env, method, f"an Observation with messages {_shape(messages)}", "a tuple of at least one Message")
    texts = [observation.state, *(message.content for message in messages)]
    if not all(isinstance(text, str) for text in texts):
        raise _wrong(env, method, f"an Observation with texts {_shape(texts)}", "strings as contents and state")
    return observation


def checked_result(env: Env, result: object) -> StepResult:
    """`result` with plain floats and bools, if it is a `StepResult` of finite numbers; else `TypeError`."""
    if not isinstance(result, StepResult):
        raise _wrong(env, "step", _shape(result), "a StepResult(reward=..., terminated=..., observation=...)")
    flags: dict[str, bool] = {}
    for name in ("terminated", "truncated"):
        flag = getattr(result, name)
        if not isinstance(flag, (bool, np.bool_)):
            raise _wrong(env, "step", f"a StepResult with {name} = {_shape(flag)}", "True or False")
        flags[name] = bool(flag)
    over = any(flags.values())
    if not over:
        checked_observation(env, "step", result.observation)
    return StepResult(
        reward=_finite(env, "reward", result.reward),
        **flags,
        observation=None if over else result.observation,
        reward_parts=_numbers(env, "reward_parts", result.reward_parts),
        metrics=_numbers(env, "metrics", result.metrics),
    )


def _finite(env: Env, what: str, value: object) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise _wrong(env, "step", f"a StepResult with {what} = {_shape(value)}", "a finite float")
    return float(value)


def _numbers(env: Env, what: str, values: object) -> dict[str, float]:
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise _wrong(env, "step", f"a StepResult with {what} = {_shape(values)}", "a dict of floats by name")
    return {name: _finite(env, f"{what}[{name!r}]", value) for name, value in values.items()}
