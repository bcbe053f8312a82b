"""`roll demos`: solved episodes as rows for fine-tuning."""

from __future__ import annotations

import argparse
import json

from roll.configs.parsing.find import find_config
from roll.configs.parsing.loader import load_config
from roll.configs.schema.agentic_config import AgenticConfig
from roll.rollout.demonstrations import demonstrations
from roll.utils.console import Console


def write_demos(options: argparse.Namespace) -> int:
    """Write the file."""
    if options.episodes < 1:
        raise ValueError(f"--episodes: got {options.episodes}, expected at least 1")
    if options.output.suffix != ".jsonl":
        raise ValueError(f"{options.output}: expected a name that ends in .jsonl, which pipeline sft goes by")
    if options.output.is_dir():
        raise ValueError(f"{options.output} is a folder, expected the file to write")
    file = find_config(options.file)
    config = load_config(file.parent, file.stem, options.overrides)
    if not isinstance(config, AgenticConfig):
        raise ValueError(f"{file} is a file of pipeline {config.pipeline}, expected one of pipeline agentic")
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
    message = f"{len(rows)} rows of {solved} episodes in {options.output}"
    if solved < options.episodes:
        message += f"; {options.episodes - solved} weren't solved within max_steps"
    Console(highlight=False, markup=False, soft_wrap=True).print(message)
    return 0
