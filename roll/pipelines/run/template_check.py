"""Whether the tokenizer's chat template can do what a configuration wants of it: carry turns, show tools, be read.

For `roll check` (check_process.py), where the tokenizer is in a folder of this machine; a run asks the same at its
start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.worker_config import ModelArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a key wants of the chat template.

    `tags`: that they show in a response. `turns`: to carry a conversation. `calls`: to carry rounds of calls. `parser`:
    to write calls in a form that is read.
    """

    path: str
    kind: Literal["tags", "turns", "calls", "parser"]
    tags: tuple[str, str] | None = None
    parser: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict)


def tokenizer_args(config: RunConfig) -> ModelArgs:
    """Return whose tokenizer the policy has."""
    return replace(
        config.sections["actor_train"].model_args,
        model_name_or_path=config.model_path("actor_train"),
        tokenizer_name_or_path=config.tokenizer_path("actor_train"),
    )


def questions(config: RunConfig) -> Iterator[Question]:
    """Yield what a configuration wants of its chat template."""
    if not isinstance(config, RLConfig) or config.replays:
        return
    if isinstance(config, RLVRConfig):
        for domain, reward in config.rewards.items():
            path = f"rewards.{domain}"
            if reward.rollout is None and reward.tools:
                yield from _of_tools(config, f"{path}.tools", config.template_variables(domain))
            if reward.rollout is None and reward.interaction is not None:
                tags, variables = config.tool_use.thinking_tags, config.template_variables(domain)
                yield Question(path=f"{path}.interaction", kind="turns", tags=tags, variables=variables)
    elif isinstance(config, AgenticConfig):
        yield from _of_environments(config)


def _of_environments(config: AgenticConfig) -> Iterator[Question]:
    for tag, env in config.custom_envs.items():
        path, variables = f"custom_envs.{tag}", config.template_variables(tag)
        if env.agent is not None:
            parser = env.agent.tool_parser
            yield Question(path=f"{path}.env_config.tool_parser", kind="parser", parser=parser, variables=variables)
            continue
        yield Question(path=f"{path}.thinking_tags", kind="tags", tags=env.thinking_tags, variables=variables)
        if config.sample_unit == "trajectory" or (config.sample_unit == "concat" and env.history_length != 0):
            yield Question(path=f"{path}.env_type", kind="turns", tags=env.thinking_tags, variables=variables)
        if env.tools:
            yield from _of_tools(config, f"{path}.tools", variables)


def _of_tools(config: RLConfig, path: str, variables: Mapping[str, Any]) -> Iterator[Question]:
    use = config.tool_use
    yield Question(path="tool_use.thinking_tags", kind="tags", tags=use.thinking_tags, variables=variables)
    yield Question(path="tool_use.parser", kind="parser", parser=use.parser, variables=variables)
    yield Question(path=path, kind="calls", tags=use.thinking_tags, variables=variables)


def answers(tokenizer: Any, asked: Sequence[Question]) -> list[tuple[str, str]]:
    """Return what can't be done, by key."""
    from roll.rollout.agent import Agent
    from roll.rollout.tool_forms import resolve_parser
    from roll.types.chat import ToolSpec

    tool = ToolSpec("look_up", "Look up.", {"type": "object", "properties": {"word": {"type": "string"}}})
    problems = []
    for question in asked:
        try:
            agent = Agent(tokenizer, variables=question.variables)
        except ValueError:  # variables that the template doesn't read, which their own check says
            continue
        try:
            if question.kind == "tags":
                agent.forced_think_prefix(question.tags)
            elif question.kind == "turns":
                agent.check_carries(question.tags)
            elif question.kind == "calls":
                agent.check_carries_calls(question.tags, [tool])
            elif getattr(tokenizer, "chat_template", None):
                resolve_parser(question.parser, tokenizer)
        except ValueError as error:  # TemplateError is one
            problems.append((question.path, str(error)))
    return list(dict.fromkeys(problems))
