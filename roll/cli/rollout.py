"""`roll rollout`: a model plays environments, nothing is trained."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from roll.api.launch import load
from roll.cli.exits import Exit
from roll.cli.train import run
from roll.configs.catalog.env_table import ENVS
from roll.configs.parsing.loader import to_yaml
from roll.configs.schema.agentic_config import AgenticConfig
from roll.tracking.drops import last_words
from roll.utils.terminal import say

PICTURES = 4
"""Episodes per environment that `render_save_dir` draws and `samples.jsonl` shows."""


def rollout(options: argparse.Namespace) -> int:
    """Write the configuration that the options stand for to `<output_dir>/rollout.yaml`, and run it."""
    for name in ("episodes", "max_steps"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name}: got {getattr(options, name)}, expected at least 1")
    if options.output_dir.exists() and not options.output_dir.is_dir():
        raise ValueError(f"--output_dir: {options.output_dir} is a file, expected a folder")
    options.output_dir.mkdir(parents=True, exist_ok=True)
    file = options.output_dir / "rollout.yaml"
    file.write_text(yaml.safe_dump(configuration(options), sort_keys=False), encoding="utf-8")
    config = load(file, options.overrides)
    if not isinstance(config, AgenticConfig):
        raise ValueError(f"pipeline: got {config.pipeline}, expected agentic, which alone plays environments")
    file.write_text(to_yaml(config), encoding="utf-8")  # all that was played, overrides included
    status = run(config)
    return _all_failed(options.output_dir) if status == Exit.DONE else status


def _all_failed(folder: Path) -> int:
    """Return `Exit.FAILED`, with a reason, if no episode came to its end."""
    scores = json.loads((folder / "scores.json").read_text(encoding="utf-8"))["scores"]
    if any(score["failed"] < score["episodes"] for score in scores):
        return Exit.DONE
    say(f"error: every episode failed, the first because of: {last_words(scores[0]['first_failure'])}")
    return Exit.FAILED


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration that the options stand for."""
    tags = _tags(options.env)
    return {
        "pipeline": "agentic",
        "exp_name": "rollout",
        "executor": "inline" if options.engine == "hf_infer" else "ray",
        "output_dir": str(options.output_dir),
        "rollout_dump_dir": str(options.output_dir / "episodes"),
        "track_with": ["jsonl"],
        "pretrain": options.model,
        "val_only": True,
        "log_val_generations": PICTURES * len(tags),
        "custom_envs": {tag: {"env_type": env, "max_steps": options.max_steps} for tag, env in tags.items()},
        "val_env_manager": {"num_env_groups": options.episodes * len(tags)},
        "actor_infer": {"strategy_args": {"strategy_name": options.engine}},
    }


def _tags(envs: Sequence[str]) -> dict[str, str]:
    """Return environments by names for metrics: the id, or the class; a second one of that name is numbered."""
    tags: dict[str, str] = {}
    for env in envs:
        name = re.sub(r"\W+", "_", env if env in ENVS else env.rpartition(":")[2]) or "env"
        tag, number = name, 1
        while tag in tags:
            number += 1
            tag = f"{name}_{number}"
        tags[tag] = env
    return tags
