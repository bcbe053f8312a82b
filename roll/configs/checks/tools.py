"""Tools and simulated users of the user's own exist, and what they need is there; nothing is imported or started."""

from __future__ import annotations

import ast
import importlib.util
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from roll.configs.checks.folders import nearby
from roll.configs.checks.functions import definition, named_checks
from roll.configs.errors import Violation, problem
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.tool_config import McpServer, ToolConfig
from roll.utils.signatures import signature_in_source


def tool_checks(config: RLConfig) -> Iterator[Violation]:
    """Files, packages, programs and folders that tools name."""
    for i, tool in enumerate(config.tools):
        path = f"tools[{i}]"
        if tool.path is not None:
            yield from _own(path, tool, tool.path)
        if tool.mcp is not None:
            yield from _server(f"{path}.mcp", tool.mcp)
        if tool.name == "retrieval" and not Path(folder := str(tool.options.get("folder", ""))).expanduser().is_dir():
            expected = f"a folder that exists, seen from {Path.cwd()}{nearby(Path(folder))}"
            yield Violation(f"{path}.options.folder", expected, "check the path", folder)
        for package in tool.options.get("packages", ()) if tool.name == "python" else ():
            if importlib.util.find_spec(package) is None:
                fix = f"pip install {package}, or leave it out"
                yield Violation(f"{path}.options.packages", "packages that are installed", fix, package)
    for i, user in enumerate(config.interactions if isinstance(config, RLVRConfig) else ()):
        if user.path is not None:
            yield from named_checks(f"interactions[{i}].path", user.path, "class")


def _own(path: str, tool: ToolConfig, value: str) -> Iterator[Violation]:
    missing = list(named_checks(f"{path}.path", value))
    yield from missing
    where, _, name = value.rpartition(":")
    if missing or not where.endswith(".py"):
        return
    node = definition(Path(where).expanduser(), name)
    signature = signature_in_source(node, skip=0)
    # The policy gives a function's other arguments.
    wrong = [(key, said) for key, said in signature.problems(tool.options) if key in tool.options]
    if isinstance(node, ast.ClassDef):
        wrong = list(signature.problems(tool.options))
    for key, said in wrong:
        yield Violation(
            f"{path}.options.{key}", f"an argument of {value}: {said}", f"see {where}", tool.options.get(key)
        )


def _server(path: str, server: McpServer) -> Iterator[Violation]:
    if importlib.util.find_spec("mcp") is None:
        yield problem(path, "MCP servers need the package mcp, which isn't installed", "pip install 'roll-rl[tools]'")
    if server.command:
        words = _words(server.command)
        folder = Path(server.cwd).expanduser() if server.cwd is not None else Path.cwd()
        if not folder.is_dir():
            yield Violation(f"{path}.cwd", "a folder that exists", "check the path", server.cwd)
        elif shutil.which(words[0]) is None and not (folder / words[0]).is_file():
            expected = f"a program that is there: {words[0]!r} is neither on PATH nor in {folder}"
            yield Violation(f"{path}.command", expected, "install it, or give its whole path", list(server.command))
    if server.token_env is not None and not os.environ.get(server.token_env):
        said = f"the environment variable {server.token_env} is not set"
        yield problem(f"{path}.token_env", said, f"export {server.token_env}=...")


def _words(command: Sequence[str]) -> list[str]:
    try:
        return (shlex.split(command[0]) if len(command) == 1 else list(command)) or [""]
    except ValueError:
        return [command[0]]
