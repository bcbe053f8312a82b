"""Tools and simulated users of the user's own exist, and what they need is there; nothing is imported or started."""

from __future__ import annotations

import ast
import importlib.util
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.configs.catalog.signatures import signature_in_source
from roll.configs.checks.folder_checks import nearby
from roll.configs.checks.function_checks import definition, named_checks
from roll.configs.errors import NO_VALUE, Violation, problem
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.tool_config import McpServer, ToolConfig


def tool_checks(config: RLConfig) -> Iterator[Violation]:
    """Files, packages, programs and folders that tools name."""
    for i, tool in enumerate(config.tools):
        path = f"tools[{i}]"
        if tool.path is not None:
            yield from _own(path, tool, tool.path)
        if tool.mcp is not None:
            yield from _server(f"{path}.mcp", tool.mcp)
        if tool.parameters is not None:
            yield from _schema(f"{path}.parameters", tool.parameters)
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
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and tool.parameters is None:
        yield from _described(path, tool, node)
    signature = signature_in_source(node, skip=0)
    # The policy gives a function's other arguments.
    wrong = [(key, why) for key, why in signature.problems(tool.options) if key in tool.options]
    if isinstance(node, ast.ClassDef):
        wrong = list(signature.problems(tool.options))
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        described = (tool.parameters or {}).get("properties", {})
        pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        needed = [one.arg for one, default in pairs if default is None]
        absent = [name for name in needed if name not in tool.options and name not in described]
        wrong += [(name, "it has no default, and the policy doesn't give keyword-only arguments") for name in absent]
    for key, why in wrong:
        yield Violation(
            f"{path}.options.{key}", f"an argument of {value}: {why}", f"see {where}", tool.options.get(key, NO_VALUE)
        )


def _described(path: str, tool: ToolConfig, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Violation]:
    """Check that the function describes itself: a docstring, and a type for each argument that isn't an option."""
    if node.decorator_list:
        return  # who knows what it becomes
    fix = "write it, or `parameters`, a JSON schema"
    if not ast.get_docstring(node):
        yield Violation(f"{path}.path", f"a docstring of {node.name}: it is what the policy is told", fix, tool.path)
        return
    arguments = [*node.args.posonlyargs, *node.args.args]
    bare = [arg.arg for arg in arguments if arg.annotation is None and arg.arg not in tool.options]
    if bare:
        expected = f"a type hint for {', '.join(bare)} of {node.name}: the policy is told it"
        yield Violation(f"{path}.path", expected, fix, tool.path)


def _schema(path: str, parameters: Mapping[str, Any]) -> Iterator[Violation]:
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for

    if parameters.get("type", "object") != "object":
        yield Violation(f"{path}.type", "object: arguments have names", "type: object", parameters["type"])
        return
    try:
        validator_for(parameters, default=Draft202012Validator).check_schema(dict(parameters))
    except SchemaError as error:
        where = ".".join([path, *map(str, error.absolute_path)])
        types = "; types are string, integer, number, boolean, array, object and null"
        expected = f"what a JSON schema has there{types if where.endswith('.type') else ''}"
        yield Violation(where, expected, "mend the schema", error.instance)


def _missing_script(words: Sequence[str], folder: Path) -> str:
    """Return the script that Python is to run and that isn't there, or nothing."""
    is_script = Path(words[0]).name.startswith("python") and words[1:2] and words[1].endswith(".py")
    return words[1] if is_script and not (folder / Path(words[1]).expanduser()).is_file() else ""


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
        elif script := _missing_script(words, folder):
            expected = f"a script that exists, seen from {folder.resolve()}{nearby(folder / script)}"
            yield Violation(f"{path}.command", expected, "check the path, or set cwd", script)
    if server.token_env is not None and not os.environ.get(server.token_env):
        message = f"the environment variable {server.token_env} is not set"
        yield problem(f"{path}.token_env", message, f"export {server.token_env}=...")


def _words(command: Sequence[str]) -> list[str]:
    try:
        return (shlex.split(command[0]) if len(command) == 1 else list(command)) or [""]
    except ValueError:
        return [command[0]]
