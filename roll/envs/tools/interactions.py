"""Simulated users: who answers a response that calls no tool, until the conversation is over."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from roll.configs.schema.env_config import filled, names_in
from roll.configs.schema.tool_config import InteractionConfig
from roll.types.trajectory import EpisodeError
from roll.utils.importing import load_object
from roll.utils.json_service import Endpoint, EndpointFailed, endpoint_url, key_in
from roll.utils.loop_thread import LoopThread

Messages = list[dict[str, str]]
"""`{"role": ..., "content": ...}` each, the policy's responses as `assistant`."""
UserTurn = tuple[bool, str, float, dict[str, Any]]
"""(whether the conversation is over, what the user says, score of the turn, numbers for logging)."""
DONE = "[DONE]"
"""What a model that plays the user writes when it is content."""


class BaseInteraction:
    """A simulated user of your own. Methods and arguments are those of verl's class of this name.

    One object serves all episodes of a run; an episode is an `instance_id`. All methods are coroutines.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> str:  # noqa: ARG002
        """Begin an episode; `kwargs` are the row's `interaction_kwargs`. Returns the instance's id."""
        return instance_id

    async def generate_response(self, instance_id: str, messages: Messages, **kwargs: Any) -> UserTurn:
        """Return what the user says to the conversation so far, whose last message is the policy's."""
        raise NotImplementedError

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:  # noqa: ARG002
        """Return a score of the whole conversation at its end, added to those of its turns. Default: 0."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Release what belongs to an episode. Default: there is nothing to release."""


class ModelInteraction(BaseInteraction):
    """A model behind an OpenAI-compatible endpoint plays the user: it sees the conversation with the roles exchanged.

    The conversation is over when it writes `[DONE]`. Scores nothing.
    """

    def __init__(self, config: InteractionConfig) -> None:
        super().__init__({"name": config.name})
        assert config.endpoint is not None
        key = key_in(os.environ, config.api_key_env)
        if key is None:
            name = f"interactions.{config.name}.api_key_env"
            raise ValueError(f"{name}: the environment variable {config.api_key_env} is not set; export it")
        self._config = config
        self._goals: dict[str, str] = {}
        self._endpoint = Endpoint(
            endpoint_url(config.endpoint, "/chat/completions"),
            who=f"the simulated user {config.name}",
            key=key,
            timeout=config.timeout_s,
            retries=2,
            delay=1.0,
            connections=64,
        )

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> str:
        missing = [name for name in names_in(self._config.prompt) if name not in kwargs]
        if missing:
            problem = (
                f"interaction_kwargs of the row have no {missing[0]!r}, which interactions.{self.name}.prompt names"
            )
            raise EpisodeError("env_error", problem)
        self._goals[instance_id] = filled(self._config.prompt, kwargs)
        return instance_id

    async def generate_response(self, instance_id: str, messages: Messages, **kwargs: Any) -> UserTurn:  # noqa: ARG002
        dialogue = [m for m in messages if m["role"] in ("user", "assistant")]
        exchanged = [{**m, "role": "user" if m["role"] == "assistant" else "assistant"} for m in dialogue]
        body: dict[str, Any] = {"messages": [{"role": "system", "content": self._goals[instance_id]}, *exchanged]}
        body |= {"model": self._config.model or ""}
        body |= self._config.request_args
        try:
            text = (await self._endpoint.ask(body))["choices"][0]["message"]["content"] or ""
        except EndpointFailed as error:
            raise EpisodeError("env_error", str(error)) from error
        except (KeyError, IndexError, TypeError) as error:
            raise EpisodeError("env_error", f"the simulated user {self.name} sent no message: {error!r}") from error
        return DONE in text, text.replace(DONE, "").strip(), 0.0, {}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:  # noqa: ARG002
        self._goals.pop(instance_id, None)

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()


def make_interaction(config: InteractionConfig) -> Any:
    """Return the simulated user of a section. Raises `ValueError`, also for a class without the methods."""
    if config.path is None:
        return ModelInteraction(config)
    key = f"interactions.{config.name}.path"
    made = load_object(config.path, key=key, kind="class")({"name": config.name, **config.config})
    methods = ("start_interaction", "generate_response", "calculate_score", "finalize_interaction")
    if missing := [name for name in methods if not asyncio.iscoroutinefunction(getattr(made, name, None))]:
        base = "roll.envs.tools.interactions:BaseInteraction"
        raise ValueError(f"{key}: {config.path} has no coroutine {missing[0]}; derive it from {base}")
    return made


class Interactions:
    """The simulated users of a run, in an event loop of their own. Close it."""

    def __init__(self, configs: Sequence[InteractionConfig]) -> None:
        self._configs = {config.name: config for config in configs}
        self._made = {name: make_interaction(config) for name, config in self._configs.items()}
        self._loop = LoopThread("simulated users") if configs else None

    def close(self) -> None:
        """Close connections and the loop. Harmless when repeated."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        for made in self._made.values():
            if isinstance(made, ModelInteraction):
                loop.submit(made.close()).result(15.0)
        loop.stop(15.0)

    def open(self, name: str, instance_id: str, kwargs: Mapping[str, Any]) -> UserSession:
        """Return a user for one episode. Raises `EpisodeError` if there is none of that name."""
        if name not in self._configs:
            known = ", ".join(self._configs) or "none"
            raise EpisodeError("env_error", f"interaction_kwargs name {name!r}, and interactions has {known}")
        assert self._loop is not None
        return UserSession(self._loop, self._made[name], self._configs[name], instance_id, dict(kwargs))


class UserSession:
    """A simulated user in one episode."""

    def __init__(
        self, loop: LoopThread, user: Any, config: InteractionConfig, instance_id: str, kwargs: dict[str, Any]
    ) -> None:
        self._loop, self._user, self._config = loop, user, config
        self._id, self._kwargs, self._begun = instance_id, kwargs, False
        self.score = 0.0
        """What it gave so far, by its weight."""

    async def answer(self, messages: Messages) -> tuple[bool, str]:
        """Return whether the conversation is over, and what the user says. Raises `EpisodeError`."""
        if not self._begun:
            self._id = await self._within("start_interaction", self._id, **self._kwargs) or self._id
            self._begun = True
        over, text, score, _ = await self._within("generate_response", self._id, messages, **self._kwargs)
        self._add(score)
        return bool(over), str(text or "")

    async def finish(self) -> None:
        """Add the score of the whole conversation."""
        if self._begun:
            score = await self._within("calculate_score", self._id, **self._kwargs)
            self._add(score)

    def _add(self, score: Any) -> None:
        value = 0.0 if score is None else score
        if not isinstance(value, Real) or not math.isfinite(value):
            problem = (
                f"the simulated user {self._config.name} gave {score!r:.80} as its score, expected a finite number"
            )
            raise EpisodeError("env_error", problem)
        self.score += self._config.score_weight * float(value)

    async def close(self) -> None:
        """Release the episode."""
        if self._begun:
            self._begun = False
            await self._within("finalize_interaction", self._id, **self._kwargs)

    async def _within(self, method: str, *args: Any, **kwargs: Any) -> Any:
        name, timeout = self._config.name, self._config.timeout_s
        call = getattr(self._user, method)
        # What they share with tools: the key `name` of a row says whom to ask, and isn't for the method.
        arguments = {key: value for key, value in kwargs.items() if key != "name"}
        future = self._loop.submit(asyncio.wait_for(call(*args, **arguments), timeout))
        try:
            return await asyncio.wrap_future(future)
        except TimeoutError:
            problem = f"the simulated user {name} took longer than timeout_s = {timeout:g} s in {method}"
            raise EpisodeError("timeout", problem) from None
        except EpisodeError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise EpisodeError("env_error", f"the simulated user {name} raised in {method}: {what}") from error
