"""Sections about tools: which there are, how a policy uses them, and users that are simulated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from roll.configs.catalog.tool_table import TOOLS
from roll.configs.schema.fields import args_of, number, one_or_many


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """A server that speaks the Model Context Protocol. All its tools are offered under their own names."""

    command: tuple[str, ...] = one_or_many()
    """Program and arguments of a server that talks over its standard input and output; a text is split as a shell
    does. It is started with the run, once. Empty: the server has a `url`."""
    url: str | None = None
    """Address of a server that talks over streamable HTTP, e.g. `http://localhost:8000/mcp`. null: it has a
    `command`."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables of that program's environment, besides `PATH`, `HOME` and the like."""
    pass_env: tuple[str, ...] = one_or_many()
    """Names of variables of the run's environment that the program gets too, such as keys: their values stand in no
    file."""
    cwd: str | None = None
    """Folder that the program runs in. null: the run's."""
    token_env: str | None = None
    """Environment variable whose value is sent to `url` as a bearer token. null: none is sent."""
    tools: tuple[str, ...] = one_or_many()
    """Tools of the server that are offered. Empty: all."""
    start_timeout_s: float = number(30.0, gt=0)
    """Seconds that it may take to start and list its tools."""


@dataclass(frozen=True, kw_only=True)
class ToolConfig:
    """A tool, or an MCP server with several."""

    name: str
    """What the policy calls it: `python`, `calculator` and `retrieval` are built in; another name has a `path` or
    `mcp`. Of an MCP server it names the entry alone."""
    path: str | None = None
    """A function or class of your own, as `package.module:name` or `path/to/file.py:name`. null: built in, or `mcp`."""
    mcp: McpServer | None = None
    """An MCP server. null: none."""
    description: str | None = None
    """What the policy is told that it does. null: what its docstring says, or its own description."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments. null: read off the type hints and the docstring of a function, or a class's own."""
    options: dict[str, Any] = args_of("name", TOOLS)
    """Options of a built-in tool, arguments of a class, or arguments of a function that the policy isn't shown; an
    unknown one is refused."""
    timeout_s: float = number(30.0, gt=0)
    """Seconds of a call; beyond, the policy is told so."""
    max_reply_tokens: int | None = number(1024, ge=1)
    """A longer reply is cut (`tool_use.cut_replies`), with a note of how much is missing. null: no limit."""
    concurrency: int = number(16, ge=1)
    """Calls of it that run at once; others wait, within their `timeout_s`."""


@dataclass(frozen=True, kw_only=True)
class ToolUseConfig:
    """How a policy uses tools."""

    parser: str = "auto"
    """How calls are written: `hermes` (Qwen 2.5 and 3), `qwen_coder` (Qwen3.5, Nemotron 3), `seed_oss`, `glm`, `llama`,
    `mistral`, `gemma`, `harmony` (gpt-oss), `deepseek`, `kimi`, `json`, or a function of your own by its path. `auto`:
    the one that gives back what the chat template writes; where none does, `roll check` says so."""
    thinking_tags: tuple[str, str] | None = None
    """Opening and closing tag of text that is thought, e.g. `["<think>", "</think>"]`: calls in it aren't made. null:
    `<think>` and `</think>` where the chat template itself opens the thought, else there are no such tags."""
    max_turns: int = number(8, ge=1)
    """Responses of an episode, or of an environment's step, at most; the calls of the last one aren't made."""
    max_parallel_calls: int = number(8, ge=1, le=32)
    """Calls of one response that are made; those beyond are refused with a sentence."""
    cut_replies: Literal["left", "middle", "right"] = "middle"
    """Which part of a reply that is too long is left out."""


@dataclass(frozen=True, kw_only=True)
class InteractionConfig:
    """A simulated user: it answers responses that call no tool, until it says that the conversation is over."""

    name: str
    """What `rewards.<domain>.interaction` or a row's `interaction_kwargs.name` calls it."""
    path: str | None = None
    """A class of your own, as `package.module:Class` or `path/to/file.py:Class`, with the methods of
    `roll.envs.tools.interactions:BaseInteraction`. null: a model at `endpoint`."""
    config: dict[str, Any] = field(default_factory=dict)
    """What that class is made with, as one mapping."""
    endpoint: str | None = None
    """Address of an OpenAI-compatible service whose model plays the user, e.g. `http://localhost:8000/v1`. null: a
    class at `path`."""
    model: str | None = None
    """The model's name there."""
    api_key_env: str | None = None
    """Environment variable that holds the service's key. null: no key is sent."""
    prompt: str = (
        "You play a user who talks to an assistant. Answer its last message in the user's words, briefly. "
        "If the assistant has done what you wanted, or can't, write [DONE]. What you want: {goal}"
    )
    """System message of that model; `{goal}`, and other names in braces, stand for what the row's `interaction_kwargs`
    say."""
    request_args: dict[str, Any] = field(default_factory=dict)
    """Further fields of a request's body, e.g. `temperature`."""
    score_weight: float = 1.0
    """Factor of what it scores, turn by turn, in the episode's reward; the domain's own reward is added."""
    timeout_s: float = number(60.0, gt=0)
    """Seconds for one answer; beyond, the episode has status `timeout`."""
