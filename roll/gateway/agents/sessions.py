"""What answers the calls of an agent's episodes: a message graph and a session for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from roll.configs.schema.agents_config import AgentEnv
from roll.gateway.base import ChatAnswer, ChatCall, RefusedCall, Session
from roll.gateway.reading import ResponseReader, reads_effort
from roll.gateway.session import EpisodeSession, SessionSettings
from roll.rollout.agent import Agent
from roll.rollout.episode import Episode
from roll.rollout.message_graph import MessageGraph
from roll.rollout.tool_forms import resolve_parser
from roll.types.chat import THINK_TAGS


class AgentSession(EpisodeSession):
    """One that says when its episode is given up, so that nobody waits for an agent that can't go on."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.abandoned = asyncio.Event()

    async def complete(self, call: ChatCall) -> ChatAnswer:
        try:
            return await super().complete(call)
        except RefusedCall as refused:
            if refused.status == 409:
                self.abandoned.set()
            raise


def session_maker(
    env: AgentEnv, agent: Agent, tokenizer: Any, *, thinking_tags: tuple[str, str] | None, models: Mapping[str, Session]
) -> Callable[[Episode], AgentSession]:
    """Return what makes the session of an episode.

    Args:
        thinking_tags: around what is kept apart from the content; None: nothing is.
        models: that answer instead of the policy, by name.

    Raises:
        ValueError: there is no such tool parser, none gives back what the chat template writes, or the text of
            responses doesn't show the tags.
    """
    tags = agent.thought_tags(thinking_tags)
    has_template = bool(getattr(tokenizer, "chat_template", None))
    reading = ResponseReader(
        decode=lambda token_ids: agent.decode_response(token_ids, ()),
        token_text=lambda token: str(tokenizer.decode([token])),
        tool_parser=resolve_parser(env.tool_parser, tokenizer) if has_template else "",
        thinking_tags=tags,
        opened=agent.forced_think_prefix(tags),
        opened_with=lambda variables: agent.opening_tag(tags, variables),
        marks=agent.marks,
        takes_effort=reads_effort(agent.chat),
    )
    settings = SessionSettings(
        max_calls=env.max_calls,
        max_tokens=env.max_tokens,
        any_name="model" in env.ignored_fields,
        models=dict(models),
        side_models=env.side_models,
        side_prompts=env.side_prompts,
    )

    def graph(variables: Mapping[str, Any]) -> MessageGraph:
        return MessageGraph(agent.chat.with_variables(variables), env.history, thinking_tags=tags or THINK_TAGS)

    def make(episode: Episode) -> AgentSession:
        return AgentSession(episode, graph({}), reading, settings, new_graph=graph)

    return make
