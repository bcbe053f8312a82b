"""The check that rewards and tools which run model output have a sandbox that works on this machine."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from roll.configs.catalog.reward_table import REWARDS
from roll.configs.catalog.signatures import signature_in_source
from roll.configs.catalog.tool_table import TOOLS
from roll.configs.errors import Violation
from roll.configs.rules.verifier_rules import verifier_that_executes
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.isolation.sandbox.base import SandboxError, SandboxUnavailable
from roll.isolation.sandbox.open_sandbox import probe_sandbox


def sandboxed_domains(config: RLVRConfig) -> tuple[str, ...]:
    """Return the domains whose reward asks for a sandbox; own functions in files are read, not imported."""
    custom = config.custom_reward_function
    own = f"{custom.path}:{custom.name}" if custom is not None else ""
    return tuple(
        domain
        for domain, reward in config.rewards.items()
        if any(
            (name in REWARDS and REWARDS[name].sandboxed)
            or _takes_sandbox(own if name == "custom" else name)
            or (name.endswith("reasoning_gym") and _has_executing_verifier(config, domain))
            for name in (reward.name, *(part.name for part in reward.parts.values()))
        )
    )


def _has_executing_verifier(config: RLVRConfig, domain: str) -> bool:
    """Return whether a verifier of reasoning-gym executes the responses of a domain; most don't."""
    sections = [config.actor_train.data_args, *([config.validation.data_args] if config.validation else [])]
    tasks = [task for section in sections if section is not None for task in section.procedural]
    return any(
        config.domain_of(task.tag) == domain and verifier_that_executes(task.dataset, task.config) for task in tasks
    )


def _takes_sandbox(path: str) -> bool:
    where, _, name = path.rpartition(":")
    if not where.endswith(".py"):
        return False  # of a module nothing is known before it is imported; the start refuses it
    try:
        tree = ast.parse(Path(where).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return False  # another check says so
    made = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = [node for node in tree.body if isinstance(node, made) and node.name == name]
    return any("sandbox" in signature_in_source(node, skip=2).annotations for node in nodes)


def sandbox_checks(config: RLConfig) -> Iterator[Violation]:
    """Run a small program in the sandbox, if a reward or a tool needs it."""
    users = [f"rewards.{domain}" for domain in sandboxed_domains(config)] if isinstance(config, RLVRConfig) else []
    users += [f"the tool {tool.name}" for tool in config.tools if tool.name in TOOLS and TOOLS[tool.name].sandboxed]
    if not users:
        return
    try:
        probe_sandbox(config.sandbox)
    except (SandboxUnavailable, SandboxError) as error:
        needing = " and ".join(users)
        expected = f"a sandbox that works, because {needing} runs what the model writes. {error}"
        yield Violation("sandbox", expected, "", config.sandbox)
