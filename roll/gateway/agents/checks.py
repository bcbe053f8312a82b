"""Whether functions of agents can be imported, under their own interpreters; for `roll check` and before a run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from roll.configs.errors import Violation, problem
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.agents_config import AgentEnv
from roll.configs.schema.run_config import RunConfig
from roll.gateway.agents.pool import WORKER
from roll.gateway.agents.runners import agent_environment

_SECONDS = 120.0


def agent_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield where a function that plays can't be imported. With `prepare`, which may make what they
    read, they aren't imported."""
    if not isinstance(config, AgenticConfig) or config.prepare is not None or config.replays:
        return
    for tag, env in config.custom_envs.items():
        if env.agent is not None and env.agent.agent is not None and (reason := why_not_loaded(env.agent)):
            yield problem(f"custom_envs.{tag}.env_config.agent", reason, "mend it, or give `python` with its packages")


def why_not_loaded(env: AgentEnv) -> str:
    """Load the function in a process of its own; return why that fails, or an empty text."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [env.python or sys.executable, WORKER, str(theirs.fileno()), str(env.agent)]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=agent_environment(env),
                cwd=env.cwd,
                start_new_session=True,
            )
        except OSError as error:
            return f"{command[0]} can't be started in {env.cwd or Path.cwd()}: {error}"
        theirs.close()
        ours.settimeout(_SECONDS)
        try:
            with ours.makefile("rb") as lines:
                line = lines.readline()
        except TimeoutError:
            return f"it took over {_SECONDS:g} s to load"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not line:
        return f"its process ended with code {process.returncode} while it was imported"
    failed = str(json.loads(line).get("failed", ""))
    return f"it can't be imported: {failed.strip().splitlines()[-1]}" if failed else ""
