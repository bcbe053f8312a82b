"""`roll envs list` and `roll envs test`."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll.catalog.envs import ENVS
from roll.cli.key_values import from_yaml, key_values
from roll.configs.errors import ConfigError
from roll.configs.parsing.build_config import build
from roll.configs.schema.env_config import CustomEnv
from roll.envs.base import Env
from roll.envs.baselines import random_score, scripted_score
from roll.envs.conformance import Finding, blame, check_env
from roll.envs.env_registry import EnvLoadError, bare_env, load_env
from roll.envs.wrappers import EnvSpec

MARKS = {
    "ok": ("ok", "green"),
    "info": ("note", "cyan"),
    "warning": ("warning", "yellow"),
    "error": ("ERROR", "bold red"),
}
"""Word and style of each level of a finding."""


def list_envs(options: argparse.Namespace) -> int:  # noqa: ARG001 - every command takes them
    """A table of the bundled environments."""
    table = Table("id", "what", "arguments")
    for env_type in ENVS:
        env_class = load_env(env_type)
        parameters = inspect.signature(env_class).parameters.values()
        what = (env_class.__doc__ or "").split("\n")[0]
        table.add_row(env_type, what, ", ".join(_argument(parameter) for parameter in parameters))
    Console(highlight=False).print(table)
    return 0


def test_env(options: argparse.Namespace) -> int:
    """Tables of findings and scores; status 1 if something is wrong."""
    console = Console(highlight=False)
    for name in ("seeds", "episodes", "steps"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name}: got {getattr(options, name)}, expected at least 1")
    spec = _spec(options.env, options.config, options.arguments)
    make = functools.partial(bare_env, spec)
    try:
        make().close()
    except EnvLoadError as error:
        where = blame(error) if error.__cause__ is not None else ""
        said = str(error).removeprefix(f"custom_envs.{spec.tag}.")
        raise ValueError(f"{said}\n  at {where}" if where else said) from error
    except (Exception, SystemExit) as error:
        said = f"{options.env} can't be made: {type(error).__name__}: {error}"
        raise ValueError(f"{said}\n  at {blame(error)}") from error
    findings = check_env(make, seeds=range(options.seeds), max_steps=options.steps)
    console.print(_findings_table(spec, findings))
    wrong = sum(finding.level == "error" for finding in findings)
    if wrong:
        console.print(f"{wrong} error(s): see docs/environments.md", style="bold red")
        return 1
    console.print(_scores_table(make, options.episodes, options.steps))
    return 0


def _spec(env: str, config: Path | None, arguments: Sequence[str]) -> EnvSpec:
    env_type, env_config = env, {}
    if config is not None:
        if not config.is_file():
            raise ValueError(f"--config: there is no file {str(config)!r}")
        content = from_yaml(config.read_text("utf-8"), f"--config: {config}") or {}
        if not isinstance(content, dict):
            raise ValueError(f"--config: {config} holds {type(content).__name__}, expected keys and values")
        sections = content.get("custom_envs")
        if sections is None:
            env_config = content
        else:
            env_type, env_config = _section(sections, env, config)
    env_config.update(key_values(arguments, "e.g. size=5"))
    return EnvSpec(tag=Path(env).stem if ".py" in env else env, env_type=env_type, env_config=env_config)


def _section(sections: Any, tag: str, file: Path) -> tuple[str, dict[str, Any]]:
    """Return the id and the arguments that `custom_envs` of a file has for a tag."""
    if not isinstance(sections, dict):
        raise ValueError(f"--config: custom_envs in {file} is {sections!r}, expected keys and values")
    if tag not in sections:
        raise ValueError(f"--config: custom_envs in {file} has no tag {tag!r}; it has {', '.join(map(str, sections))}")
    section, violations = build(CustomEnv, sections[tag], f"custom_envs.{tag}")
    if section is None:
        raise ConfigError(violations, str(file))
    if section.agent is not None:
        raise ValueError(f"--config: custom_envs.{tag} in {file} is an agent, and no environment that could be tested")
    assert isinstance(section.env_config, dict)
    return section.env_type, dict(section.env_config)


def _argument(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return f"{parameter.name} (needed)"
    default = f"{parameter.default:.4g}" if isinstance(parameter.default, float) else repr(parameter.default)
    return f"{parameter.name}={default}"


def _findings_table(spec: EnvSpec, findings: Sequence[Finding]) -> Table:
    given = " ".join(f"{key}={value!r}" for key, value in spec.env_config.items())
    table = Table("check", "result", "what was found", title=f"{spec.env_type} {given}".strip(), title_justify="left")
    for finding in findings:
        word, style = MARKS[finding.level]
        said = Text(finding.message)
        if finding.where:
            said.append(f"\n{finding.where}", style="dim")
        table.add_row(finding.check, Text(word, style=style), said)
    return table


def _scores_table(make: functools.partial[Env], episodes: int, steps: int) -> Table:
    table = Table("agent", "episodes", "success", "mean return", "mean steps", "steps/s")
    for score in (random_score(make, range(episodes), steps), scripted_score(make, range(episodes), max(steps, 1000))):
        if score is not None:
            table.add_row(
                score.agent,
                str(score.episodes) + (f" ({score.unplayed} without)" if score.unplayed else ""),
                f"{score.success_rate:.1%}",
                f"{score.mean_return:.3g}",
                f"{score.mean_steps:.1f}",
                f"{1 / score.seconds_per_step if score.seconds_per_step else 0.0:,.0f}",
            )
    return table
