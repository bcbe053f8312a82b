"""Episodes as their environment's own solver plays them, told as a policy is told them: rows for fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from roll.configs.agentic import AgenticConfig
from roll.envs.base import Env, Message, Observation, StepResult
from roll.envs.registry import EnvSpec, bare_env, build_env, env_spec
from roll.rollout.conversation import Conversation
from roll.rollout.env_tasks import EnvTasks
from roll.utils.seeding import stable_hash

Row = dict[str, Any]


def demonstrations(config: AgenticConfig, episodes: int, *, response: str = "{action}") -> Iterator[Row]:
    """Rows with `messages` of solved episodes of the configuration's environments, in the order of their tasks.

    Seeds are of neither training nor validation tasks, but drawn likewise. Episodes that the solver can't solve within
    `max_steps` are left out, so there may be fewer than `episodes`.

    Args:
        config: says what is played and what the policy is shown.
        episodes: how many are tried.
        response: text of a response, with {action}; several actions of one response stand as `action_separator` says.

    Raises:
        ValueError: an environment has no `solution`, or `response` has no {action}.
    """
    if "{action}" not in response:
        raise ValueError(f"response: got {response!r}, expected a text with {{action}}")
    manager = config.train_env_manager
    tags = config.tags_of(manager)
    env_types = {tag: config.custom_envs[tag].env_type for tag in tags}
    seed = stable_hash(config.seed, "demonstrations", bits=56)
    tasks = EnvTasks(tags, config.partition_of(manager), env_types, seed=seed, split="train").take(episodes)
    teachers = {tag: _Teacher(config, env_spec(tag, config.custom_envs[tag], manager), response) for tag in tags}
    for task in tasks:
        yield from teachers[task.tag].rows(task.seed)


class _Teacher:
    """Solves one kind of environment."""

    def __init__(self, config: AgenticConfig, spec: EnvSpec, response: str) -> None:
        self._section = config.custom_envs[spec.tag]
        self._response = response
        self._bare = bare_env(spec)
        if type(self._bare).solution is Env.solution:
            raise ValueError(f"custom_envs.{spec.tag}: {type(self._bare).__name__} has no solution() to demonstrate")
        self._played = build_env(spec)
        self._conversation = Conversation.of(
            spec.tag, self._section, instructions=self._bare.instructions, sample_unit=config.sample_unit
        )
        generating = config.actor_infer.generating_args
        self._limit = self._section.max_tokens_per_step or generating.max_new_tokens or config.response_length

    def rows(self, seed: int) -> list[Row]:
        """One per turn for `sample_unit: step`, else one; none without a solution."""
        self._bare.reset(seed, {})
        actions = self._bare.solution()
        exchanges = None if actions is None else self._exchanges(seed, actions)
        if exchanges is None:
            return []
        return [self._row(exchanges[first:last], seed) for first, last in self._spans(len(exchanges))]

    def _exchanges(self, seed: int, actions: Sequence[str]) -> list[tuple[tuple[Message, ...], Message]] | None:
        """(what the policy is shown, what it says) by turn; None if the solution takes too long."""
        size, spec = self._section.max_actions_per_step, self._conversation
        names = {env_name: name for name, env_name in self._section.action_lookup.items()}
        observation: Observation | None = self._played.reset(seed, {})
        result: StepResult | None = None
        exchanges = []
        for turn, first in enumerate(range(0, len(actions), size), start=1):
            if observation is None:
                return None
            chosen = [names.get(action, action) for action in actions[first : first + size]]
            said = self._response.replace("{action}", self._section.action_separator.join(chosen))
            exchanges.append((spec.shown(observation, turn, self._limit), Message("assistant", said)))
            result = self._played.step(said)
            observation = result.observation
        return exchanges if result is not None and result.terminated else None

    def _spans(self, turns: int) -> Iterator[tuple[int, int]]:
        """First turn and end of what each row shows."""
        spec = self._conversation
        for turn in range(turns):
            if spec.sample_unit == "step":
                yield 0 if spec.history_length is None else max(0, turn - spec.history_length), turn + 1
            elif turn + 1 == turns or spec.begins_anew(turn + 1):
                yield max(first for first in range(turn + 1) if spec.begins_anew(first)), turn + 1

    def _row(self, exchanges: Sequence[tuple[tuple[Message, ...], Message]], seed: int) -> Row:
        spec = self._conversation
        told = [*spec.system(), *(message for shown, said in exchanges for message in (*shown, said))]
        return {"messages": [{"role": m.role, "content": m.content} for m in told], "seed": seed, "tag": spec.tag}
