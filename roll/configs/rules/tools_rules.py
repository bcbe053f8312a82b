"""Rules about tools and simulated users: each by itself, and who may use them. Each yields what is wrong."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from roll.configs.catalog.entries import OWN_PATH
from roll.configs.catalog.tool_table import TOOL_PARSERS, TOOLS
from roll.configs.errors import NO_VALUE, Violation, did_you_mean, nearest, no_effect, problem
from roll.configs.rules.endpoint_rules import endpoint_rules
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.tool_config import InteractionConfig, McpServer, ToolConfig
from roll.utils.importing import suggested_path

_NAME = re.compile(r"[A-Za-z_][\w-]{0,63}")


def tool_rules(config: RLConfig) -> Iterator[Violation]:
    """Check every tool by itself, and how they are called."""
    yield from _twice("tools", [tool.name for tool in config.tools])
    for i, tool in enumerate(config.tools):
        yield from _tool(f"tools[{i}]", tool, config)
    use = config.tool_use
    yield from parser_rule("tool_use.parser", use.parser)
    tags = use.thinking_tags
    if tags is not None and (not all(tags) or tags[0] == tags[1]):
        expected = "two different texts that aren't empty"
        yield Violation("tool_use.thinking_tags", expected, '["<think>", "</think>"]', list(tags))


def parser_rule(path: str, parser: str) -> Iterator[Violation]:
    """Check that the form of tool calls is a known one."""
    if parser != "auto" and parser not in TOOL_PARSERS and not OWN_PATH.match(parser):
        known = ("auto", *TOOL_PARSERS)
        expected = f"one of {', '.join(known)}; or your own as package.module:function or file.py:function"
        yield Violation(path, expected, nearest(parser, known), parser)


def _twice(path: str, names: Sequence[str]) -> Iterator[Violation]:
    for name, count in Counter(names).items():
        if count > 1:
            yield problem(path, f"{count} entries are called {name!r}", "rename one")


def _tool(path: str, tool: ToolConfig, config: RLConfig) -> Iterator[Violation]:
    if not _NAME.fullmatch(tool.name):
        expected = "a name of at most 64 letters, digits, _ and -, which begins with a letter"
        yield Violation(f"{path}.name", expected, "rename it", tool.name)
    built_in = tool.name in TOOLS
    if built_in and (tool.path is not None or tool.mcp is not None):
        key = "path" if tool.path is not None else "mcp"
        yield problem(f"{path}.{key}", f"{tool.name} is the name of a built-in tool", "give yours another name")
    elif tool.path is not None and tool.mcp is not None:
        yield problem(f"{path}.mcp", "a tool is at a path or on an MCP server", "remove one of path and mcp")
    elif not built_in and tool.path is None and tool.mcp is None:
        expected = f"a path or mcp: {tool.name!r} isn't built in ({', '.join(TOOLS)})"
        fix = did_you_mean(tool.name, TOOLS) or f"path: my_tools.py:{tool.name}"
        yield Violation(f"{path}.name", expected, fix, tool.name)
    if tool.path is not None and not OWN_PATH.match(tool.path):
        expected = "a function or class as package.module:name or path/to/file.py:name"
        yield Violation(f"{path}.path", expected, suggested_path(tool.path), tool.path)
    if tool.mcp is not None:
        for key in ("description", "parameters", "options"):
            if getattr(tool, key):
                yield no_effect(f"{path}.{key}", " with mcp: the server says what its tools are")
        yield from _server(f"{path}.mcp", tool.mcp)
    if built_in and tool.parameters is not None:
        yield no_effect(f"{path}.parameters", f": {tool.name} is built in and has its own")
    if tool.name == "retrieval" and built_in and not tool.options.get("folder"):
        yield Violation(f"{path}.options.folder", "the folder of the texts", "options: {folder: texts}", NO_VALUE)
    remote = config.sandbox.startswith(("http://", "https://"))
    if tool.name == "python" and remote and (tool.options.get("session") or tool.options.get("packages")):
        key = "session" if tool.options.get("session") else "packages"
        yield no_effect(f"{path}.options.{key}", " with a sandbox server, whose programs run alone", "remove it")


def _server(path: str, server: McpServer) -> Iterator[Violation]:
    if bool(server.command) == (server.url is not None):
        expected = "one of command and url"
        yield Violation(f"{path}.command", expected, f'{path}.command="python server.py"', list(server.command))
        return
    unused = ("env", "pass_env", "cwd") if server.url is not None else ("token_env",)
    for key in unused:
        if getattr(server, key):
            yield no_effect(f"{path}.{key}", f" with {'url' if server.url is not None else 'command'}")
    if server.url is not None and not re.match(r"https?://[^\s/]+", server.url):
        yield Violation(f"{path}.url", "an address, http(s)://host:port/mcp", "", server.url)


def domain_rules(config: RLVRConfig) -> Iterator[Violation]:
    """Check which domains use which tools and simulated users."""
    known, users = [tool.name for tool in config.tools], [user.name for user in config.interactions]
    yield from _twice("interactions", users)
    for i, user in enumerate(config.interactions):
        yield from _interaction(f"interactions[{i}]", user)
    named: set[str] = set()
    for domain, reward in config.rewards.items():
        path = f"rewards.{domain}"
        named |= set(reward.tools)
        yield from _known(f"{path}.tools", reward.tools, known, "tools")
        if reward.interaction is not None:
            yield from _known(f"{path}.interaction", (reward.interaction,), users, "interactions")
        if not reward.tools and reward.interaction is None:
            continue
        key = "tools" if reward.tools else "interaction"
        if reward.rollout is not None:
            yield no_effect(
                f"{path}.{key}", f": {reward.rollout} plays this domain's episodes", "remove one of the two"
            )
        yield from _templates(config, domain, f"{path}.{key}")
    yield from _unused(config, named, "rewards.<domain>.tools")


def _templates(config: RLVRConfig, domain: str, path: str) -> Iterator[Violation]:
    """Check for the tokenizer's own chat template, which several turns need."""
    templates = {"global_template": config.global_template}
    templates |= {f"tag_to_template.{tag}": config.tag_to_template.get(tag) for tag in config.tags_of(domain)}
    if config.global_template is None:
        templates["actor_train.data_args.template"] = config.actor_train.data_args.template
    for key, template in templates.items():
        if template not in (None, "native"):
            expected = f"native, because {path} makes conversations of this domain's prompts"
            yield Violation(key, expected, f"{key}=native", template)


def _interaction(path: str, user: InteractionConfig) -> Iterator[Violation]:
    if (user.path is None) == (user.endpoint is None):
        fix = f"{path}.path=users.py:MyUser, or {path}.endpoint=http://localhost:8000/v1"
        yield Violation(f"{path}.path", "one of path and endpoint", fix, user.path)
        return
    if user.path is not None:
        if not OWN_PATH.match(user.path):
            expected = "a class as package.module:Class or path/to/file.py:Class"
            yield Violation(f"{path}.path", expected, suggested_path(user.path), user.path)
        for key in ("model", "api_key_env", "request_args"):
            if getattr(user, key):
                yield no_effect(f"{path}.{key}", " without endpoint")
        return
    assert user.endpoint is not None
    if user.config:
        yield no_effect(f"{path}.config", " without path")
    yield from endpoint_rules(path, user.endpoint, user.model, user.api_key_env)


def env_tool_rules(config: AgenticConfig) -> Iterator[Violation]:
    """Check which environments use which tools."""
    known = [tool.name for tool in config.tools]
    for tag, env in config.custom_envs.items():
        path = f"custom_envs.{tag}.tools"
        yield from _known(path, env.tools, known, "tools")
        if env.tools and config.sample_unit != "trajectory":
            why = (
                f" with sample_unit {config.sample_unit}: what tools answer belongs to the context of the whole episode"
            )
            yield no_effect(path, why, "sample_unit=trajectory")
    yield from _unused(
        config, {name for env in config.custom_envs.values() for name in env.tools}, "custom_envs.<tag>.tools"
    )


def _known(path: str, names: Sequence[str], known: Sequence[str], section: str) -> Iterator[Violation]:
    for name in names:
        if name not in known:
            expected = f"names in {section}, which has {', '.join(known) or 'none'}"
            yield Violation(path, expected, nearest(name, known) or f"add it to {section}", name)


def _unused(config: RLConfig, named: set[str], key: str) -> Iterator[Violation]:
    for i, tool in enumerate(config.tools):
        if tool.name not in named:
            yield no_effect(f"tools[{i}]", f": {key} names {tool.name} nowhere", f"{key}: [{tool.name}], or remove it")
