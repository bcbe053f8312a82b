"""The endpoint of one run: its server, which starts with the first episode, and the agents that it has going."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.configs.schema.agents_config import AgentEnv, GatewayConfig
from roll.gateway.agents.remote_agents import NoModel, RemoteRunner, WorkQueue
from roll.gateway.agents.runners import CommandRunner, FunctionRunner, Runner
from roll.gateway.bodies import GatewayLimits
from roll.gateway.proxied import ProxiedModel
from roll.gateway.registry import new_key
from roll.gateway.server import Gateway
from roll.rollout.engine_driver import EngineDriver

FILE = "agents.json"
"""Where remote agents find the run, below its `output_dir`."""


class RunEndpoint:
    """Serves the episodes of training and validation. All methods but the constructor belong to the engines' event
    loop.

    Args:
        agents: by tag.
        folder: of the run, where `agents.json` tells remote agents how to reach it.
        engines: on whose event loop it lives.
    """

    def __init__(
        self, config: GatewayConfig, agents: Mapping[str, AgentEnv], folder: Path, engines: EngineDriver
    ) -> None:
        self._config = config
        limits = GatewayLimits(call_seconds=config.call_timeout_s, body_bytes=int(config.max_body_mb * 2**20))
        self._gateway = Gateway(config.host, config.port, limits)
        self._folder = folder
        self._queue = WorkQueue(engines)
        self.runners: dict[str, Runner] = {tag: self._runner(tag, env) for tag, env in agents.items()}
        """Who has agents play the episodes of a tag."""
        self.models = {tag: _frozen_models(env) for tag, env in agents.items()}
        """Models besides the policy that the agents of a tag may ask, by name."""
        self._has_remote = any(env.remote for env in agents.values())
        self._starting = asyncio.Lock()
        self._started = False

    def _runner(self, tag: str, env: AgentEnv) -> Runner:
        if env.remote:
            return RemoteRunner(tag, self._queue)
        return FunctionRunner(env) if env.agent is not None else CommandRunner(env)

    async def started(self) -> Gateway:
        """Return the server, which listens from the first call on.

        Raises:
            MissingPackage: the extra `serve` isn't installed.
            OSError: the port is taken.
        """
        async with self._starting:
            if not self._started:
                await self._gateway.start()
                self._started = True
                if self._has_remote:
                    self._give_out_work()
        return self._gateway

    def address_of(self, base_url: str) -> str:
        """Return an address of the server as agents are told it."""
        public = self._config.address
        return base_url if public is None else public.rstrip("/") + base_url.removeprefix(self._gateway.address)

    def _give_out_work(self) -> None:
        variable = self._config.token_env
        token = new_key() if variable is None else os.environ.get(variable, "").strip()
        if not token:
            raise ValueError(f"gateway.token_env: the environment variable {variable} isn't set")
        url = self._gateway.open(NoModel(), token, handlers={"work": self._queue.work}, root=True)
        access: dict[str, Any] = {"url": self.address_of(url)}
        if variable is None:
            access["token"] = token
        file = self._folder / FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump(access, stream)

    async def stop(self) -> None:
        """End the agents and the server. A second call does nothing."""
        models = [model for of in self.models.values() for model in of.values()]
        await asyncio.gather(*(runner.close() for runner in self.runners.values()), *(one.close() for one in models))
        if self._started:
            await self._gateway.stop()
            if self._has_remote:
                (self._folder / FILE).unlink(missing_ok=True)  # it leads nowhere now


def _frozen_models(env: AgentEnv) -> dict[str, ProxiedModel]:
    return {
        name: ProxiedModel(
            name, model.base_url, model.model or name, key=os.environ.get(model.api_key_env or "", "").strip()
        )
        for name, model in env.models.items()
    }
