"""Three ways to have an agent play an episode: a program, a function that stays loaded, somebody who asks for work."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from roll.configs.schema.agents_config import AgentEnv
from roll.gateway.agents.logs import AgentLog
from roll.gateway.agents.pool import AgentFunctions
from roll.gateway.agents.process import AgentProcess
from roll.processes.limits import passed_environment

MODEL = "policy"
"""What agents are told as the model's name."""
_PYTHONS = ("python", "python3")
_LONGEST_TASK = 100_000
"""Bytes of a task in an environment variable; the system takes little more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One episode, as an agent is told of it."""

    episode: str
    task: Mapping[str, Any]
    base_url: str
    """Ends in `/v1`."""
    api_key: str
    timeout_s: float

    @property
    def environment(self) -> dict[str, str]:
        """Variables that tell an agent where the policy is; raises `ValueError` for a task that is too long."""
        task = json.dumps(self.task)
        if len(task) > _LONGEST_TASK:
            raise ValueError(
                f"the task has {len(task)} characters, and an environment variable takes {_LONGEST_TASK}: put what is "
                "large into a file and its name into the task"
            )
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            "ROLL_BASE_URL": self.base_url,
            "ROLL_API_KEY": self.api_key,
            "ROLL_MODEL": MODEL,
            "ROLL_EPISODE": self.episode,
            "ROLL_TIMEOUT_S": f"{self.timeout_s:g}",
            "ROLL_TASK": task,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an agent ended by itself."""

    how: str
    """For messages: `exit code 3`."""
    code: int | None = 0
    """Exit code; None: by a signal."""
    value: Any = None
    """What a function returned."""


class Runner(Protocol):
    """Has one agent play one episode."""

    async def run(self, order: Order, log: AgentLog) -> Outcome:
        """Return when the agent has ended. When cancelled, what it had started is gone.

        Raises:
            AgentNotStarted: it can't be run at all.
            AgentFailed: a function raised, or its process ended.
        """

    async def close(self) -> None:
        """End what is kept running between episodes."""


class CommandRunner:
    """A program per episode."""

    def __init__(self, env: AgentEnv) -> None:
        self._words = command_words(env)
        self._environment, self._cwd = agent_environment(env), env.cwd

    async def run(self, order: Order, log: AgentLog) -> Outcome:
        environment = {**self._environment, **order.environment}
        process = await AgentProcess.start(self._words, environment=environment, cwd=self._cwd, log=log)
        try:
            ended = await process.wait()
        finally:
            await process.kill()
        return Outcome(how=ended.text, code=ended.code)

    async def close(self) -> None:
        """Nothing is kept."""


class FunctionRunner:
    """A function of the user's, kept loaded."""

    def __init__(self, env: AgentEnv) -> None:
        assert env.agent is not None
        self._functions = AgentFunctions(
            env.agent, python=env.python or sys.executable, environment=agent_environment(env), cwd=env.cwd
        )

    async def run(self, order: Order, log: AgentLog) -> Outcome:
        request = {
            "task": order.task,
            "base_url": order.base_url,
            "api_key": order.api_key,
            "environment": order.environment,
        }
        return Outcome(how="its function returned", value=await self._functions.play(request, log))

    async def close(self) -> None:
        await self._functions.close()


def command_words(env: AgentEnv) -> Sequence[str]:
    """Return the program and its arguments; `python` is the interpreter that the section names, or the run's."""
    assert env.command is not None
    words = shlex.split(env.command) if isinstance(env.command, str) else list(env.command)
    if words and words[0] in _PYTHONS:
        words[0] = env.python or sys.executable
    return words


def agent_environment(env: AgentEnv) -> dict[str, str]:
    """Return the variables that an agent gets in every episode: none of the run's that sound like a secret."""
    found = passed_environment(os.environ, env.pass_env)
    if env.python is not None:  # whose packages are its own
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            found.pop(name, None)
        folder = str(Path(env.python).expanduser().parent)
        found["PATH"] = os.pathsep.join([folder, found.get("PATH", os.defpath)])
    local = "127.0.0.1,localhost,::1"
    return {**found, "PYTHONUNBUFFERED": "1", "NO_PROXY": local, "no_proxy": local, **env.env}
