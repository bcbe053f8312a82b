"""`roll tools`: the tools that come with the framework, and those of a configuration, as a policy meets them."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from roll.cli.exits import Exit
from roll.configs.catalog.tool_table import TOOLS
from roll.configs.parsing.find import find_config
from roll.configs.parsing.loader import load_config
from roll.configs.schema.rl_config import RLConfig
from roll.types.chat import ToolCall, ToolSpec
from roll.types.trajectory import EpisodeError, Task
from roll.utils.console import Console
from roll.utils.importing import load_object

SAMPLES: dict[str, dict[str, Any]] = {
    "python": {"code": "print('hello')\n6 * 7"},
    "calculator": {"expression": "6 * 7"},
    "retrieval": {"query": "the"},
}
"""Calls of the built-in tools, which do no harm."""


def list_tools(options: argparse.Namespace) -> int:  # noqa: ARG001 - every command takes them
    """Print a table of the built-in tools."""
    table = Table("name", "what", "options")
    for name, entry in TOOLS.items():
        what = (load_object(entry.path).__doc__ or "").split("\n")[0]
        shown = [
            f"{key}={option.default!r}" if option.default is not None else key for key, option in entry.options.items()
        ]
        table.add_row(name, what, ", ".join(shown))
    Console(highlight=False).print(table)
    return Exit.DONE


def test_tools(options: argparse.Namespace) -> int:
    """Show each tool as the policy sees it, and call it; status 1 if a call failed."""
    from roll.envs.tools.toolbox import Toolbox

    file = find_config(options.file)
    config = load_config(file.parent, file.stem, options.overrides)
    if not isinstance(config, RLConfig) or not config.tools:
        raise ValueError(f"{file}: there are no tools in it; add a section, e.g. tools: [{{name: python}}]")
    names = [tool.name for tool in config.tools]
    with Toolbox(config.tools, sandbox=config.sandbox) as toolbox:
        specs = toolbox.specs(names)
        calls = _calls(options.call, specs)
        sys.stdout.write(_shown(config, specs))
        rows = asyncio.run(_called(toolbox, names, specs, calls))
    table = Table("tool", "called with", "result", "seconds", "what the policy is shown")
    for name, arguments, result, seconds, text in rows:
        style = {"ok": "green", "not called": "yellow"}.get(result, "bold red")
        table.add_row(name, arguments, Text(result, style=style), seconds, Text(text))
    Console(highlight=False).print(table)
    return Exit.FAILED if any(row[2] in ("error", "FAILED") for row in rows) else Exit.DONE


def _calls(texts: Sequence[str], specs: Sequence[ToolSpec]) -> list[ToolCall]:
    """Return what is called: what `--call` says, and samples of the others where there are some."""
    calls: list[ToolCall] = []
    known = [spec.name for spec in specs]
    for text in texts:
        name, _, arguments = text.partition("=")
        if name not in known:
            raise ValueError(f"--call: there is no tool {name!r}; there are {', '.join(known)}")
        calls.append(ToolCall(f"call{len(calls):05d}", name, arguments or "{}"))
    for spec in specs:
        if spec.name in {call.name for call in calls}:
            continue
        if spec.name in SAMPLES:
            calls.append(ToolCall(f"call{len(calls):05d}", spec.name, json.dumps(SAMPLES[spec.name])))
        elif not spec.parameters.get("properties"):
            calls.append(ToolCall(f"call{len(calls):05d}", spec.name, "{}"))
    return calls


async def _called(
    toolbox: Any, names: Sequence[str], specs: Sequence[ToolSpec], calls: Sequence[ToolCall]
) -> list[Any]:
    task = Task(id="test", source="roll tools test", payload={}, seed=0, tag="test", domain="test")
    episode, rows = toolbox.open(names, task, {}), []
    try:
        for call in calls:
            begun = time.monotonic()
            try:
                (one,) = await episode.run([call])
                result, text = "error" if one.counts.get("errors") else "ok", one.text
            except EpisodeError as error:
                result, text = "FAILED", str(error)
            rows.append((call.name, call.arguments, result, f"{time.monotonic() - begun:.2f}", text[:500]))
    finally:
        await episode.aclose()
    for spec in specs:
        if spec.name not in {call.name for call in calls}:
            rows.append((spec.name, "", "not called", "", f"give it arguments: --call '{spec.name}={{...}}'"))
    return rows


def _shown(config: RLConfig, specs: Sequence[ToolSpec]) -> str:
    """Return the prompt that tells of the tools, where the tokenizer is at hand; else what its template is given."""
    from roll.pipelines.workers.train_worker import resolved_model_args
    from roll.rollout.tool_forms import resolve_parser

    args = resolved_model_args(config, "actor_train")
    if not Path(str(args.tokenizer_name_or_path or args.model_name_or_path)).expanduser().is_dir():
        described = "\n".join(json.dumps(spec.for_template(), ensure_ascii=False, indent=2) for spec in specs)
        return f"What the chat template is given ({args.model_name_or_path} isn't a folder here):\n{described}\n"
    from roll.envs.base import Message
    from roll.rollout.chat_format import ChatTemplate
    from roll.strategies.training.pretrained import load_tokenizer

    tokenizer = load_tokenizer(args)
    prompt = ChatTemplate(tokenizer).text([Message("user", "...")], specs)
    parser = resolve_parser(config.tool_use.parser, tokenizer)
    return f"What the policy is told (calls are read as {parser}):\n{prompt}\n"
