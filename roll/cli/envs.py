"""`roll envs list` and `roll envs test`."""

from __future__ import annotations

import argparse
import inspect
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from roll.cli.command_parser import from_yaml, key_values
from roll.configs.catalog.env_table import ENV_HUBS, ENVS
from roll.configs.errors import ConfigError
from roll.configs.parsing.build_config import build
from roll.configs.schema.env_config import CustomEnv
from roll.envs.baselines import BaselineScore
from roll.envs.conformance import makes_others_useless
from roll.envs.env_messages import Packed, unpack_observation
from roll.envs.env_probe import (
    EnvProbes,
    ProbeEnded,
    Refused,
    findings_of,
    findings_of_responses,
    other_interpreter,
    scores_of,
    taken,
)
from roll.envs.env_registry import load_env
from roll.envs.probe_worker import ProbeRequest
from roll.envs.recorded_env import read_responses
from roll.envs.trial import EnvFinding
from roll.envs.wrappers import EnvSpec
from roll.utils.console import Console
from roll.utils.terminal import printable

MAX_TURNS, MAX_CHARACTERS = 12, 3000


def episode_lines(spec: EnvSpec, played: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (role, text, colour) of every message, and what each response led to.

    `played`: as `roll.envs.episode_shown` gives it. The messages are made by what makes those of a run.
    """
    from roll.rollout.conversation import Conversation  # brings torch, which `roll envs list` needn't wait for

    conversation = Conversation(tag=spec.tag, env=spec, instructions=played["instructions"])
    packed: Packed | None = played["observation"]
    steps: Counter[str] = Counter()  # Of each role; "" where there are none
    for number, (response, step) in enumerate(played["turns"], 1):
        reward, terminated, truncated, following, _, metrics, role_rewards = step
        assert packed is not None, "nothing is played after the end"
        observation = unpack_observation(packed)
        role = observation.role
        whose = f" ({role})" if role else ""
        for message in conversation.system(role) if not steps[role] else ():
            yield f"{message.role}{whose}", _cut(message.content), "magenta"
        steps[role] += 1
        for message in conversation.shown(observation, steps[role], spec.max_tokens_per_step or 0):
            yield f"{message.role}{whose}", _cut(message.content), "blue"
        yield f"assistant{whose}", _cut(response), "green"
        counted = ", ".join(f"{name} {value:g}" for name, value in metrics.items() if value and name != "actions")
        paid = "".join(f", {name} {value:g}" for name, value in role_rewards.items())
        end = ", terminated" if terminated else ", truncated" if truncated else ""
        yield f"reward {reward:g}{paid}{end}{', ' if counted else ''}{counted}", "", "yellow"
        packed = following
        if number == MAX_TURNS and number < len(played["turns"]):
            yield f"{len(played['turns']) - number} further turns", "", "yellow"
            return


def _cut(text: str) -> str:
    left = len(text) - MAX_CHARACTERS
    return text if left <= 0 else f"{text[:MAX_CHARACTERS]}... ({left:,} further characters)"


MARKS = {
    "ok": ("ok", "green"),
    "info": ("note", "cyan"),
    "warning": ("warning", "yellow"),
    "error": ("ERROR", "bold red"),
}
"""Word and style of each level of a finding."""


def list_envs(options: argparse.Namespace) -> int:  # noqa: ARG001 - every command takes them
    """Print a table of the bundled environments, and of the packages whose environments can be named."""
    table = Table("id", "what", "arguments")
    examples = {f"{scheme}:...": hub.example for scheme, hub in ENV_HUBS.items()}
    for shown, env_type in {**{name: name for name in ENVS}, **examples}.items():
        env_class = load_env(env_type)
        parameters = inspect.signature(env_class).parameters.values()
        what = (env_class.__doc__ or "").split("\n")[0]
        table.add_row(shown, what, ", ".join(_argument(parameter) for parameter in parameters))
    Console(highlight=False).print(table)
    return 0


def test_env(options: argparse.Namespace) -> int:
    """Print tables of findings and scores, and an episode; status 1 if something is wrong."""
    console = Console(highlight=False)
    for name in ("seeds", "episodes", "steps", "timeout_s", "check_s"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name}: got {getattr(options, name)}, expected at least 1")
    content = _content(options.config)
    spec = _spec(options.env, content, options.config, options.arguments)
    python = _interpreter(options.python, content)
    recorded = read_responses(options.responses) if options.responses is not None else []
    order = ProbeRequest(spec, options.seeds, options.steps, options.timeout_s, options.check_s)
    with EnvProbes(os.environ, timeout_s=options.timeout_s, python=python) as probes:
        _make(probes, order)
        findings = list(findings_of(probes, order))
        order = taken(probes, order)
        findings += findings_of_responses(probes, order, recorded) if recorded else []
        console.print(_findings_table(spec, findings))
        wrong = sum(finding.level == "error" for finding in findings)
        if not makes_others_useless(findings):
            _print_episode(console, probes, order)
        if not wrong:
            _print_scores(console, probes, order, options.episodes)
            return 0
    console.print(f"{wrong} error(s): see docs/environments.md", style="bold red")
    return 1


def _make(probes: EnvProbes, order: ProbeRequest) -> None:
    """Raise `ValueError` if the environment can't be made."""
    spec = order.spec
    try:
        probes.get().ask("made", order)
    except Refused as error:
        message = str(error).removeprefix(f"custom_envs.{spec.tag}.")
        raise ValueError(f"{message}\n  at {error.where}" if error.where else message) from None
    except ProbeEnded as error:
        raise ValueError(f"{spec.env_type} can't be made: {error}") from None


def _print_episode(console: Console, probes: EnvProbes, order: ProbeRequest) -> None:
    """Print one episode as the policy sees it."""
    assert order.seeds is not None, "they are settled"
    try:
        played = probes.get().ask("episode", order, order.seeds[0])
    except (ProbeEnded, Refused) as error:
        console.print(printable(f"no episode to show: {error}"), markup=False, style="yellow")
        return
    console.print(f"\nOne episode as the policy sees it (seed {order.seeds[0]})", style="bold")
    for role, text, style in episode_lines(order.spec, played):
        console.print(f"[{role}]", style=f"bold {style}", markup=False)
        console.print(printable(text), markup=False)
    console.print()


def _print_scores(console: Console, probes: EnvProbes, order: ProbeRequest, episodes: int) -> None:
    try:
        console.print(_scores_table(scores_of(probes, order, episodes)))
    except (ProbeEnded, Refused) as error:
        message = f"no scores: {error}; fewer --episodes take less time, and --check_s allows more"
        console.print(printable(message), markup=False, style="yellow")


def _content(config: Path | None) -> dict[str, Any]:
    """Return what the file has; nothing without a file."""
    if config is None:
        return {}
    if not config.is_file():
        raise ValueError(f"--config: there is no file {str(config)!r}")
    content = from_yaml(config.read_text("utf-8"), f"--config: {config}") or {}
    if not isinstance(content, dict):
        raise ValueError(f"--config: {config} holds {type(content).__name__}, expected keys and values")
    return content


def _interpreter(requested: str | None, content: Mapping[str, Any]) -> str | None:
    """Return the interpreter of the option, else that of the file's env_workers; None for this one."""
    workers = content.get("env_workers")
    named = workers.get("python") if isinstance(workers, dict) and "custom_envs" in content else None
    key, python = ("--python", requested) if requested is not None else ("env_workers.python", named)
    if python is None:
        return None
    try:
        return other_interpreter(python)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _spec(env: str, content: Mapping[str, Any], config: Path | None, arguments: Sequence[str]) -> EnvSpec:
    section, env_config = CustomEnv(env_type=env), dict(content)
    if "custom_envs" in content:
        assert config is not None, "nothing without a file"
        section = _section(content["custom_envs"], env, config)
        assert isinstance(section.env_config, dict)
        env_config = dict(section.env_config)
    env_config.update(key_values(arguments, "e.g. size=5"))
    tag = Path(env).stem if ".py" in env else env
    return EnvSpec(tag=tag, **{**vars(section), "env_config": env_config})


def _section(sections: Any, tag: str, file: Path) -> CustomEnv:
    """Return what `custom_envs` of a file has for a tag."""
    if not isinstance(sections, dict):
        raise ValueError(f"--config: custom_envs in {file} is {sections!r}, expected keys and values")
    if tag not in sections:
        raise ValueError(f"--config: custom_envs in {file} has no tag {tag!r}; it has {', '.join(map(str, sections))}")
    section, violations = build(CustomEnv, sections[tag], f"custom_envs.{tag}")
    if section is None:
        raise ConfigError(violations, str(file))
    if section.agent is not None:
        raise ValueError(f"--config: custom_envs.{tag} in {file} is an agent, and no environment that could be tested")
    return section


def _argument(parameter: inspect.Parameter) -> str:
    if parameter.kind is parameter.VAR_KEYWORD:
        return "and the package's own"
    if parameter.default is parameter.empty:
        return f"{parameter.name} (needed)"
    default = f"{parameter.default:.4g}" if isinstance(parameter.default, float) else repr(parameter.default)
    return f"{parameter.name}={default}"


def _findings_table(spec: EnvSpec, findings: Sequence[EnvFinding]) -> Table:
    arguments = " ".join(f"{key}={value!r}" for key, value in spec.env_config.items())
    table = Table(
        "check", "result", "what was found", title=f"{spec.env_type} {arguments}".strip(), title_justify="left"
    )
    for finding in findings:
        word, style = MARKS[finding.level]
        message = Text(printable(finding.message))
        if finding.where:
            message.append(f"\n{printable(finding.where)}", style="dim")
        table.add_row(finding.check, Text(word, style=style), message)
    return table


def _scores_table(scores: Sequence[BaselineScore]) -> Table:
    table = Table("agent", "episodes", "success", "mean return", "mean steps", "steps/s")
    for score in scores:
        table.add_row(
            score.agent,
            str(score.episodes) + (f" ({score.unplayed} without)" if score.unplayed else ""),
            f"{score.success_rate:.1%}",
            f"{score.mean_return:.3g}",
            f"{score.mean_steps:.1f}",
            f"{1 / score.seconds_per_step if score.seconds_per_step else 0.0:,.0f}",
        )
    return table
