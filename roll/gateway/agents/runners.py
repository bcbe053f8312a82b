"""Three ways to have an agent play an episode: a program, a function that stays loaded, somebody who asks for work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from roll.configs.schema.agents_config import AgentEnv
from roll.gateway.agents.logs import AgentLog
from roll.gateway.agents.pool import AgentFunctions
from roll.gateway.agents.process import AgentProcess
from roll.isolation.processes.limits import passed_environment
from roll.isolation.sandbox.public_files import public_parts

MODEL = "policy"
"""What agents are told as the model's name."""
_PYTHONS = ("python", "python3")
_CONFINED = str(Path(__file__).with_name("confined.py"))
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc")
_KERNELS = ("/proc", "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_MAX_PROCESSES = 256
_REMOVING_S = 60.0
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
        """Return variables that tell an agent where the policy is; raises `ValueError` for a task that is too long."""
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
class AgentOutcome:
    """How an agent ended by itself."""

    how: str
    """For messages: `exit code 3`."""
    code: int | None = 0
    """Exit code; None: by a signal."""
    value: Any = None
    """What a function returned."""


class Runner(Protocol):
    """Has one agent play one episode."""

    async def run(self, order: Order, log: AgentLog) -> AgentOutcome:
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
        self._policy = sandbox_policy(env, self._words) if env.sandbox else None

    async def run(self, order: Order, log: AgentLog) -> AgentOutcome:
        if self._policy is None:
            return await self._ended(self._words, order, log)
        folder = tempfile.mkdtemp(prefix="roll-agent-")
        try:
            return await self._ended(confined_words(self._words, self._policy, order, folder), order, log)
        finally:  # by the run, for the agent may be killed with all that is around it
            await asyncio.shield(asyncio.to_thread(_remove, folder))

    async def _ended(self, words: Sequence[str], order: Order, log: AgentLog) -> AgentOutcome:
        environment = {**self._environment, **order.environment}
        process = await AgentProcess.start(words, environment=environment, cwd=self._cwd, log=log)
        try:
            ended = await process.wait()
        finally:
            await process.kill()
        return AgentOutcome(how=ended.text, code=ended.code)

    async def close(self) -> None:
        """Keep nothing, so close nothing."""


class FunctionRunner:
    """A function of the user's, kept loaded."""

    def __init__(self, env: AgentEnv) -> None:
        assert env.agent is not None
        self._functions = AgentFunctions(
            env.agent, python=env.python or sys.executable, environment=agent_environment(env), cwd=env.cwd
        )

    async def run(self, order: Order, log: AgentLog) -> AgentOutcome:
        request = {
            "task": order.task,
            "base_url": order.base_url,
            "api_key": order.api_key,
            "environment": order.environment,
        }
        return AgentOutcome(how="its function returned", value=await self._functions.play(request, log))

    async def close(self) -> None:
        await self._functions.close()


def command_words(env: AgentEnv) -> Sequence[str]:
    """Return the program and its arguments; `python` is the interpreter that the section names, or the run's."""
    assert env.command is not None
    words = shlex.split(env.command) if isinstance(env.command, str) else list(env.command)
    if words and words[0] in _PYTHONS:
        words[0] = env.python or sys.executable
    return words


def readable_paths(env: AgentEnv, words: Sequence[str]) -> list[str]:
    """Return what a program in the sandbox may read: the system, its interpreter, script, `cwd`, what is named."""
    folder = Path(env.cwd or ".").expanduser()
    program = shutil.which(words[0]) or words[0]
    # Of the system's, what every user may read: a run of root's would show the program root's secrets.
    system = [part for path in _SYSTEM for part in public_parts(path)]
    paths: list[str | Path] = [*system, *_KERNELS, program, folder]
    paths += [Path(path).expanduser() for path in env.sandbox_readable]
    if words[0] in (env.python, sys.executable):  # an environment, and the installation that it was made of
        paths += [Path(words[0]).parents[1], Path(words[0]).resolve().parents[1]]
    paths += [folder / word for word in words[1:2] if word.endswith(".py")]
    absolute = [Path(path).absolute() for path in paths]
    return list(
        dict.fromkeys(str(path) for path in [*absolute, *(path.resolve() for path in absolute)] if path.exists())
    )


def sandbox_policy(env: AgentEnv, words: Sequence[str]) -> dict[str, Any]:
    """Return what every episode's sandbox allows, in the words of `confined.py`."""
    readable = readable_paths(env, words)
    if len(json.dumps(readable)) > _LONGEST_TASK:
        raise ValueError(
            f"sandbox: the system has files that not every user may read between {len(readable)} others, which is more "
            "than a sandbox can be told; make them readable, or move them out of /usr and /etc"
        )
    return {
        "fs_readable": readable,
        "max_processes": _MAX_PROCESSES,
        "max_memory": env.sandbox_memory_mb << 20,
        "disk": env.sandbox_disk_mb << 20,
        "cwd": str(Path(env.cwd or ".").expanduser().absolute()),
    }


def confined_words(words: Sequence[str], policy: Mapping[str, Any], order: Order, folder: str) -> list[str]:
    """Return what starts a program in the sandbox, for one episode; `folder` is the episode's."""
    address = urlsplit(order.base_url)
    port = address.port or (443 if address.scheme == "https" else 80)
    policy = {**policy, "folder": folder, "net_allow": [f"{address.hostname}:{port}"]}
    return [sys.executable, _CONFINED, json.dumps(policy), *words]


def _remove(folder: str) -> None:
    """Remove a folder whatever an agent has made of it: folders that it can't read, a thousand within each other."""
    run = partial(subprocess.run, check=False, capture_output=True, timeout=_REMOVING_S)
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        if run(["rm", "-rf", "--", folder]).returncode:
            run(["chmod", "-R", "u+rwX", "--", folder])
            run(["rm", "-rf", "--", folder])


def agent_environment(env: AgentEnv) -> dict[str, str]:
    """Return the variables that an agent gets in every episode: none of the run's that sound like a secret."""
    environment = passed_environment(os.environ, env.pass_env)
    if env.python is not None:  # whose packages are its own
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            environment.pop(name, None)
        folder = str(Path(env.python).expanduser().parent)
        environment["PATH"] = os.pathsep.join([folder, environment.get("PATH", os.defpath)])
    local = "127.0.0.1,localhost,::1"
    return {**environment, "PYTHONUNBUFFERED": "1", "NO_PROXY": local, "no_proxy": local, **env.env}
