"""Episodes as their environment's own solver plays them, told as a policy is told them: rows for fine-tuning."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from roll.configs.schema.agentic_config import AgenticConfig
from roll.envs.base import Env, Message, Observation, StepResult
from roll.envs.env_registry import bare_env, build_env, env_spec, load_env
from roll.envs.wrappers import EnvSpec
from roll.rollout.conversation import Conversation
from roll.rollout.env_tasks import EnvTasks
from roll.utils.seeding import stable_hash

Row = dict[str, Any]
_Shown = tuple[tuple[Message, ...], Message]


def demonstrations(config: AgenticConfig, episodes: int, *, response: str | None = None) -> Iterator[Row]:
    """Yield rows with `messages` of solved episodes of the configuration's environments, in the order of their tasks.

    Seeds are of neither training nor validation tasks, but drawn likewise. Episodes that the solver can't solve within
    `max_steps` are left out, so there may be rows of fewer than `episodes`.

    Args:
        response: text of a response, with {action}; several actions of one response stand as `action_separator` says.
            None: what each `action_pattern` looks for, e.g. `<answer>{action}</answer>`, and no more.

    Raises:
        ValueError: an environment has no `solution`, `response` has no {action} or isn't understood, or
            `action_lookup` has no name for an action.
    """
    if response is not None and "{action}" not in response:
        raise ValueError(f"response: got {response!r}, expected a text with {{action}}")
    manager = config.train_env_manager
    tags = config.tags_of(manager)
    env_types = {tag: config.custom_envs[tag].env_type for tag in tags}
    seed = stable_hash(config.seed, "demonstrations", bits=56)
    tasks = EnvTasks(tags, config.partition_of(manager), env_types, seed=seed, split="train").take(episodes)
    with ExitStack() as stack:
        specs = {tag: env_spec(tag, config.custom_envs[tag], manager, config.env_workers.python) for tag in tags}
        responses = {tag: response or _usual_response(tag, config.custom_envs[tag].action_pattern) for tag in tags}
        teachers = {tag: stack.enter_context(closing(_Teacher(config, specs[tag], responses[tag]))) for tag in tags}
        for task in tasks:
            yield from teachers[task.tag].rows(task.seed)


def _usual_response(tag: str, pattern: str | None) -> str:
    """Return the shortest text that the pattern finds an action in."""
    text, actions = re.subn(r"\(\.[*+]\??\)", "{action}", "(.*)" if pattern is None else pattern)
    if actions != 1:
        raise ValueError(
            f"response: needed, a text with {{action}}; what fits custom_envs.{tag}.action_pattern, {pattern!r}, isn't "
            "plain from it"
        )
    return text


class _Teacher:
    """Solves one kind of environment."""

    def __init__(self, config: AgenticConfig, spec: EnvSpec, response: str) -> None:
        # Everybody is shown: who plays which role in the run doesn't matter.
        spec = replace(spec, roles={}, swap_roles=False)
        self._section = config.custom_envs[spec.tag]
        self._response = response
        env_class = None if spec.python is not None else load_env(spec.env_type)  # else it may not be importable here
        if env_class is not None and env_class.solution is Env.solution:
            raise ValueError(
                f"custom_envs.{spec.tag}.env_type: {env_class.__name__} has no solution() to demonstrate; leave it out "
                "by train_env_manager.tags, or write one (roll/envs/base.py)"
            )
        self._bare = bare_env(spec)
        self._played = build_env(spec)
        self._names: dict[str, str] = {}
        for name, action in self._section.action_lookup.items():
            self._names.setdefault(action, name)
        self._conversation = Conversation(
            tag=spec.tag,
            env=self._section,
            instructions=self._bare.instructions,
            roles=self._bare.roles,
            sample_unit=config.sample_unit,
        )
        generating = config.actor_infer.generating_args
        self._limit = self._section.max_tokens_per_step or generating.max_new_tokens or config.response_length

    def close(self) -> None:
        self._bare.close()
        self._played.close()

    def rows(self, seed: int) -> list[Row]:
        """Return one row per turn for `sample_unit: step`, else one, for each role; none without a solution."""
        self._bare.reset(seed, {})
        roles = self._conversation.roles or ("",)
        actions = self._bare.solution(self._section.max_steps * self._actions_per_response * len(roles))
        exchanges = None if actions is None else self._exchanges(seed, actions)
        if exchanges is None:
            return []
        return [
            self._row(role, exchanges[role][first:last], seed)
            for role in roles
            for first, last in self._spans(len(exchanges[role]))
        ]

    @property
    def _actions_per_response(self) -> int:
        """Return how many actions a response has: with several roles one, then it is somebody else's turn."""
        return 1 if self._conversation.roles else self._section.max_actions_per_step

    def _exchanges(self, seed: int, actions: Sequence[str]) -> dict[str, list[_Shown]] | None:
        """Return (what the policy is shown, what it says) by role and turn; None if the solution takes too long."""
        size, spec = self._actions_per_response, self._conversation
        observation: Observation | None = self._played.reset(seed, {})
        result: StepResult | None = None
        exchanges: dict[str, list[_Shown]] = {role: [] for role in spec.roles or ("",)}
        for first in range(0, len(actions), size):
            if observation is None:
                return None
            own = exchanges[observation.role]
            chosen = [self._name_of(action) for action in actions[first : first + size]]
            response = self._response.replace("{action}", self._section.action_separator.join(chosen))
            own.append((spec.shown(observation, len(own) + 1, self._limit), Message("assistant", response)))
            result = self._played.step(response)
            self._check(result, response, chosen)
            observation = result.observation
        solved = result is not None and result.terminated and result.metrics.get("success", 1.0) > 0
        return exchanges if solved else None

    def _name_of(self, action: str) -> str:
        """Return what the policy calls an action."""
        if self._names and action not in self._names:
            raise ValueError(
                f"custom_envs.{self._conversation.tag}.action_lookup: solutions need {action!r}, for which it has no "
                f"name; it has names for {', '.join(self._names)}"
            )
        return self._names.get(action, action)

    def _check(self, result: StepResult, text: str, chosen: Sequence[str]) -> None:
        """Refuse a row that teaches what the environment doesn't understand."""
        unread = any(result.metrics[name] for name in ("format_errors", "invalid_actions", "surplus_actions"))
        if unread or (result.metrics["actions"] != len(chosen) and not result.terminated):
            raise ValueError(
                f"custom_envs.{self._conversation.tag}: the response {text!r} isn't understood as {', '.join(chosen)}; "
                "expected one that fits action_pattern, action_separator and thinking_tags"
            )

    def _spans(self, turns: int) -> Iterator[tuple[int, int]]:
        """Yield first turn and end of what each row shows."""
        spec = self._conversation
        for turn in range(turns):
            if spec.sample_unit == "step":
                yield 0 if spec.env.history_length is None else max(0, turn - spec.env.history_length), turn + 1
            elif turn + 1 == turns or spec.resets_context(turn + 1):
                yield max(first for first in range(turn + 1) if spec.resets_context(first)), turn + 1

    def _row(self, role: str, exchanges: Sequence[_Shown], seed: int) -> Row:
        spec = self._conversation
        messages = list(spec.system(role))
        for number, (shown, response) in enumerate(exchanges, start=1):
            rerendered = spec.sample_unit == "step" and number < len(exchanges)
            messages += [*shown, Message("assistant", spec.remembered(response.content)) if rerendered else response]
        return {"messages": [{"role": m.role, "content": m.content} for m in messages], "seed": seed, "tag": spec.tag}
