"""What agents of `env_type: endpoint` need is there: programs, interpreters, functions, files, packages."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from roll.configs.catalog.reward_table import REWARDS
from roll.configs.checks.folder_checks import nearby
from roll.configs.checks.function_checks import named_checks
from roll.configs.errors import Violation, did_you_mean
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.agents_config import AgentEnv
from roll.isolation.sandbox.base import SandboxError, SandboxUnavailable
from roll.isolation.sandbox.open_sandbox import probe_sandbox

_PACKAGES = ("httptools", "uvicorn")


def agent_checks(config: AgenticConfig) -> Iterator[Violation]:
    """Everything but whether a function of a package can be imported, which another interpreter may have to say."""
    agents = {tag: env.agent for tag, env in config.custom_envs.items() if env.agent is not None}
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    for tag, agent in agents.items():
        path = f"custom_envs.{tag}"
        if missing:
            expected = f"the packages of the extra `serve`; {' and '.join(missing)} can't be found"
            yield Violation(f"{path}.env_type", expected, "pip install 'roll-rl[serve]'", "endpoint")
        yield from _agent(f"{path}.env_config", agent)
    variable = config.gateway.token_env
    if variable is not None and not os.environ.get(variable, "").strip():
        yield Violation("gateway.token_env", "an environment variable that is set", f"export {variable}=...", variable)


def _agent(path: str, agent: AgentEnv) -> Iterator[Violation]:
    folder = Path(agent.cwd or ".").expanduser()
    if not folder.is_dir():
        yield Violation(f"{path}.cwd", f"a folder that exists, seen from {Path.cwd()}{nearby(folder)}", "", agent.cwd)
        return
    if agent.python is not None and not _is_program(agent.python, Path()):
        expected = f"an interpreter that exists, seen from {Path.cwd()}{nearby(Path(agent.python))}"
        yield Violation(f"{path}.python", expected, "check the path", agent.python)
    if agent.tasks is not None and not Path(agent.tasks).expanduser().is_file():
        expected = f"a file that exists, seen from {Path.cwd()}{nearby(Path(agent.tasks))}"
        yield Violation(f"{path}.tasks", expected, "check the path", agent.tasks)
    if agent.command is not None:
        yield from _command(path, agent, folder)
    if agent.sandbox:
        yield from _sandbox(path, agent)
    if agent.agent is not None:
        yield from _function(f"{path}.agent", agent, folder)
    if agent.reward is not None:
        yield from _reward(f"{path}.reward.name", agent.reward.name)
    for name, model in agent.models.items():
        if model.api_key_env is not None and not os.environ.get(model.api_key_env, "").strip():
            key = f"{path}.models.{name}.api_key_env"
            yield Violation(
                key, "an environment variable that is set", f"export {model.api_key_env}=...", model.api_key_env
            )
    for variable in agent.pass_env:
        if variable not in os.environ:
            yield Violation(f"{path}.pass_env", "variables that are set", f"export {variable}=...", variable)


def _command(path: str, agent: AgentEnv, folder: Path) -> Iterator[Violation]:
    try:
        words = shlex.split(agent.command) if isinstance(agent.command, str) else list(agent.command or ())
    except ValueError:
        return  # the rules say so
    if not words or not words[0]:
        yield Violation(f"{path}.command", "a program", "python my_agent.py", agent.command)
        return
    is_python = words[0] in ("python", "python3")
    if not is_python and not _is_program(words[0], folder):
        expected = f"a program that exists; there is no {words[0]!r} on the PATH, nor in {folder.resolve()}"
        yield Violation(f"{path}.command", expected, "check the path, and that it may be executed", words[0])
    script = next((word for word in words[1:2] if is_python and word.endswith(".py")), None)
    if script is not None and not (folder / Path(script).expanduser()).is_file():
        expected = f"a script that exists, seen from {folder.resolve()}{nearby(folder / script)}"
        yield Violation(f"{path}.command", expected, "check the path, or set cwd", script)
    if agent.python is not None and not is_python:
        expected = "null: the command doesn't begin with python"
        yield Violation(f"{path}.python", expected, "remove it", agent.python)


def _reward(key: str, name: str) -> Iterator[Violation]:
    if ":" in name:
        yield from named_checks(key, name)
    elif name not in REWARDS:
        fix = did_you_mean(name, REWARDS) or "math_rule, or path/to/file.py:function"
        yield Violation(key, "the name of a reward, or the path of a function of yours", fix, name)


def _sandbox(path: str, agent: AgentEnv) -> Iterator[Violation]:
    try:
        probe_sandbox("sandlock")
    except (SandboxUnavailable, SandboxError) as error:
        yield Violation(f"{path}.sandbox", f"a sandbox that works; {error}", "remove it", True)
    for named in agent.sandbox_readable:
        if not Path(named).expanduser().exists():
            expected = f"folders and files that exist, seen from {Path.cwd()}{nearby(Path(named))}"
            yield Violation(f"{path}.sandbox_readable", expected, "check the path", named)


def _function(key: str, agent: AgentEnv, folder: Path) -> Iterator[Violation]:
    where, _, name = (agent.agent or "").rpartition(":")
    if where.endswith(".py"):
        yield from named_checks(key, f"{folder / Path(where).expanduser()}:{name}" if agent.cwd else agent.agent or "")
    elif not where or not name or agent.python is None:
        yield from named_checks(key, agent.agent or "")


def _is_program(word: str, folder: Path) -> bool:
    if os.sep in word:
        file = folder / Path(word).expanduser()
        return file.is_file() and os.access(file, os.X_OK)
    return shutil.which(word) is not None
