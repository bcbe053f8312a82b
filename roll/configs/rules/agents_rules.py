"""Rules about agents of `env_type: endpoint`. Each yields what is wrong."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import fields

from roll.configs.catalog.harness_table import HARNESSES, SIDE_PROMPTS, harness_meant
from roll.configs.errors import Violation, no_effect, problem
from roll.configs.rules.tools_rules import parser_rule
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.agents_config import AGENT_ENV, NEVER_IGNORED, AgentEnv, GatewayConfig
from roll.configs.schema.env_config import CustomEnv

_SHOWN_BY_AGENT = (
    "max_steps", "max_actions_per_step", "action_separator", "action_pattern", "action_lookup", "system_template",
    "turn_template", "history_length", "tools", "roles", "swap_roles", "role_rewards",
)  # fmt: skip
"""Keys of `custom_envs.<tag>` that say how an environment is told: an agent tells the policy what it likes."""
_INSTEAD = {"max_steps": "env_config.max_calls"}


def agent_rules(config: AgenticConfig) -> Iterator[Violation]:
    """Check each kind of agent by itself."""
    agents = {tag: env for tag, env in config.custom_envs.items() if env.env_type == AGENT_ENV}
    for tag, env in agents.items():
        path = f"custom_envs.{tag}"
        for name in _SHOWN_BY_AGENT:
            value, default = getattr(env, name), CustomEnv.__dataclass_fields__[name].default
            if value != default and value != {}:
                fix = f"{path}.{_INSTEAD[name]}={value}" if name in _INSTEAD else "remove it"
                why = " with env_type endpoint: the agent writes the prompts"
                yield no_effect(f"{path}.{name}", why, fix, value)
        if env.agent is None:
            expected = "a section that says what plays: command, agent or remote"
            yield Violation(f"{path}.env_config", expected, 'env_config: {command: "python my_agent.py"}', {})
        else:
            yield from _agent(f"{path}.env_config", env.agent)
            if env.agent.timeout_s > config.rpc_timeout:
                expected = f"at most rpc_timeout ({config.rpc_timeout:g}), after which the run takes itself for stalled"
                fix = f"rpc_timeout={env.agent.timeout_s:g}"
                yield Violation(f"{path}.env_config.timeout_s", expected, fix, env.agent.timeout_s)
    trained = {tag for tag in agents if not config.val_only and tag in config.tags_of(config.train_env_manager)}
    if trained and "states" in config.estimator.needs:
        expected = "one that doesn't compare turns that met the same state: requests of agents name no states"
        yield Violation("adv_estimator", expected, "adv_estimator=reinforce", config.adv_estimator)
    if agents and config.sample_unit != "trajectory":
        expected = "trajectory with env_type endpoint: what its rows are follows from the requests of its agents"
        yield Violation("sample_unit", expected, "remove it", config.sample_unit)


def gateway_rules(config: AgenticConfig) -> Iterator[Violation]:
    """Check the endpoint that all agents have in common."""
    agents = [env.agent for env in config.custom_envs.values() if env.agent is not None]
    default, address = GatewayConfig(), config.gateway.address
    for spec in fields(GatewayConfig) if not agents else ():
        value = getattr(config.gateway, spec.name)
        if value != getattr(default, spec.name):
            yield no_effect(f"gateway.{spec.name}", " without an environment of env_type endpoint", "remove it", value)
    if agents and config.gateway.token_env is not None and not any(agent.remote for agent in agents):
        why = " without an agent with remote: true"
        yield no_effect("gateway.token_env", why, "remove it", config.gateway.token_env)
    if agents and address is not None and not address.startswith(("http://", "https://")):
        expected = "an address that begins with http:// or https://"
        yield Violation("gateway.address", expected, f"http://{address}", address)


def _agent(path: str, agent: AgentEnv) -> Iterator[Violation]:
    named = [name for name in ("command", "agent", "remote") if getattr(agent, name)]
    if len(named) != 1:
        expected = "one of command, agent and remote" if not named else f"one of {' and '.join(named)}"
        yield Violation(path, expected, "keep one", named or {})
    if isinstance(agent.command, str):
        try:
            shlex.split(agent.command)
        except ValueError as error:
            fix = "close the quotation, or write a list of words"
            yield Violation(f"{path}.command", f"words as a shell reads them; {error}", fix, agent.command)
    yield from _score(path, agent)
    yield from _requests(path, agent)
    yield from parser_rule(f"{path}.tool_parser", agent.tool_parser)
    for name in sorted(agent.models):
        if name.split("/")[0] == "policy":
            expected = "a name that isn't policy or policy/<role>: these are the model that learns"
            yield Violation(f"{path}.models.{name}", expected, "", name)
        url = agent.models[name].base_url
        if not url.startswith(("http://", "https://")):
            yield Violation(
                f"{path}.models.{name}.base_url", "an address that begins with http:// or https://", "", url
            )


def _requests(path: str, agent: AgentEnv) -> Iterator[Violation]:
    for name in agent.ignore_fields:
        if name in NEVER_IGNORED:
            expected = "fields that can be left out: without this one a request says something else"
            yield Violation(f"{path}.ignore_fields", expected, "remove it", name)
        elif (meant := harness_meant(name)) is not None:
            expected = f"a field of requests, or a harness: {', '.join(HARNESSES)}"
            yield Violation(f"{path}.ignore_fields", expected, f"did you mean {meant}?", name)
    for name in agent.side_calls:
        if name.split("/")[0] == "policy" or name in agent.models:
            expected = "no name of the policy itself, whose calls are the task, nor one of models, which aren't trained"
            yield Violation(f"{path}.side_calls", expected, "give these calls a model's name of their own", name)
        elif not name.split() or (name in HARNESSES and name not in SIDE_PROMPTS):
            known = f"a model's name, words of a system message, or one of {', '.join(SIDE_PROMPTS)}"
            fix = "have the harness give them a model's name of their own, and write that here"
            yield Violation(f"{path}.side_calls", f"{known}: of other harnesses no such calls are known", fix, name)


def _score(path: str, agent: AgentEnv) -> Iterator[Violation]:
    source, key = agent.score_source, f"{path}.score"
    who = "remote" if agent.remote else "agent" if agent.agent is not None else "command"
    known = {
        "command": ("output", "exit", "callback", "reward"),
        "agent": ("return", "callback", "reward"),
        "remote": ("callback", "reward"),
    }[who]
    if source not in known:
        yield Violation(key, f"one of {', '.join(known)} with {who}", f"score={known[0]}", source)
    if agent.exit_rewards is not None and source != "exit":
        yield no_effect(f"{path}.exit_rewards", f" with score {source}", "score=exit, or remove it", agent.exit_rewards)
    if source == "exit" and source in known and not agent.exit_rewards:
        needs = "score: exit needs the codes that are worth something; 1 is also that of a Python program that crashed"
        yield problem(f"{path}.exit_rewards", needs, "exit_rewards: {0: 1.0, 3: 0.0}")
    if source == "reward" and agent.reward is None:
        yield problem(f"{path}.reward", "score: reward needs the function that gives it", "reward: {name: math_rule}")
    if agent.remote and agent.logs != "failed":
        yield no_effect(
            f"{path}.logs", " with remote: what such an agent prints isn't seen here", "remove it", agent.logs
        )


def warnings(config: AgenticConfig) -> Iterator[str]:
    """Yield what is allowed but probably not meant."""
    for tag, env in config.custom_envs.items():
        agent = env.agent
        if agent is None or agent.max_agents is None:
            continue
        most = config.train_env_manager.episodes_at_once
        if agent.max_agents < most // 4:
            yield (
                f"custom_envs.{tag}.env_config.max_agents is {agent.max_agents}, and {most} episodes are played at "
                "once: most of them wait, and the engine has few to compute together"
            )
