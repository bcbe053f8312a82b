"""Multi-turn episodes as the policy meets them: what it is told, what it is shown again, where its context is reset.

sample unit    a turn's prompt                                                        training rows
trajectory     what is new; everything before is carried, token by token              one
concat         the same, but the context is reset before it would hold more           one per context
               than `history_length` earlier exchanges
step           re-rendered:  system, the last `history_length` exchanges as text,    one per turn
               the new messages
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from roll.configs.catalog.env_table import ENDPOINT, POLICY
from roll.configs.schema.env_config import CustomEnv, RoleConfig, filled
from roll.envs.base import Message, Observation, StepResult
from roll.envs.players import players_of
from roll.envs.tools.toolbox import EpisodeTools
from roll.envs.wrappers import without_thoughts
from roll.rollout.agent import Agent
from roll.rollout.episode import Episode
from roll.rollout.roles import ChatService, RoleLedger
from roll.rollout.tool_turns import ToolTurns
from roll.types.trajectory import EpisodeError
from roll.utils.seeding import stable_hash

SampleUnit = Literal["trajectory", "step", "concat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """How the episodes of one kind of environment are told to the policy.

    In templates `{name}` is replaced, once and by nothing but text; `{{name}}` stands for `{name}` itself, and other
    braces for themselves.
    """

    tag: str
    """Its name in `custom_envs`."""
    env: CustomEnv
    """That section. The environment's own limit ends an episode; `max_steps` is for an environment without."""
    instructions: str = ""
    """The environment's."""
    roles: tuple[str, ...] = ()
    """The environment's; empty: a single agent."""
    sample_unit: SampleUnit = "trajectory"

    def players(self, seed: int) -> dict[str, RoleConfig]:
        """Return who plays each role in the episodes of this seed; empty without roles."""
        return players_of(self.env, self.roles, seed)

    def system(self, role: str = "") -> tuple[Message, ...]:
        """Return the system message, if there is one."""
        values = {
            "instructions": self.instructions,
            "role": role,
            "max_steps": self.env.max_steps,
            "max_actions_per_step": self.env.max_actions_per_step,
        }
        text = filled(self.env.system_template or "", values)
        return (Message("system", text),) if text else ()

    def prompt_messages(
        self, role: str, history: Sequence[Exchange], messages: tuple[Message, ...]
    ) -> tuple[Message, ...]:
        """Return a whole prompt that ends with these messages: what a context begins with, or a service is sent."""
        turn = len(history)
        first = next(k for k in range(turn, -1, -1) if self.resets_context(k))
        if self.sample_unit == "step":
            first = 0 if self.env.history_length is None else max(0, turn - self.env.history_length)
        # What the environment itself said as system holds for the whole episode.
        earlier = [m for exchange in history[:first] for m in exchange.messages if m.role == "system"]
        for exchange in history[first:]:
            earlier += [*exchange.messages, Message("assistant", exchange.response)]
        return (*self.system(role), *earlier, *messages)

    def shown(self, observation: Observation, step: int, max_tokens: int) -> tuple[Message, ...]:
        """Return what the policy is told in a turn; `step` counts from 1."""
        *before, last = observation.messages
        values = {
            "observation": last.content,
            "role": observation.role,
            "step": step,
            "steps_left": self.env.max_steps - step + 1,
            "max_steps": self.env.max_steps,
            "max_actions_per_step": self.env.max_actions_per_step,
            "max_tokens": max_tokens,
        }
        return (*before, replace(last, content=filled(self.env.turn_template, values)))

    def remembered(self, response: str) -> str:
        """Return a response as later prompts show it."""
        return (
            response if self.env.thinking_tags is None else without_thoughts(response, self.env.thinking_tags).strip()
        )

    @property
    def carries(self) -> bool:
        """Return whether some turn continues the tokens of the one before."""
        return self.sample_unit == "trajectory" or (self.sample_unit == "concat" and self.env.history_length != 0)

    def resets_context(self, turn: int) -> bool:
        """Return whether this turn (from 0) has a whole prompt of its own."""
        if self.sample_unit == "step" or turn == 0:
            return True
        if self.sample_unit == "trajectory" or self.env.history_length is None:
            return False
        return turn % (self.env.history_length + 1) == 0


@dataclass(frozen=True, slots=True)
class Exchange:
    """A turn of a role that is over."""

    messages: tuple[Message, ...]
    response: str
    sampled: tuple[int, ...] = ()
    turn: int | None = None
    """Its number, where the policy spoke."""


class ConversationRollout:
    """Plays episodes as a `Conversation` says; implements `Rollout`.

    With several roles there is a conversation for each: a role is shown what is meant for it and its own responses.
    What a frozen model says leads to a step of the environment, but is no turn.

    With tools (`turns`) a response that calls some is answered by them, in turns of their own; the environment is given
    the first that calls none, or the last there is time for.

    Raises:
        TemplateError: the chat template doesn't take a system message, or rewrites history and the sample unit carries
            tokens.
        ValueError: the text of responses doesn't show `thinking_tags`, or a service that plays a role isn't there.
    """

    def __init__(self, agent: Agent, conversation: Conversation, turns: ToolTurns | None = None) -> None:
        self._agent = agent
        self._conversation = conversation
        self._turns = turns
        self._specs = () if turns is None else turns.specs
        for role in conversation.roles or ("",):
            agent.prompt((*conversation.system(role), Message("user", "?")), self._specs)
        if conversation.carries:
            agent.check_carries(conversation.env.thinking_tags)
        self._opened = agent.forced_think_prefix(conversation.env.thinking_tags)
        self._services = {
            id(player): ChatService(f"custom_envs.{conversation.tag}.roles.{role}", player)
            for role, player in conversation.env.roles.items()
            if player.player == ENDPOINT
        }

    async def play(self, episode: Episode) -> None:
        tools = None if self._turns is None else self._turns.open(episode, self._turns.names)
        async with contextlib.nullcontext() if tools is None else contextlib.aclosing(tools):
            await self._play(episode, tools)

    async def _play(self, episode: Episode, tools: EpisodeTools | None) -> None:
        spec = self._conversation
        limit = spec.env.max_tokens_per_step or episode.params.max_new_tokens
        players = spec.players(episode.task.seed)
        trained = [role for role, player in players.items() if player.player == POLICY]
        ledger = RoleLedger(episode, trained, spec.env.role_rewards) if players else None
        histories: dict[str, list[Exchange]] = {role: [] for role in spec.roles or ("",)}
        observation = await episode.reset()
        for _ in range(spec.env.max_steps * len(histories)):
            role = observation.role
            history = histories[role]
            messages = spec.shown(observation, len(history) + 1, limit)
            if role in players and players[role].player == ENDPOINT:
                service = self._services[id(players[role])]
                answer, result = await self._ask(service, episode, role, messages, history, limit)
            else:
                begins = any(histories.values()) and spec.resets_context(len(history))
                answer, result = await self._respond(episode, role, messages, history, limit, begins, tools)
            if ledger is not None:
                ledger.settle(role, answer.turn, result)
            if result.terminated or result.truncated or result.observation is None:
                return
            history.append(answer)
            observation = result.observation
        episode.truncate()

    async def _respond(
        self,
        episode: Episode,
        role: str,
        messages: tuple[Message, ...],
        history: Sequence[Exchange],
        limit: int,
        begins: bool,
        tools: EpisodeTools | None,
    ) -> tuple[Exchange, StepResult]:
        """Let the policy respond."""
        prompt = self._prompt(role, messages, history)
        carried = not self._conversation.resets_context(len(history))
        after = history[-1].turn if carried else None
        changes: dict[str, Any] = {"reset_context": begins, "after": after, "role": role, "max_new_tokens": limit}
        if self._turns is None:
            completion = await episode.generate(prompt, **changes)
            text = self._opened + episode.text(completion)
        else:
            response = await self._turns.respond(episode, prompt, tools, max_turns=self._turns.max_turns, **changes)
            completion, text = response.completion, self._opened + episode.text(response.completion)
        result = await episode.step_env(text)
        remembered = self._conversation.remembered(text)
        return Exchange(messages, remembered, completion.token_ids, episode.number_of(completion)), result

    async def _ask(
        self,
        service: ChatService,
        episode: Episode,
        role: str,
        messages: tuple[Message, ...],
        history: Sequence[Exchange],
        limit: int,
    ) -> tuple[Exchange, StepResult]:
        """Let a frozen model respond."""
        prompt = self._conversation.prompt_messages(role, history, messages)
        seed = stable_hash("opponent", episode.name, role, len(history), bits=31)
        with episode.busy("opponent"):
            text = await service.respond(prompt, max_tokens=limit, seed=seed)
        return Exchange(messages, self._conversation.remembered(text)), await episode.step_env(text, by_policy=False)

    def _prompt(self, role: str, messages: tuple[Message, ...], history: Sequence[Exchange]) -> tuple[int, ...]:
        spec = self._conversation
        if not spec.resets_context(len(history)):
            return self._agent.reply(Observation(messages), history[-1].sampled)
        prompt = self._agent.prompt(spec.prompt_messages(role, history, messages), self._specs)
        if not prompt:
            raise EpisodeError("env_error", "a prompt without tokens: no system message, and nothing to observe")
        return prompt
