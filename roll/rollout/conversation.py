"""Multi-turn episodes as the policy meets them: what it is told, what it is shown again, where its context is reset.

sample unit    a turn's prompt                                                        training rows
trajectory     what is new; everything before is carried, token by token              one
concat         the same, but the context is reset before it would hold more           one per context
               than `history_length` earlier exchanges
step           re-rendered:  system, the last `history_length` exchanges as text,    one per turn
               the new messages
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from roll.configs.schema.env_config import CustomEnv
from roll.configs.schema.turn_templates import filled
from roll.envs.base import Message, Observation
from roll.envs.wrappers import without_thoughts
from roll.rollout.agent import Agent
from roll.rollout.episode import Episode
from roll.types.episode import EpisodeError

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
    sample_unit: SampleUnit = "trajectory"

    def system(self) -> tuple[Message, ...]:
        """Return the system message, if there is one."""
        values = {
            "instructions": self.instructions,
            "max_steps": self.env.max_steps,
            "max_actions_per_step": self.env.max_actions_per_step,
        }
        text = filled(self.env.system_template or "", values)
        return (Message("system", text),) if text else ()

    def shown(self, observation: Observation, step: int, max_tokens: int) -> tuple[Message, ...]:
        """Return what the policy is told in a turn; `step` counts from 1."""
        *before, last = observation.messages
        values = {
            "observation": last.content,
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
        """Whether some turn continues the tokens of the one before."""
        return self.sample_unit == "trajectory" or (self.sample_unit == "concat" and self.env.history_length != 0)

    def resets_context(self, turn: int) -> bool:
        """Return whether this turn (from 0) has a whole prompt of its own."""
        if self.sample_unit == "step" or turn == 0:
            return True
        if self.sample_unit == "trajectory" or self.env.history_length is None:
            return False
        return turn % (self.env.history_length + 1) == 0


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A turn that is over."""

    messages: tuple[Message, ...]
    response: str
    sampled: tuple[int, ...]


class ConversationRollout:
    """Plays episodes as a `Conversation` says; implements `Rollout`.

    Raises:
        TemplateError: the chat template doesn't take a system message, or rewrites history and the sample unit carries
            tokens.
        ValueError: the text of responses doesn't show `thinking_tags`.
    """

    def __init__(self, agent: Agent, conversation: Conversation) -> None:
        self._agent = agent
        self._conversation = conversation
        self._system = conversation.system()
        agent.prompt((*self._system, Message("user", "?")))
        if conversation.carries:
            agent.check_carries(conversation.env.thinking_tags)
        self._opened = agent.forced_think_prefix(conversation.env.thinking_tags)

    async def play(self, episode: Episode) -> None:
        spec = self._conversation
        limit = spec.env.max_tokens_per_step or episode.params.max_new_tokens
        observation = await episode.reset()
        history: list[_Exchange] = []
        for turn in range(spec.env.max_steps):
            messages = spec.shown(observation, turn + 1, limit)
            prompt = self._prompt(messages, history)
            reset = turn > 0 and spec.resets_context(turn)
            completion = await episode.generate(prompt, reset_context=reset, max_new_tokens=limit)
            text = self._opened + episode.text(completion)
            result = await episode.step_env(text)
            if result.terminated or result.truncated or result.observation is None:
                return
            history.append(_Exchange(messages, spec.remembered(text), completion.token_ids))
            observation = result.observation
        episode.truncate()

    def _prompt(self, messages: tuple[Message, ...], history: Sequence[_Exchange]) -> tuple[int, ...]:
        spec = self._conversation
        if not spec.resets_context(len(history)):
            return self._agent.reply(Observation(messages), history[-1].sampled)
        first = len(history)
        if spec.sample_unit == "step":
            first = 0 if spec.env.history_length is None else max(0, len(history) - spec.env.history_length)
        # What the environment itself said as system holds for the whole episode.
        earlier = [m for exchange in history[:first] for m in exchange.messages if m.role == "system"]
        if spec.sample_unit == "step":
            for exchange in history[first:]:
                earlier += [*exchange.messages, Message("assistant", exchange.response)]
        prompt = self._agent.prompt((*self._system, *earlier, *messages))
        if not prompt:
            raise EpisodeError("env_error", "a prompt without tokens: no system message, and nothing to observe")
        return prompt
