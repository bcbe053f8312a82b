"""Dataset rows played over several turns: tools answer calls, a simulated user the rest, a reward scores the end."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from roll.envs.base import Message, Observation
from roll.envs.tools.interactions import Interactions, Messages, UserSession
from roll.envs.tools.tool_rows import row_interaction, row_tool_kwargs, row_tools
from roll.envs.tools.toolbox import EpisodeTools
from roll.rollout.agent import Agent
from roll.rollout.episode import Episode
from roll.rollout.episode_envs import row_messages
from roll.rollout.tool_turns import ToolTurns
from roll.types.chat import ToolCall
from roll.types.trajectory import EpisodeError

INTERACTION_PART = "interaction"
"""Part of a reward: what a simulated user scored, by its weight."""


def chat_message(message: Message) -> dict[str, Any]:
    """Return a message as data sets and TRL's completions have it: calls as functions, their arguments as values."""
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        shown["reasoning_content"] = message.reasoning
    if message.name:
        shown["name"] = message.name
    if message.tool_calls:
        calls = [{"name": call.name, "arguments": _arguments(call)} for call in message.tool_calls]
        shown["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return shown


def _arguments(call: ToolCall) -> Any:
    try:
        return json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments


class ToolRollout:
    """Plays the episodes of one domain; implements `Rollout`.

    The reward function is given the last response, and one of TRL's kind all messages after the prompt. An episode that
    ends because of a limit (turns, tokens, room) is scored likewise and counts as truncated.

    Args:
        interaction: who plays the user where a row doesn't say; None: nobody.

    Raises:
        TemplateError: the chat template rewrites what stood before a user's answer.
    """

    def __init__(
        self, agent: Agent, turns: ToolTurns, interactions: Interactions | None = None, interaction: str | None = None
    ) -> None:
        self._agent, self._turns = agent, turns
        self._interactions, self._interaction = interactions, interaction
        if interactions is not None:
            agent.check_carries(turns.thinking_tags)

    async def play(self, episode: Episode) -> None:
        payload = episode.task.payload
        try:
            names, kwargs = row_tools(payload, self._turns.names), row_tool_kwargs(payload)
            who, arguments = row_interaction(payload, self._interaction)
        except ValueError as error:
            raise EpisodeError("env_error", f"task {episode.task.id}: {error}") from error
        async with contextlib.AsyncExitStack() as stack:
            tools = self._turns.open(episode, names, kwargs if names else {})
            if tools is not None:
                stack.push_async_callback(tools.aclose)
            user = None
            if who is not None and self._interactions is not None:
                user = self._interactions.open(who, episode.name, arguments)
                stack.push_async_callback(user.close)
            await self._play(episode, tools, user)

    async def _play(self, episode: Episode, tools: EpisodeTools | None, user: UserSession | None) -> None:
        prompt = await episode.first_prompt()
        history: Messages = [{"role": m.role, "content": m.content} for m in row_messages(episode.task)]
        completion: list[dict[str, Any]] = []  # what reward functions that read conversations are given
        left, cut_off = self._turns.max_turns, False
        while True:
            response = await self._turns.respond(episode, prompt, tools, max_turns=left)
            left -= response.turns
            history += [{"role": message.role, "content": message.content} for message in response.messages]
            completion += map(chat_message, response.messages)
            cut_off = response.ended in ("turns", "room")
            if user is None or response.ended != "answer":
                break
            with episode.busy("interaction"):
                over, text = await user.answer(history)
            if over:
                break
            history.append({"role": "user", "content": text})
            completion.append({"role": "user", "content": text})
            episode.answered(episode.number_of(response.completion), text)
            prompt = self._agent.reply(Observation.of(text), response.completion.token_ids)
            cut_off = not left or len(prompt) >= episode.room
            if cut_off:
                break
        await episode.step_env(messages=completion)
        if cut_off:
            episode.truncate()
        if user is not None:
            await user.finish()
            episode.pay(episode.number_of(response.completion), user.score, {})
            episode.add_part(INTERACTION_PART, user.score)
