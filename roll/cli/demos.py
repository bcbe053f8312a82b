"""`roll demos`: solved episodes as rows for fine-tuning."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from roll.configs.agentic import AgenticConfig
from roll.configs.loader import load_config
from roll.rollout.demonstrations import demonstrations


def add_to(groups: Any) -> None:
    """Adds the command to the parser of `roll`."""
    parser = groups.add_parser("demos", help="episodes that environments solve themselves, as rows for pipeline sft")
    parser.add_argument("file", type=Path, help="a configuration of pipeline agentic")
    parser.add_argument("output", type=Path, help="the jsonl file to write")
    parser.add_argument("--episodes", type=int, default=1000, help="how many are tried (default 1000)")
    parser.add_argument("--response", default="<answer>{action}</answer>", help="text of a response, with {action}")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the configuration")
    parser.set_defaults(run=write_demos)


def write_demos(options: argparse.Namespace) -> int:
    """Writes the file."""
    if options.episodes < 1:
        raise ValueError(f"--episodes: got {options.episodes}, expected at least 1")
    config = load_config(options.file.parent, options.file.stem, options.overrides)
    if not isinstance(config, AgenticConfig):
        raise ValueError(f"{options.file} is a file of pipeline {config.pipeline}, expected one of pipeline agentic")
    lines = [json.dumps(row) for row in demonstrations(config, options.episodes, response=options.response)]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    Console(highlight=False, markup=False).print(f"{len(lines)} rows in {options.output}")
    return 0
