"""Whether the tokenizer's chat template can do what a configuration wants of it: carry turns, show tools, be read.

For `roll check` and before a run, where the tokenizer is in a folder of this machine; a run asks the same at its start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from roll.configs.errors import Violation, problem
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.run_config import RunConfig
from roll.types.chat import ToolSpec

MakeAgent = Callable[[str], Any]
"""By the name of a domain or an environment: they may have variables of the template of their own."""

_TOOL = ToolSpec("look_up", "Look up a word.", {"type": "object", "properties": {"word": {"type": "string"}}})


def template_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield what the chat template can't do; nothing where no turn follows another, or the tokenizer isn't here."""
    if not isinstance(config, RLConfig) or config.replays or not _has_turns(config):
        return
    tokenizer = _tokenizer(config)
    if tokenizer is None:
        return
    from roll.data.templates import TemplateError
    from roll.rollout.agent import Agent

    def agent(name: str) -> Agent:
        return Agent(tokenizer, variables=config.template_variables(name))  # type: ignore[attr-defined]

    try:
        if isinstance(config, RLVRConfig):
            yield from _of_domains(config, agent, tokenizer)
        elif isinstance(config, AgenticConfig):
            yield from _of_environments(config, agent, tokenizer)
    except TemplateError:  # variables that the template doesn't read, which their own check says
        return


def _has_turns(config: RLConfig) -> bool:
    if isinstance(config, RLVRConfig):
        return any(reward.tools or reward.interaction for reward in config.rewards.values())
    return isinstance(config, AgenticConfig)


def _tokenizer(config: RLConfig) -> Any:
    """Return the tokenizer; None where it isn't a folder here or can't be loaded, which others say."""
    from roll.workers.train import resolved_model_args

    args = resolved_model_args(config, "actor_train")
    if not Path(str(args.tokenizer_name_or_path or args.model_name_or_path)).expanduser().is_dir():
        return None
    from roll.strategies.hf.hf_model import load_tokenizer

    try:
        return load_tokenizer(args)
    except Exception:  # noqa: BLE001 - whatever a folder of someone else's makes transformers raise
        return None


def _of_domains(config: RLVRConfig, agents: MakeAgent, tokenizer: Any) -> Iterator[Violation]:
    tags = config.tool_use.thinking_tags
    for domain, reward in config.rewards.items():
        path = f"rewards.{domain}"
        if reward.rollout is not None or not (reward.tools or reward.interaction):
            continue
        agent = agents(domain)
        if reward.tools:
            yield from _of_tools(config, agent, tokenizer, f"{path}.tools")
        if reward.interaction is not None:
            yield from _refused(f"{path}.interaction", lambda a=agent: a.check_carries(tags))


def _of_environments(config: AgenticConfig, agents: MakeAgent, tokenizer: Any) -> Iterator[Violation]:
    from roll.rollout.conversation import Conversation
    from roll.rollout.tool_forms import resolve_parser

    for tag, env in config.custom_envs.items():
        path, tags = f"custom_envs.{tag}", env.thinking_tags
        if env.agent is not None:
            parser = env.agent.tool_parser
            if getattr(tokenizer, "chat_template", None):
                yield from _refused(f"{path}.env_config.tool_parser", lambda p=parser: resolve_parser(p, tokenizer))
            continue
        agent = agents(tag)
        yield from _refused(f"{path}.thinking_tags", lambda a=agent, t=tags: a.forced_think_prefix(t))
        if Conversation(tag=tag, env=env, sample_unit=config.sample_unit).carries:
            yield from _refused(f"{path}.env_type", lambda a=agent, t=tags: a.check_carries(t))
        if env.tools:
            yield from _of_tools(config, agent, tokenizer, f"{path}.tools")


def _of_tools(config: RLConfig, agent: Any, tokenizer: Any, path: str) -> Iterator[Violation]:
    from roll.rollout.tool_forms import resolve_parser

    use = config.tool_use
    yield from _refused("tool_use.thinking_tags", lambda: agent.forced_think_prefix(use.thinking_tags))
    yield from _refused("tool_use.parser", lambda: resolve_parser(use.parser, tokenizer))
    yield from _refused(path, lambda: agent.check_carries_calls(use.thinking_tags, [_TOOL]))


def _refused(path: str, ask: Any) -> Iterator[Violation]:
    from roll.data.templates import TemplateError

    try:
        ask()
    except (TemplateError, ValueError) as error:
        yield problem(path, str(error), "")
