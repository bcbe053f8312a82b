"""From a response's text to the environment's actions, and the time limit."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from numbers import Real
from pathlib import Path
from typing import Any

from roll.configs.schema.env_config import CustomEnv
from roll.envs.base import Env, InvalidAction, Message, Observation, ResetNeeded, StepResult
from roll.envs.env_messages import PlainStep
from roll.envs.watched import Watched
from roll.utils.importing import FILE_MODULE

_SHOWN = 60  # Characters of a wrong action that are repeated to the policy
SEARCHED = 20_000
"""Characters at the end of a response in which actions are looked for: some patterns take time with their square."""
_PLAIN = re.compile(r"[^\\.^$*+?{}\[\]|()]+(?![*+?{])")
"""The plain beginning of a pattern, up to what could repeat its last letter."""


@dataclass(frozen=True, kw_only=True)
class EnvSpec(CustomEnv):
    """What a process needs to make and play an environment: a section of `custom_envs`. It holds no code, so it
    travels."""

    tag: str
    env_config: dict[str, Any] = field(default_factory=dict)
    format_penalty: float = 0.0
    """Added to the reward of a response without an action; at most 0."""
    invalid_action_penalty: float = 0.0
    """Added for each action that the environment doesn't know; at most 0."""
    python: str | None = None
    """`env_workers.python`: the interpreter that it runs under; null: this one."""


def without_thoughts(text: str, tags: tuple[str, str]) -> str:
    """Return `text` without what stands between the tags.

    After an opening tag that is never closed everything is thought, and before a closing tag that was never opened too:
    some chat templates put the opening tag into the prompt.
    """
    opening, closing = tags
    pieces: list[str] = []
    while text:
        before, opened, rest = text.partition(opening)
        _, stray, after = before.rpartition(closing)
        if stray:
            pieces.clear()
            before = after
        pieces.append(before)
        text = rest.partition(closing)[2] if opened else ""
    return "".join(pieces)


def visible_text(response: str, spec: CustomEnv) -> str:
    """Return a response without what was thought."""
    return response if spec.thinking_tags is None else without_thoughts(response, spec.thinking_tags)


def parse_actions(response: str, spec: CustomEnv) -> list[str]:
    """Return the actions that a response names, as it writes them; empty: there are none."""
    text = visible_text(response, spec)
    if spec.action_pattern is not None:
        last = _last_match(spec.action_pattern, text[-SEARCHED:])
        text = (last.group(1) or "") if last else ""
    pieces = text.split(spec.action_separator) if spec.max_actions_per_step > 1 else [text]
    return [action for piece in pieces if (action := piece.strip())]


def _last_match(pattern: str, text: str) -> re.Match[str] | None:
    """Return the last match. Of a pattern with a plain beginning the one that begins last, within another one perhaps:
    a response may speak of `<answer>` before it gives one."""
    compiled, beginning = _compiled(pattern)
    if not beginning:
        return max(compiled.finditer(text), key=re.Match.start, default=None)
    end = len(text)
    while (start := text.rfind(beginning, 0, end)) >= 0:
        if match := compiled.match(text, start):
            return match
        end = start + len(beginning) - 1
    return None


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> tuple[re.Pattern[str], str]:
    """Return a pattern, and its plain beginning; empty: it has none."""
    beginning = None if "|" in pattern else _PLAIN.match(pattern)
    return re.compile(pattern, re.DOTALL), beginning.group() if beginning else ""


class ResponseEnv(Env):
    """An environment as an episode plays it: `step` takes a whole response and does the actions that it names.

    Several are done in turn until the episode ends; their rewards add up. Adds to `metrics`: `actions` (those done),
    `format_errors` (1 when the response names none), `invalid_actions` (those that the environment doesn't know),
    `surplus_actions` (those beyond `max_actions_per_step`, not done). `reward_parts`: `env`, `format_penalty`,
    `invalid_action_penalty`, and the environment's own parts as `env/<name>`.

    A response that leads to no step is shown the last observation again, below a line that says what was wrong.

    After `max_steps` responses the episode is cut off. That is no success, unless the environment says so, and the only
    place that sets `truncated`.

    With several roles a response is that of the role whose turn it is: its penalties join `role_rewards`, actions that
    it names beyond its turn are `surplus_actions`, and the episode is cut off when one role has used its `max_steps`.
    """

    def __init__(self, env: Env, spec: EnvSpec) -> None:
        self._env = env
        self._spec = spec
        self.instructions, self.actions, self.roles = env.instructions, env.actions, env.roles
        self._names = _names(env.actions, spec.action_lookup)
        self._last: Observation | None = None  # None: no episode is under way
        self._steps: Counter[str] = Counter()  # Done, by role

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self._last = None
        observation = checked_observation(self._env, "reset", self._env.reset(seed, options))
        self.instructions = self._env.instructions
        self._last, self._steps = observation, Counter()
        return observation

    def step(self, action: str) -> StepResult:
        return _as_result(self.respond(action))

    def respond(self, action: str) -> PlainStep:
        """Return what `step` does, in the fields that this class fills: to be sent on, which needs no `StepResult`."""
        if self._last is None:
            raise ResetNeeded(f"{_name(self._env)}.step without an episode: call reset first")
        named, role = parse_actions(action, self._spec), self._last.role
        if not named and self._env.reads_responses and (visible := visible_text(action, self._spec).strip()):
            named = [visible]
        done: list[PlainStep] = []
        problems: list[str] = (
            [] if named else [f"No action was found in your response{_example(self._spec.action_pattern)}."]
        )
        surplus = max(0, len(named) - self._spec.max_actions_per_step)
        for tried, text in enumerate(named[: self._spec.max_actions_per_step], start=1):
            try:
                done.append(_checked(self._env, self._env.step(self._known(text))))
            except InvalidAction as error:
                problems.append(str(error))
                continue
            shown = done[-1].observation
            if shown is None:
                break
            if shown.role != role:  # the turn has passed
                surplus = len(named) - tried
                break
        result = self._together(done, named, problems, role, surplus)
        self._steps[role] += 1
        if result.terminated or (self._last is not None and self._steps[role] < self._spec.max_steps):
            return result
        self._last = None
        failed = dict.fromkeys([f"success/{name}" for name in self.roles] or ["success"], 0.0)
        return result._replace(truncated=True, observation=None, metrics={**failed, **result.metrics})

    def render(self) -> Any:
        return self._env.render()

    def close(self) -> None:
        self._env.close()

    def _known(self, text: str) -> str:
        """Return the environment's name of an action."""
        if not self._names:
            return text
        name = self._names.get(text.casefold())
        if name is None:
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
            known = ", ".join(self._spec.action_lookup or self.actions)
            raise InvalidAction(f"{shown!r} is not an action. Actions: {known}.")
        return name

    def _together(
        self, done: Sequence[PlainStep], named: Sequence[str], problems: Sequence[str], role: str, surplus: int
    ) -> PlainStep:
        """Return one result for all actions of a response, which is the role's."""
        spec = self._spec
        reward, terminated, truncated, shown, own, metrics, role_rewards = done[0] if len(done) == 1 else _summed(done)
        if done:
            self._last = shown  # None where it is over
        else:
            shown = self._last
        if shown is not None and problems:
            shown = _with_note(shown, problems, again=not done)
        invalid = len(problems) if named else 0
        format_penalty = 0.0 if named else spec.format_penalty
        action_penalty = invalid * spec.invalid_action_penalty
        parts = {f"env/{name}": value for name, value in own.items()} if own else {}
        parts["env"], parts["format_penalty"], parts["invalid_action_penalty"] = reward, format_penalty, action_penalty
        metrics["actions"] = float(len(done))
        metrics["format_errors"] = 0.0 if named else 1.0
        metrics["invalid_actions"] = float(invalid)
        metrics["surplus_actions"] = float(surplus)
        if self.roles:
            role_rewards[role] = role_rewards.get(role, 0.0) + (format_penalty + action_penalty)
        else:
            reward = math.fsum((reward, format_penalty, action_penalty))
        return PlainStep(reward, terminated, truncated, shown, parts, metrics, role_rewards)


def _summed(results: Sequence[PlainStep]) -> PlainStep:
    """Return the results of any number of actions as one; `success` as the last of them says."""
    parts: dict[str, float] = {}
    metrics: dict[str, float] = {}
    role_rewards: dict[str, float] = {}
    if not results:
        return PlainStep(0.0, False, False, None, parts, metrics, role_rewards)
    for result in results:
        for name in [name for name in metrics if name == "success" or name.startswith("success/")]:
            del metrics[name]
        _add(parts, result.reward_parts)
        _add(metrics, result.metrics)
        _add(role_rewards, result.role_rewards)
    reward = math.fsum([result.reward for result in results])
    last = results[-1]
    return PlainStep(reward, last.terminated, last.truncated, last.observation, parts, metrics, role_rewards)


def _add(sums: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + value


def _names(actions: Sequence[str], lookup: Mapping[str, str]) -> dict[str, str]:
    """Return what the policy may write -> the environment's name. Empty: anything."""
    unknown = [name for name in lookup.values() if actions and name not in actions]
    if unknown:
        raise ValueError(f"action_lookup: the environment has no action {unknown[0]!r}; it has {', '.join(actions)}")
    names = lookup or {name: name for name in actions}
    return {name.strip().casefold(): target for name, target in names.items()}


def _example(pattern: str | None) -> str:
    """Return how to write an action, where the pattern is plain enough to say so."""
    shape = re.sub(r"\(\.[*+]\??\)", "...", pattern or "")
    return f"; write it as {shape}" if "..." in shape and re.escape(shape.replace("...", "")).count("\\") == 0 else ""


def _with_note(observation: Observation, problems: Sequence[str], *, again: bool) -> Observation:
    """Return the observation below what was wrong with the response; the state is the same as without it."""
    *before, last = observation.messages
    noted = replace(last, content="\n".join([*problems, last.content]))
    if again:  # a system message stands at the beginning of a conversation only
        before = [message for message in before if message.role != "system"]
    return Observation((*before, noted), observation.state or observation.text, observation.role)


def _name(env: Env) -> str:
    """As `custom_envs` would name it, without the folder of a file."""
    cls = type(env.env if isinstance(env, Watched) else env)
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if cls.__module__.startswith(FILE_MODULE) and file:
        return f"{Path(file).name}:{cls.__qualname__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def _wrong(env: Env, method: str, what: str, expected: str) -> TypeError:
    return TypeError(f"{_name(env)}.{method} returned {what}, expected {expected}")


def _shape(value: object) -> str:
    return f"{value!r:.80} ({type(value).__name__})"


def checked_observation(env: Env, method: str, observation: object) -> Observation:
    """Return `observation`, if it is one; else `TypeError` naming the class and what came."""
    if not isinstance(observation, Observation):
        raise _wrong(env, method, _shape(observation), "an Observation, e.g. Observation.of(text)")
    messages = observation.messages
    if not isinstance(messages, tuple) or not messages or [m for m in messages if not isinstance(m, Message)]:
        raise _wrong(env, method, f"an Observation with messages {_shape(messages)}", "a tuple of at least one Message")
    texts = [observation.state, *[message.content for message in messages]]
    for text in texts:
        if not isinstance(text, str):
            raise _wrong(env, method, f"an Observation with texts {_shape(texts)}", "strings as contents and state")
    if observation.role not in (env.roles or ("",)):
        expected = f"one of its roles, {', '.join(env.roles)}" if env.roles else "none: the class names no roles"
        raise _wrong(env, method, f"an Observation with role {_shape(observation.role)}", expected)
    return observation


def checked_result(env: Env, result: object) -> StepResult:
    """Return `result` with plain floats and bools, if it is a `StepResult` of finite numbers; else `TypeError`."""
    return _as_result(_checked(env, result))


def _as_result(step: PlainStep) -> StepResult:
    return StepResult(
        reward=step.reward,
        terminated=step.terminated,
        truncated=step.truncated,
        observation=step.observation,
        reward_parts=step.reward_parts,
        metrics=step.metrics,
        role_rewards=step.role_rewards,
    )


def _checked(env: Env, result: object) -> PlainStep:
    if not isinstance(result, StepResult):
        raise _wrong(env, "step", _shape(result), "a StepResult(reward=..., terminated=..., observation=...)")
    terminated, truncated = result.terminated, result.truncated
    if type(terminated) is not bool or type(truncated) is not bool:
        terminated, truncated = _flag(env, "terminated", terminated), _flag(env, "truncated", truncated)
    observation = None if terminated or truncated else checked_observation(env, "step", result.observation)
    return PlainStep(
        _finite(env, "reward", result.reward),
        terminated,
        truncated,
        observation,
        _numbers(env, "reward_parts", result.reward_parts),
        _numbers(env, "metrics", result.metrics),
        _of_roles(env, _numbers(env, "role_rewards", result.role_rewards)),
    )


def _of_roles(env: Env, rewards: dict[str, float]) -> dict[str, float]:
    for role in rewards:
        if role not in env.roles:
            known = f"its roles, {', '.join(env.roles)}" if env.roles else "none: the class names no roles"
            raise _wrong(env, "step", f"a StepResult with role_rewards of {_shape(role)}", known)
    return rewards


def _flag(env: Env, name: str, flag: object) -> bool:
    if not isinstance(flag, bool) and not _is_numpy_bool(flag):
        raise _wrong(env, "step", f"a StepResult with {name} = {_shape(flag)}", "True or False")
    return bool(flag)


def _is_numpy_bool(flag: object) -> bool:
    """Without numpy, which an interpreter of the user's own may lack."""
    return type(flag).__module__ == "numpy" and type(flag).__name__ in ("bool", "bool_")


def _finite(env: Env, what: str, value: object) -> float:
    # What is a float is one without asking the abstract class, which takes ten times as long.
    if (type(value) is not float and not isinstance(value, Real)) or not math.isfinite(value):
        raise _wrong(env, "step", f"a StepResult with {what} = {_shape(value)}", "a finite float")
    return float(value)


def _numbers(env: Env, what: str, values: object) -> dict[str, float]:
    if type(values) is not dict and not isinstance(values, Mapping):
        raise _wrong(env, "step", f"a StepResult with {what} = {_shape(values)}", "a dict of floats by name")
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise _wrong(env, "step", f"a StepResult with {what} = {_shape(values)}", "a dict of floats by name")
        if type(value) is float and math.isfinite(value):
            numbers[name] = value
        elif type(value) is int:
            numbers[name] = float(value)
        else:
            numbers[name] = _finite(env, f"{what}[{name!r}]", value)
    return numbers
