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
    parser.add_argument("--response", help="text of a response, with {action} (default: what action_pattern looks for)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the configuration")
    parser.set_defaults(run=write_demos)


def write_demos(options: argparse.Namespace) -> int:
    """Writes the file."""
    if options.episodes < 1:
        raise ValueError(f"--episodes: got {options.episodes}, expected at least 1")
    if options.output.suffix != ".jsonl":
        raise ValueError(f"{options.output}: expected a name that ends in .jsonl, which pipeline sft goes by")
    if options.output.is_dir():
        raise ValueError(f"{options.output} is a folder, expected the file to write")
    config = load_config(options.file.parent, options.file.stem, options.overrides)
    if not isinstance(config, AgenticConfig):
        raise ValueError(f"{options.file} is a file of pipeline {config.pipeline}, expected one of pipeline agentic")
    rows = list(demonstrations(config, options.episodes, response=options.response))
    if not rows:
        raise ValueError(
            f"none of {options.episodes} episodes is solved within its max_steps, nothing was written; raise "
            "custom_envs.<tag>.max_steps or max_actions_per_step"
        )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    temporary = options.output.with_name(options.output.name + ".tmp")
    temporary.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    temporary.replace(options.output)
    solved = len({(row["tag"], row["seed"]) for row in rows})
    said = f"{len(rows)} rows of {solved} episodes in {options.output}"
    if solved < options.episodes:
        said += f"; {options.episodes - solved} weren't solved within max_steps"
    Console(highlight=False, markup=False, soft_wrap=True).print(said)
    return 0
